"""Shared against repeated prefix: float32 within 1e-4 nats, bfloat16 within what bfloat16 itself costs."""

import copy

import pytest
import torch
from helpers.smollm2 import answered
from helpers.tiny_models import gradients, worst_gradient_error

from pl_grouprl.attention import shared_prefix
from pl_grouprl.checks import check_parity
from pl_grouprl.models.score import rollout_logprobs


def scored(model, groups, sharing):
    """Log-probabilities of all response tokens, and gradients of their weighted sum."""
    model.zero_grad()
    with shared_prefix(model):
        logprobs = torch.cat(rollout_logprobs(model, groups, sharing=sharing)).float()
        (logprobs * torch.linspace(0.5, 1.5, len(logprobs))).sum().backward()
    found = gradients(model)
    model.zero_grad()
    return logprobs.detach(), found


@pytest.fixture(scope="module")
def groups(tokenizer):
    return answered(tokenizer, questions=2)


@pytest.fixture(scope="module")
def repeated(model, groups):
    return scored(model, groups, "repeated")


def test_float32(model, groups, repeated):
    logprobs, found = scored(model, groups, "shared")
    difference = (logprobs - repeated[0]).abs().max().item()
    error = worst_gradient_error(found, repeated[1])
    print(f"\nfloat32: log-probabilities {difference:.1e} nats, gradients {error:.1e} of a weight's norm, at most")
    assert difference < 1e-4
    assert error < 1e-3
    assert logprobs.min() < -3  # some answers are unlikely


def test_bfloat16(model, groups, repeated):
    narrow = copy.deepcopy(model).bfloat16()
    found = {sharing: scored(narrow, groups, sharing) for sharing in ("shared", "repeated")}
    cost, shared, apart = (
        (one - other).abs()
        for one, other in (
            (found["repeated"][0], repeated[0]),
            (found["shared"][0], repeated[0]),
            (found["shared"][0], found["repeated"][0]),
        )
    )
    for name, values in {"repeated - float32": cost, "shared - float32": shared, "shared - repeated": apart}.items():
        print(f"\nbfloat16, {name}: {values.mean():.4f} nats in the mean, {values.max():.4f} at most", end="")
    assert apart.mean() < 1.5 * cost.mean()
    assert shared.mean() < 1.5 * cost.mean()
    errors = [
        total_difference(found[one][1], other)
        for one, other in (("repeated", repeated[1]), ("shared", repeated[1]), ("shared", found["repeated"][1]))
    ]
    print("\nbfloat16, gradients, in the same order: " + ", ".join(f"{error:.4f}" for error in errors))
    assert errors[2] < 1.5 * errors[0]
    assert errors[1] < 1.5 * errors[0]


def total_difference(found, expected):
    """Norm of the difference of all gradients, over their norm."""
    squared = [
        ((found[name].float() - grad.float()).square().sum(), grad.float().square().sum())
        for name, grad in expected.items()
    ]
    error, norm = map(sum, zip(*squared, strict=True))
    return (error / norm).sqrt().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_parity_check(model, groups, dtype):
    checked = model if dtype == torch.float32 else copy.deepcopy(model).to(dtype)
    report = check_parity(checked, groups[:1])
    print(f"\n{report}")
    assert report.passed
