"""The score norm and the sketch against what autograd says the gradients are."""

import math

import pytest
import torch

from pl_grouprl.functional.logprobs import token_scores
from pl_grouprl.functional.softmax import HeadSketch

N, D, V = 5, 4, 9


def problem(seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, D, dtype=torch.float64, generator=generator)
    weight = torch.randn(V, D, dtype=torch.float64, generator=generator)
    return hidden, weight, torch.randint(V, (N,), generator=generator)


def head_gradients(hidden, weight, targets, temperature):
    """Gradient of each token's log-probability by the head's weights, shape [N, V * D], without the 1 / temperature."""
    rows = []
    for h, target in zip(hidden, targets, strict=True):
        leaf = weight.clone().requires_grad_()
        (leaf @ h / temperature).log_softmax(-1)[target].backward()
        rows.append(leaf.grad.flatten() * temperature)
    return torch.stack(rows)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
def test_score_norm_is_the_squared_gradient_with_respect_to_logits(temperature):
    hidden, weight, targets = problem()
    scaled = (hidden @ weight.T / temperature).requires_grad_()
    logprobs = scaled.log_softmax(-1).gather(1, targets[:, None]).sum()
    (gradient,) = torch.autograd.grad(logprobs, scaled)
    scores = token_scores(hidden, targets, lambda h: h @ weight.T, temperature=temperature, score_norm=True)
    torch.testing.assert_close(scores.score_norm_N, gradient.square().sum(-1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sketch_keeps_inner_products_of_head_gradients_in_expectation(temperature):
    hidden, weight, targets = problem()
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


def test_larger_sketches_have_less_variance():
    hidden, weight, targets = problem()
    exact = head_gradients(hidden, weight, targets, 1.0).square().sum(-1)

    def error(dim):
        norms = [
            token_scores(hidden, targets, lambda h: h @ weight.T, sketch=HeadSketch(dim, seed))
            .sketch_NS.square()
            .sum(1)
            for seed in range(200)
        ]
        return (torch.stack(norms) - exact).square().mean().sqrt().item()

    assert error(4) / error(64) == pytest.approx(4, rel=0.15)  # sqrt(64 / 4)


def test_sketch_by_hand():
    hidden, weight, targets = problem()
    sketch = HeadSketch(dim=3, seed=1)
    r, s = (signs.double() for signs in sketch.signs(D, V))
    assert set(r.unique().tolist()) | set(s.unique().tolist()) == {-1.0, 1.0}
    probs = (hidden @ weight.T).softmax(-1)
    expected = torch.zeros(N, 3, dtype=torch.float64)
    for n in range(N):
        residual = -probs[n]
        residual[targets[n]] += 1
        for j in range(3):
            expected[n, j] = (r[:, j] @ hidden[n]) * (s[:, j] @ residual) / math.sqrt(3)
    for options in ({}, {"chunk_size": 2}, {"entropy": True, "score_norm": True}):
        scores = token_scores(hidden, targets, lambda h: h @ weight.T, sketch=sketch, **options)
        torch.testing.assert_close(scores.sketch_NS, expected, rtol=1e-12, atol=1e-12)


def test_vocabulary_in_blocks(monkeypatch):
    hidden, weight, targets = problem()
    whole = token_scores(hidden, targets, lambda h: h @ weight.T, sketch=HeadSketch()).sketch_NS
    monkeypatch.setattr("pl_grouprl.functional.logprobs.BLOCK", 4)
    parts = token_scores(hidden, targets, lambda h: h @ weight.T, sketch=HeadSketch(), weight_VD=weight).sketch_NS
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


def test_sketch_is_determined_by_its_seed_and_cached():
    sketch = HeadSketch(seed=3)
    first = sketch.signs(D, V)
    assert all(a is b for a, b in zip(first, sketch.signs(D, V), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, HeadSketch(seed=3).signs(D, V), strict=True))
    assert not torch.equal(first[1], HeadSketch(seed=4).signs(D, V)[1])
    assert [tuple(signs.shape) for signs in first] == [(D, 64), (V, 64)]
    assert {signs.dtype for signs in first} == {torch.int8}
    with pytest.raises(ValueError, match="dim is 0"):
        HeadSketch(dim=0)


def test_sketch_does_not_cancel_near_certainty():
    """p = 1 / (1 + e^-12) in float32: the residual is (1 - p) * (s_a - s_other), with 1 - p about 6e-6."""
    logits = torch.tensor([[12.0, 0.0]])
    seed = next(i for i in range(100) if (lambda s: s[0, 0] != s[1, 0])(HeadSketch(1, i).signs(1, 2)[1]))
    scores = token_scores(torch.ones(1, 1), torch.tensor([0]), lambda h: logits, sketch=HeadSketch(1, seed))
    assert scores.sketch_NS.abs().item() == pytest.approx(2 / (1 + math.exp(12)), rel=1e-5)


def test_sketch_does_not_change_log_probabilities_or_gradients():
    hidden, weight, targets = problem()
    results = []
    for sketch in (None, HeadSketch()):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        scores = token_scores(h, targets, lambda x, w=w: x @ w.T, sketch=sketch, chunk_size=2)
        scores.logprobs_N.sum().backward()
        results.append((scores.logprobs_N.detach(), h.grad, w.grad))
        assert sketch is None or not scores.sketch_NS.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
