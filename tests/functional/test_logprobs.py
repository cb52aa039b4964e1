"""Scores of tokens block by block, against one log-softmax of all logits and what autograd says the gradients are.

The head is a function of the model, or known to be one matrix. Legend: N tokens, D hidden size, V vocabulary.
"""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pl_grouprl.functional.logprobs import token_scores
from pl_grouprl.functional.softmax import HeadSketch

N, D, V = 11, 6, 17


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 5, 5, 5 and 2 token ids for a head that is a matrix."""
    monkeypatch.setattr("pl_grouprl.functional.logprobs.BLOCK", 5)


def problem(dtype=torch.float64, n=N, frozen=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(not frozen)
    return hidden, weight, torch.randint(V, (n,), generator=generator)


def not_called(hidden):
    raise AssertionError("a head known to be one matrix needs no call of the model")


def score(hidden, weight, targets, known, **options):
    if known:
        return token_scores(hidden, targets, not_called, weight_VD=weight, **options)
    return token_scores(hidden, targets, lambda h: h @ weight.T, **options)


def full(hidden, weight, targets, temperature=1.0):
    """The oracle: log-probabilities, entropies and score norms by one [N, V] log-softmax."""
    logits = (hidden @ weight.T).to(torch.promote_types(hidden.dtype, torch.float32)) / temperature
    logprobs = logits.log_softmax(-1)
    probs = logprobs.exp()
    own = logprobs.gather(1, targets[:, None]).squeeze(1)
    return own, -(probs * logprobs).sum(-1), 1 - 2 * own.exp() + probs.square().sum(-1)


# chunk_size decides how many blocks are kept and whether tokens are taken in parts.
SIZES = [(1, 2**18), (2, 12), (3, 1), (4, 1), (4, 12), (11, 2**18), (512, 12)]


@pytest.mark.parametrize(("chunk_size", "tile"), SIZES)
@pytest.mark.parametrize(("entropy_grad", "temperature"), [(False, 1.0), (False, 2.5), (True, 0.7), (True, 1.0)])
@pytest.mark.parametrize(("known", "frozen"), [(False, False), (True, False), (True, True)])
def test_values_and_gradients(known, frozen, entropy_grad, temperature, chunk_size, tile, monkeypatch):
    monkeypatch.setattr("pl_grouprl.functional.softmax._TILE", tile)
    hidden, weight, targets = problem(frozen=frozen)
    options = {"temperature": temperature, "chunk_size": chunk_size, "entropy": True, "entropy_grad": entropy_grad}
    scores = score(hidden, weight, targets, known, score_norm=True, **options)
    logprobs, entropy, norms = full(hidden, weight, targets, temperature)
    torch.testing.assert_close(scores[:3], (logprobs, entropy, norms))
    assert (scores.entropy_N.requires_grad, scores.score_norm_N.requires_grad) == (entropy_grad, False)
    upstream = torch.linspace(-1, 2, N, dtype=torch.float64)
    ours, theirs = (scores.logprobs_N * upstream).sum(), (logprobs * upstream).sum()
    if entropy_grad:
        ours = ours + (scores.entropy_N * upstream.flip(0)).sum()
        theirs = theirs + (entropy * upstream.flip(0)).sum()
    leaves = (hidden,) if frozen else (hidden, weight)
    expected = torch.autograd.grad(theirs, leaves)
    for retain in (True, False):  # the second pass finds no kept logits any more
        torch.testing.assert_close(torch.autograd.grad(ours, leaves, retain_graph=retain), expected)


@pytest.mark.parametrize("known", [False, True])
def test_without_gradient_and_what_is_not_asked_for(known):
    hidden, weight, targets = problem()
    with torch.no_grad():
        scores = score(hidden, weight, targets, known, entropy=True)
    torch.testing.assert_close(scores[:2], full(hidden, weight, targets)[:2])
    assert not scores.logprobs_N.requires_grad
    assert scores[2:] == (None, None)
    greedy = score(hidden, weight, targets, known, temperature=0.0)  # is scored as 1
    assert torch.equal(greedy.logprobs_N, score(hidden, weight, targets, known).logprobs_N)


@pytest.mark.parametrize(("known", "frozen", "grad"), [(0, 0, 0), (0, 0, 1), (1, 0, 1), (1, 1, 1)])
def test_empty_input_stays_in_the_graph(known, frozen, grad):
    hidden, weight, targets = problem(n=0, frozen=bool(frozen))
    options = {"entropy": True, "score_norm": True, "entropy_grad": bool(grad), "sketch": HeadSketch(dim=3)}
    with torch.set_grad_enabled(bool(grad)):
        scores = score(hidden, weight, targets, known, **options)
    assert [tuple(t.shape) for t in scores] == [(0,), (0,), (0,), (0, 3)]
    if grad:
        scores.logprobs_N.sum().backward()
        assert hidden.grad.shape == (0, D)
        assert frozen or torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"targets_N": torch.zeros(3, dtype=torch.int64)}, "targets_N"),
        ({"temperature": -1.0}, "temperature"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"entropy_grad": True}, "entropy_grad"),
        ({"logits_fn": lambda h: h.sum(-1)}, "logits_fn"),
    ],
)
def test_errors_name_the_argument(change, argument):
    hidden, weight, targets = problem()
    with pytest.raises(ValueError, match=argument):
        token_scores(**{"hidden_ND": hidden, "targets_N": targets, "logits_fn": lambda h: h @ weight.T, **change})
    with pytest.raises(ValueError, match="dim"):
        HeadSketch(dim=0)


@pytest.mark.parametrize("known", [False, True])
def test_entropy_alone_may_have_a_gradient(known):
    hidden, weight, targets = problem()
    scores = score(hidden, weight, targets, known, entropy=True, entropy_grad=True)
    expected = torch.autograd.grad(full(hidden, weight, targets)[1].sum(), (hidden, weight))
    torch.testing.assert_close(torch.autograd.grad(scores.entropy_N.sum(), (hidden, weight)), expected)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("wrong", [-100, V])
def test_token_ids_outside_of_the_vocabulary_are_refused(wrong, known):
    hidden, weight, targets = problem()
    targets[3] = wrong
    with pytest.raises(ValueError, match="targets_N"):
        score(hidden, weight, targets, known)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_near_certain_token_keeps_its_small_gradient(frozen):
    """Its distance from the others is 30: 1 - p_a is about 1e-13, which is lost in float32 next to 1."""
    hidden = torch.tensor([[30.0]], requires_grad=True)
    weight = torch.zeros(V, 1)
    weight[3] = 1
    weight.requires_grad_(not frozen)
    score(hidden, weight, torch.tensor([3]), known=True).logprobs_N.sum().backward()
    others = (V - 1) * torch.tensor(-30.0, dtype=torch.float64).exp()
    torch.testing.assert_close(hidden.grad[0, 0].double(), others, rtol=1e-5, atol=0)
    if not frozen:
        torch.testing.assert_close(weight.grad[3, 0].double(), 30 * others, rtol=1e-5, atol=0)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_bfloat16_is_what_the_model_computes(frozen, mixed):
    """Rounded logits as the model gives them, scored in float32; by autocast from float32 weights as well."""
    hidden, weight, targets = problem(torch.float32 if mixed else torch.bfloat16, frozen=frozen)
    results = []
    for known in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            scores = score(hidden, weight, targets, known, entropy=True, sketch=HeadSketch(3))
        leaves = (hidden,) if frozen else (hidden, weight)
        results.append((scores, torch.autograd.grad(scores.logprobs_N.sum(), leaves)))
    (ours, grads), (theirs, expected) = results
    assert {score.dtype for score in ours if score is not None} == {torch.float32}
    torch.testing.assert_close((ours[0], ours[1], ours[3]), (theirs[0], theirs[1], theirs[3]), rtol=1e-5, atol=1e-5)
    for one, other in zip(grads, expected, strict=True):
        assert one.dtype == other.dtype
        scale = other.abs().max().item()
        torch.testing.assert_close(one.float(), other.float(), rtol=0.02, atol=0.01 * scale)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_second_derivative_is_refused(known, frozen):
    hidden, weight, targets = problem(frozen=frozen)
    scores = score(hidden, weight, targets, known)
    (gradient,) = torch.autograd.grad(scores.logprobs_N.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


class _Alive(TorchDispatchMode):
    """The elements of new tensors (`largest`), and the bytes of their storages, of so many elements or more."""

    def __init__(self, least):
        super().__init__()
        self.least, self.largest, self.storages = least, 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.numel() >= self.least:
                self.largest = max(self.largest, leaf.numel())
                self.storages[leaf.untyped_storage().data_ptr()] = leaf.untyped_storage().nbytes() // 4
        return result


@pytest.mark.parametrize("frozen", [False, True])
def test_logits_of_all_tokens_are_never_materialized(frozen, monkeypatch):
    """64 tokens, 50 token ids, room for 8 * 50 logits: one block [64, 5] to work in and one that is kept."""
    monkeypatch.setattr("pl_grouprl.functional.softmax._TILE", 10)
    hidden, weight = torch.randn(64, 2, requires_grad=True), torch.randn(50, 2, requires_grad=not frozen)
    with _Alive(least=64 * 5) as alive:
        scores = token_scores(hidden, torch.zeros(64, dtype=torch.int64), not_called, weight_VD=weight, chunk_size=8)
        scores.logprobs_N.sum().backward()
    assert max(alive.storages.values()) == 64 * 5


def test_score_norm_of_a_near_certain_token_does_not_cancel():
    """p = 1/(1 + e^-12): (1 - p)^2 twice, about 7.5e-11, far below the float32 resolution at 1."""
    logits = torch.tensor([[12.0, 0.0]])
    scores = token_scores(torch.zeros(1, 1), torch.tensor([0]), lambda h: logits, score_norm=True, entropy=True)
    other = 1 / (1 + math.exp(12))
    torch.testing.assert_close(scores.score_norm_N, torch.tensor([2 * other**2]), rtol=1e-4, atol=0)
    expected_entropy = -other * math.log(other) - (1 - other) * math.log(1 - other)
    torch.testing.assert_close(scores.entropy_N, torch.tensor([expected_entropy]), rtol=1e-2, atol=0)


@pytest.mark.parametrize("grad", [False, True])
def test_bfloat16_hidden_states_are_scored_in_float32(grad):
    hidden, weight, targets = problem(torch.bfloat16)
    options = {"chunk_size": 4, "entropy": True, "score_norm": True, "sketch": HeadSketch(dim=3)}
    with torch.set_grad_enabled(grad):
        scores = score(hidden, weight, targets, known=False, temperature=0.8, **options)
    logprobs, entropy, _ = full(hidden, weight, targets, 0.8)
    assert {t.dtype for t in scores} == {torch.float32}
    torch.testing.assert_close(scores.logprobs_N, logprobs)
    torch.testing.assert_close(scores.entropy_N, entropy)
    assert scores.logprobs_N.requires_grad == grad
    if grad:
        (gradient,) = torch.autograd.grad(scores.logprobs_N.sum(), hidden)
        (expected,) = torch.autograd.grad(logprobs.sum(), hidden)
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_forbidden_tokens_do_not_make_nan(entropy_grad):
    """A head may give -inf to padding rows of the vocabulary."""
    hidden, weight, targets = problem()
    targets = targets % (V - 2)
    mask = torch.zeros(V, dtype=torch.float64)
    mask[-2:] = -torch.inf
    options = {"entropy": True, "entropy_grad": entropy_grad, "score_norm": True}
    scores = token_scores(hidden, targets, lambda h: h @ weight.T + mask, **options)
    logprobs, entropy, _ = full(hidden, weight[:-2], targets)
    torch.testing.assert_close(scores.logprobs_N, logprobs)
    torch.testing.assert_close(scores.entropy_N, entropy)
    assert scores.score_norm_N.isfinite().all()
    (scores.logprobs_N.sum() + scores.entropy_N.sum()).backward()
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_no_tensor_of_all_tokens_and_vocabulary_is_materialized(entropy_grad):
    hidden, weight = torch.randn(64, 4, requires_grad=True), torch.randn(50, 4, requires_grad=True)
    options = {"entropy": True, "entropy_grad": entropy_grad, "score_norm": True, "sketch": HeadSketch(dim=5)}
    with _Alive(least=1) as alive:
        scores = score(hidden, weight, torch.zeros(64, dtype=torch.int64), known=False, chunk_size=8, **options)
        (scores.logprobs_N.sum() + scores.entropy_N.sum()).backward()
    assert alive.largest == 8 * 50


def test_chunks_are_recomputed_and_keep_no_logits():
    """Between the passes hidden states and per-token results are saved; each chunk's head but the last runs twice."""
    hidden, weight, targets = problem()
    calls, saved = [], []

    def logits_fn(h):
        calls.append(len(h))
        return h @ weight.T

    def pack(tensor):
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        scores = token_scores(hidden, targets, logits_fn, chunk_size=4, entropy=True)
        loss = scores.logprobs_N.square().sum()
    assert [size for size in saved if size > N * D] == [V * D]  # the weight; the last chunk's logits have 3 * V
    assert calls == [4, 4, 3]
    loss.backward()
    assert sorted(calls) == [3, 4, 4, 4, 4]
    calls.clear()
    with torch.no_grad():
        token_scores(hidden, targets, logits_fn, chunk_size=4)
    assert calls == [4, 4, 3]


def head_gradients(hidden, weight, targets, temperature):
    """Gradient of each token's log-probability by the head's weights, shape [N, V * D], without the 1 / temperature."""
    rows = []
    for h, target in zip(hidden, targets, strict=True):
        leaf = weight.detach().clone().requires_grad_()
        (leaf @ h / temperature).log_softmax(-1)[target].backward()
        rows.append(leaf.grad.flatten() * temperature)
    return torch.stack(rows)


def test_sketch_keeps_inner_products_of_head_gradients_in_expectation():
    temperature = 0.6
    hidden, weight, targets = problem(n=5)
    gradients = head_gradients(hidden, weight, targets, temperature)
    exact = gradients @ gradients.T  # squared norms on the diagonal
    products = []
    for seed in range(600):
        sketch = HeadSketch(dim=16, seed=seed)
        scores = token_scores(hidden, targets, lambda h: h @ weight.T, temperature=temperature, sketch=sketch)
        products.append(scores.sketch_NS @ scores.sketch_NS.T)
    products = torch.stack(products)
    standard_error = products.std(0) / math.sqrt(len(products))
    assert ((products.mean(0) - exact).abs() < 4.5 * standard_error).all()
    assert (standard_error.diagonal() < 0.05 * exact.diagonal()).all()  # sharp enough to tell


def test_sketch_by_hand():
    hidden, weight, targets = problem(n=5)
    sketch = HeadSketch(dim=3, seed=1)
    r, s = (signs.double() for signs in sketch.signs(D, V))
    assert set(r.unique().tolist()) | set(s.unique().tolist()) == {-1.0, 1.0}
    probs = (hidden @ weight.T).softmax(-1)
    expected = torch.zeros(5, 3, dtype=torch.float64)
    for n in range(5):
        residual = -probs[n]
        residual[targets[n]] += 1
        for j in range(3):
            expected[n, j] = (r[:, j] @ hidden[n]) * (s[:, j] @ residual) / math.sqrt(3)
    for options in ({}, {"chunk_size": 2}, {"entropy": True, "score_norm": True}, {"known": True}):
        scores = score(hidden, weight, targets, **{"known": False, "sketch": sketch, **options})
        torch.testing.assert_close(scores.sketch_NS, expected, rtol=1e-12, atol=1e-12)


def test_sketch_is_determined_by_its_seed_and_cached():
    sketch = HeadSketch(seed=3)
    first = sketch.signs(D, V)
    assert all(a is b for a, b in zip(first, sketch.signs(D, V), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, HeadSketch(seed=3).signs(D, V), strict=True))
    assert not torch.equal(first[1], HeadSketch(seed=4).signs(D, V)[1])
    assert [tuple(signs.shape) for signs in first] == [(D, 64), (V, 64)]
    assert {signs.dtype for signs in first} == {torch.int8}


def test_sketch_does_not_cancel_near_certainty():
    """p = 1 / (1 + e^-12) in float32: the residual is (1 - p) * (s_a - s_other), with 1 - p about 6e-6."""
    logits = torch.tensor([[12.0, 0.0]])
    seed = next(i for i in range(100) if (lambda s: s[0, 0] != s[1, 0])(HeadSketch(1, i).signs(1, 2)[1]))
    scores = token_scores(torch.ones(1, 1), torch.tensor([0]), lambda h: logits, sketch=HeadSketch(1, seed))
    assert scores.sketch_NS.abs().item() == pytest.approx(2 / (1 + math.exp(12)), rel=1e-5)


def test_sketch_does_not_change_log_probabilities_or_gradients():
    hidden, weight, targets = problem(n=5)
    results = []
    for sketch in (None, HeadSketch()):
        h, w = (t.detach().clone().requires_grad_() for t in (hidden, weight))
        scores = token_scores(h, targets, lambda x, w=w: x @ w.T, sketch=sketch, chunk_size=2)
        scores.logprobs_N.sum().backward()
        results.append((scores.logprobs_N.detach(), h.grad, w.grad))
        assert sketch is None or not scores.sketch_NS.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
