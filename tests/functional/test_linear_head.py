"""Scores under a head that is one matrix, block by block, against one log-softmax of all logits.

Legend: N tokens, D hidden size, V vocabulary.
"""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pl_grouprl.functional.logprobs import token_scores
from pl_grouprl.functional.softmax import HeadSketch

N, D, V = 11, 6, 17


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 5, 5, 5 and 2 token ids; tiles of one row and of several."""
    monkeypatch.setattr("pl_grouprl.functional.logprobs.BLOCK", 5)


def problem(dtype=torch.float64, n=N, frozen=False):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(not frozen)
    return hidden, weight, torch.randint(V, (n,), generator=generator)


def not_called(hidden):
    raise AssertionError("a head known to be one matrix needs no call of the model")


def full(hidden, weight, targets, temperature):
    logprobs = ((hidden @ weight.T) / temperature).log_softmax(-1)
    probs = logprobs.exp()
    own = logprobs.gather(1, targets[:, None]).squeeze(1)
    return own, -(probs * logprobs).sum(-1), 1 - 2 * own.exp() + probs.square().sum(-1)


@pytest.mark.parametrize("tile", [1, 12, 2**18])
@pytest.mark.parametrize("chunk_size", [1, 2, 4, 11, 512])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("frozen", "entropy_grad"), itertools.product([False, True], repeat=2))
def test_values_and_gradients(frozen, entropy_grad, temperature, chunk_size, tile, monkeypatch):
    """chunk_size decides how many blocks are kept and whether tokens are taken in parts."""
    monkeypatch.setattr("pl_grouprl.functional.softmax._TILE", tile)
    hidden, weight, targets = problem(frozen=frozen)
    options = {"temperature": temperature, "chunk_size": chunk_size, "entropy": True, "entropy_grad": entropy_grad}
    scores = token_scores(hidden, targets, not_called, weight_VD=weight, score_norm=True, **options)
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
def test_entropy_alone_may_have_a_gradient(known):
    hidden, weight, targets = problem()
    scores = token_scores(
        hidden, targets, lambda h: h @ weight.T, entropy=True, entropy_grad=True, weight_VD=weight if known else None
    )
    expected = torch.autograd.grad(full(hidden, weight, targets, 1.0)[1].sum(), (hidden, weight))
    torch.testing.assert_close(torch.autograd.grad(scores.entropy_N.sum(), (hidden, weight)), expected)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("wrong", [-100, V])
def test_token_ids_outside_of_the_vocabulary_are_refused(wrong, known):
    hidden, weight, targets = problem()
    targets[3] = wrong
    with pytest.raises(ValueError, match=r"targets_N has token ids outside.*pass ids from 0 to 16"):
        token_scores(hidden, targets, lambda h: h @ weight.T, weight_VD=weight if known else None)


def test_without_gradient():
    hidden, weight, targets = problem()
    with torch.no_grad():
        scores = token_scores(hidden, targets, not_called, weight_VD=weight, entropy=True, sketch=HeadSketch(3))
        expected = token_scores(hidden, targets, lambda h: h @ weight.T, entropy=True, sketch=HeadSketch(3))
    torch.testing.assert_close((scores[0], scores[1], scores[3]), (expected[0], expected[1], expected[3]))
    assert not scores.logprobs_N.requires_grad


@pytest.mark.parametrize("frozen", [False, True])
def test_a_near_certain_token_keeps_its_small_gradient(frozen):
    """Its distance from the others is 30: 1 - p_a is about 1e-13, which is lost in float32 next to 1."""
    hidden = torch.tensor([[30.0]], requires_grad=True)
    weight = torch.zeros(V, 1)
    weight[3] = 1
    weight.requires_grad_(not frozen)
    token_scores(hidden, torch.tensor([3]), not_called, weight_VD=weight).logprobs_N.sum().backward()
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
    for known in (weight, None):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            scores = token_scores(
                hidden,
                targets,
                lambda h: torch.nn.functional.linear(h, weight),
                weight_VD=known,
                entropy=True,
                sketch=HeadSketch(3),
            )
        leaves = (hidden,) if frozen else (hidden, weight)
        results.append((scores, torch.autograd.grad(scores.logprobs_N.sum(), leaves)))
    (ours, grads), (theirs, expected) = results
    assert {score.dtype for score in ours if score is not None} == {torch.float32}
    torch.testing.assert_close((ours[0], ours[1], ours[3]), (theirs[0], theirs[1], theirs[3]), rtol=1e-5, atol=1e-5)
    for one, other in zip(grads, expected, strict=True):
        assert one.dtype == other.dtype
        scale = other.abs().max().item()
        torch.testing.assert_close(one.float(), other.float(), rtol=0.02, atol=0.01 * scale)


@pytest.mark.parametrize("frozen", [False, True])
def test_empty_input_stays_in_the_graph(frozen):
    hidden, weight, targets = problem(n=0, frozen=frozen)
    scores = token_scores(hidden, targets, not_called, weight_VD=weight, entropy=True, score_norm=True)
    assert [tuple(score.shape) for score in scores[:3]] == [(0,)] * 3
    scores.logprobs_N.sum().backward()
    assert hidden.grad.shape == (0, D)
    assert frozen or torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_second_derivative_is_refused(known, frozen):
    hidden, weight, targets = problem(frozen=frozen)
    scores = token_scores(hidden, targets, lambda h: h @ weight.T, weight_VD=weight if known else None)
    (gradient,) = torch.autograd.grad(scores.logprobs_N.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


class _Alive(TorchDispatchMode):
    """Adds up the elements of new storages, of a vocabulary's block or more."""

    def __init__(self, least):
        super().__init__()
        self.least, self.storages = least, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.numel() >= self.least:
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
