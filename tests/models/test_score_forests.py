"""Branched rollouts score the same, with the same gradients, whether what they share runs once or for each."""

import pytest
import torch
from helpers.branched import branched_groups
from helpers.tiny_models import tiny_model

from pl_grouprl.attention import shared_prefix
from pl_grouprl.models.score import score
from pl_grouprl.packing import pack


@pytest.fixture(scope="module")
def model():
    return tiny_model("gpt2").double()  # nothing in it rounds to float32, as RMSNorm does elsewhere


def scores_and_gradients(model, batch, weights_N):
    """All scores, and the gradients of a weighted sum in which each token of each rollout has its own weight."""
    model.zero_grad()
    with shared_prefix(model):
        scores = score(model, batch, temperature=0.9, entropy=True, entropy_grad=True, score_norm=True)
        (weights_N @ scores.logprobs_N + 0.1 * weights_N.square() @ scores.entropy_N).backward()
    return scores, [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_shared_equals_repeated(model, seed, across):
    groups = branched_groups(seed, 3, common=4)
    shared = pack(groups, share_across_groups=across, min_saved_tokens=1)
    weights_N = torch.randn(len(shared.targets_N), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    actual, gradients = scores_and_gradients(model, shared, weights_N)
    expected, others = scores_and_gradients(model, pack(groups, "repeated"), weights_N)
    for one, other in zip(actual[:3], expected[:3], strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-9)
    largest = max(float(gradient.abs().max()) for gradient in others)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9 * largest, rtol=1e-9)
