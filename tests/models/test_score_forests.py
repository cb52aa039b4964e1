"""Branched rollouts score the same, with the same gradients, whether what they share runs once or for each."""

import pytest
import torch
from helpers.branched import branched_groups
from helpers.tiny_models import tiny_model

from pl_grouprl.attention import shared_prefix
from pl_grouprl.models.score import score
from pl_grouprl.packing import pack
from pl_grouprl.types import Rollout, RolloutGroup

pytestmark = pytest.mark.usefixtures("layers_checked_once")


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


BRANCHED = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 11, 12], [5, 6, 13, 14, 15, 16], [20, 21, 22]]


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_tokens_after_the_last_branch_point_move_no_bit_of_other_rollouts(family):
    model = tiny_model(family)

    def logprobs(rollouts):
        batch = pack([RolloutGroup([1, 2, 3], [Rollout(ids) for ids in rollouts])], min_saved_tokens=1)
        assert [segment.length for segment in batch.layout.segments] == [3, 2, 1, 3, 2, 4, 3]
        with torch.no_grad(), shared_prefix(model):
            return score(model, batch).logprobs_N.split(batch.rollout_lengths)

    before = logprobs(BRANCHED)
    for number, place in ((0, 4), (1, 4), (2, 3), (3, 0)):
        changed = [list(ids) for ids in BRANCHED]
        changed[number][place] = 30
        for other, (one, two) in enumerate(zip(before, logprobs(changed), strict=True)):
            assert torch.equal(one, two) == (other != number)


def test_shared_tokens_move_those_after_them_alone():
    model = tiny_model("qwen3")
    groups = [RolloutGroup([1, 2, 3], [Rollout(ids) for ids in BRANCHED])]
    with torch.no_grad(), shared_prefix(model):
        before = score(model, pack(groups, min_saved_tokens=1)).logprobs_N
        for rollout in groups[0].rollouts[:3]:
            rollout.token_ids[1] = 30  # of what three have in common
        after = score(model, pack(groups, min_saved_tokens=1)).logprobs_N
    moved = (before != after).tolist()
    assert moved == [False, *[True] * 5, False, *[True] * 4, False, *[True] * 5, *[False] * 3]
