"""Legend: N tokens, D hidden size, V vocabulary."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pl_grouprl.functional.logprobs import token_scores
from pl_grouprl.functional.softmax import HeadSketch

N, D, V = 11, 6, 17


def _problem(dtype=torch.float64, n=N, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(V, (n,), generator=generator)
    return hidden, weight, targets


def _full(hidden, weight, targets, temperature=1.0):
    """The oracle: one [N, V] log-softmax."""
    logits = (hidden @ weight.T).to(torch.promote_types(hidden.dtype, torch.float32)) / temperature
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs[torch.arange(len(targets)), targets], entropy


@pytest.mark.parametrize("chunk_size", [1, 3, 4, 11, 512])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_values_and_gradients_equal_those_of_full_logits(chunk_size, temperature, entropy_grad):
    hidden, weight, targets = _problem()
    weights = torch.linspace(-1, 2, N, dtype=torch.float64)
    options = {"temperature": temperature, "chunk_size": chunk_size, "entropy": True, "entropy_grad": entropy_grad}
    scores = token_scores(hidden, targets, lambda h: h @ weight.T, **options)
    logprobs, entropy = _full(hidden, weight, targets, temperature)
    torch.testing.assert_close(scores.logprobs_N, logprobs)
    torch.testing.assert_close(scores.entropy_N, entropy)
    assert scores.entropy_N.requires_grad == entropy_grad
    assert scores.score_norm_N is None

    ours = (scores.logprobs_N * weights).sum()
    theirs = (logprobs * weights).sum()
    if entropy_grad:
        ours = ours + (scores.entropy_N * weights.flip(0)).sum()
        theirs = theirs + (entropy * weights.flip(0)).sum()
    for a, b in zip(
        torch.autograd.grad(ours, (hidden, weight)), torch.autograd.grad(theirs, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_gradcheck():
    hidden, weight, targets = _problem(n=5)

    def score(hidden, weight):
        return token_scores(
            hidden, targets, lambda h: h @ weight.T, chunk_size=2, temperature=0.9, entropy=True, entropy_grad=True
        )[:2]

    assert torch.autograd.gradcheck(score, (hidden, weight))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_score_norm_is_the_squared_gradient_norm(temperature):
    hidden, weight, targets = _problem()
    scores = token_scores(
        hidden, targets, lambda h: h @ weight.T, temperature=temperature, chunk_size=4, score_norm=True
    )
    scaled_logits = (hidden @ weight.T / temperature).detach().requires_grad_()
    logprobs = scaled_logits.log_softmax(-1)[torch.arange(N), targets]
    (gradient,) = torch.autograd.grad(logprobs.sum(), scaled_logits)
    torch.testing.assert_close(scores.score_norm_N, gradient.square().sum(-1))
    probs = scaled_logits.detach().softmax(-1)
    formula = 1 - 2 * probs[torch.arange(N), targets] + probs.square().sum(-1)
    torch.testing.assert_close(scores.score_norm_N, formula)
    assert not scores.score_norm_N.requires_grad
    assert scores.entropy_N is None


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
    hidden, weight, targets = _problem(torch.bfloat16)
    with torch.set_grad_enabled(grad):
        scores = token_scores(
            hidden,
            targets,
            lambda h: h @ weight.T,
            chunk_size=4,
            entropy=True,
            score_norm=True,
            sketch=HeadSketch(dim=3),
            temperature=0.8,
        )
    logprobs, entropy = _full(hidden, weight, targets, 0.8)
    assert {t.dtype for t in scores} == {torch.float32}
    torch.testing.assert_close(scores.logprobs_N, logprobs)
    torch.testing.assert_close(scores.entropy_N, entropy)
    assert scores.logprobs_N.requires_grad == grad
    if grad:
        (gradient,) = torch.autograd.grad(scores.logprobs_N.sum(), hidden)
        (expected,) = torch.autograd.grad(logprobs.sum(), hidden)
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("grad", [False, True])
def test_empty_input_stays_in_the_graph(grad):
    hidden, weight, targets = _problem(n=0)
    with torch.set_grad_enabled(grad):
        scores = token_scores(
            hidden,
            targets,
            lambda h: h @ weight.T,
            entropy=True,
            score_norm=True,
            entropy_grad=grad,
            sketch=HeadSketch(dim=3),
        )
    assert [tuple(t.shape) for t in scores] == [(0,), (0,), (0,), (0, 3)]
    if grad:
        scores.logprobs_N.sum().backward()
        assert hidden.grad.shape == (0, D)
        assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_temperature_zero_is_scored_as_one():
    hidden, weight, targets = _problem()
    greedy = token_scores(hidden, targets, lambda h: h @ weight.T, temperature=0.0)
    assert torch.equal(greedy.logprobs_N, token_scores(hidden, targets, lambda h: h @ weight.T).logprobs_N)


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_forbidden_tokens_do_not_make_nan(entropy_grad):
    """A head may give -inf to padding rows of the vocabulary."""
    hidden, weight, targets = _problem()
    targets = targets % (V - 2)
    mask = torch.zeros(V, dtype=torch.float64)
    mask[-2:] = -torch.inf
    scores = token_scores(
        hidden, targets, lambda h: h @ weight.T + mask, entropy=True, entropy_grad=entropy_grad, score_norm=True
    )
    logprobs, entropy = _full(hidden, weight[:-2], targets)
    torch.testing.assert_close(scores.logprobs_N, logprobs)
    torch.testing.assert_close(scores.entropy_N, entropy)
    assert scores.score_norm_N.isfinite().all()
    (scores.logprobs_N.sum() + scores.entropy_N.sum()).backward()
    assert hidden.grad.isfinite().all()


class _LargestTensor(TorchDispatchMode):
    """Remembers the most elements of any tensor that an operator returned."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_no_tensor_of_all_tokens_and_vocabulary_is_materialized(entropy_grad):
    n, vocabulary, chunk_size = 64, 50, 8
    hidden = torch.randn(n, 4, requires_grad=True)
    weight = torch.randn(vocabulary, 4, requires_grad=True)
    targets = torch.zeros(n, dtype=torch.int64)
    options = {"chunk_size": chunk_size, "entropy": True, "entropy_grad": entropy_grad, "score_norm": True}
    options["sketch"] = HeadSketch(dim=5)
    with _LargestTensor() as largest:
        scores = token_scores(hidden, targets, lambda h: h @ weight.T, **options)
        (scores.logprobs_N.sum() + scores.entropy_N.sum()).backward()
    assert largest.numel == chunk_size * vocabulary


def test_chunks_are_recomputed_and_keep_no_logits():
    """Between the passes hidden states and per-token results are saved; each chunk's head but the last runs twice."""
    hidden, weight, targets = _problem()
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


def test_errors_name_the_argument():
    hidden, weight, targets = _problem()

    def head(h):
        return h @ weight.T

    with pytest.raises(ValueError, match=r"hidden_ND has shape \(11, 6\) and targets_N \(3,\)"):
        token_scores(hidden, targets[:3], head)
    for options in ({"temperature": -1.0}, {"chunk_size": 0}, {"entropy_grad": True}):
        with pytest.raises(ValueError, match=next(iter(options))):
            token_scores(hidden, targets, head, **options)
    with pytest.raises(ValueError, match=r"logits_fn returned shape \(11,\)"):
        token_scores(hidden, targets, lambda h: h.sum(-1))
