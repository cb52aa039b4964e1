"""What stands in a gap of the loss mask, such as the result of a tool, changes nothing: as if it were cut out."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers.episodes import make_episode, make_group

from pl_grouprl.functional.importance import IMPORTANCE_KINDS, ImportanceSampling
from pl_grouprl.functional.logprobs import TokenScores
from pl_grouprl.functional.losses import LOSS_AGG_MODES
from pl_grouprl.packing import pack
from pl_grouprl.training.buffer import RolloutBuffer
from pl_grouprl.training.micro_batches import MicroBatch
from pl_grouprl.training.objective import KLOptions, KLPenalty, PolicyObjective
from pl_grouprl.training.rewarder import rewards_per_token
from pl_grouprl.types import Rollout

NAMES = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages", "policy", "entropy")


def make_buffer(*, with_gaps):
    """An episode after an observation, one that ends with a result, and a plain rollout: 4, 3 and 2 sampled tokens."""
    rollouts = [
        make_episode(observation=2, reward=1.0),
        make_episode(loss_mask=[1, 1, 0, 0, 1, 0], reward=-0.5),
        Rollout([7, 8], logprobs=[-0.5, -0.25], reward=0.25),
    ]
    if not with_gaps:
        rollouts = [Rollout([1] * own.num_sampled_tokens, reward=own.reward) for own in rollouts]
    return RolloutBuffer([make_group(*rollouts)])


def fill(buffer, in_gaps):
    """Random quantities at sampled tokens, the same ones with and without gaps, and something else in the gaps."""
    generator = torch.Generator().manual_seed(3)
    mask_N = buffer.joined("loss_mask")
    for name in NAMES:
        values_N = torch.full((len(mask_N),), in_gaps)
        values_N[mask_N] = -torch.rand(int(mask_N.sum()), generator=generator)
        buffer.put(name, values_N)
    return buffer


def loss_of(buffer, **options):
    """The sums of the loss, and the gradient at every token."""
    tokens = {name: buffer.joined(name) for name in buffer.tokens}
    policy_N = tokens.pop("policy").requires_grad_()
    batch = MicroBatch(pack(buffer.groups, "shared"), tokens, buffer.groups)
    kl = KLPenalty(0.1)
    objective = PolicyObjective("ppo", {}, kl=kl, max_new_tokens=5, entropy_coef=0.01, **options)
    sums = objective.loss(batch, TokenScores(policy_N, entropy_N=tokens["entropy"]))
    (gradient_N,) = torch.autograd.grad(sums.losses["policy"][0], policy_N)
    return sums, gradient_N


@pytest.mark.parametrize(("mode", "kind"), itertools.product(LOSS_AGG_MODES, IMPORTANCE_KINDS))
@pytest.mark.parametrize("in_gaps", [0.0, -80.0])
def test_the_loss(mode, kind, in_gaps):
    importance = ImportanceSampling(kind, *((None, 3.0) if kind == "none" else (0.5, 1.5)))
    options = {"loss_agg_mode": mode, "importance_sampling": importance}
    with_gaps, without = fill(make_buffer(with_gaps=True), in_gaps), fill(make_buffer(with_gaps=False), in_gaps)
    (actual, gradient_N), (expected, expected_gradient_N) = (loss_of(own, **options) for own in (with_gaps, without))
    mask_N = with_gaps.joined("loss_mask")
    torch.testing.assert_close(actual.losses, expected.losses)
    torch.testing.assert_close(actual.metrics, expected.metrics)
    torch.testing.assert_close(actual.extremes, expected.extremes)
    torch.testing.assert_close(gradient_N[mask_N], expected_gradient_N)
    assert not gradient_N[~mask_N].any()
    denominator = 9 if mode == "token-mean" else 3
    assert float(actual.losses["policy"][1]) == denominator


def test_sampler_and_policy_are_compared_at_sampled_tokens():
    """Differences of 0.5 and 1 at two of nine tokens; zeros of the sampler in the gaps count for nothing."""
    buffer = fill(make_buffer(with_gaps=True), -80.0)
    sampled_N = buffer.joined("old_logprobs").clone()
    sampled_N[buffer.joined("loss_mask").nonzero().flatten()[:2]] += torch.tensor([0.5, -1.0])
    sampled_N[~buffer.joined("loss_mask")] = 0.0
    buffer.put("rollout_logprobs", sampled_N)
    sums, _ = loss_of(buffer, loss_agg_mode="token-mean")
    total, count = sums.metrics["sampling/sampling_logp_difference/mean"]
    assert (float(total), int(count)) == (pytest.approx(1.5), 9)
    assert float(sums.extremes["sampling/sampling_logp_difference/max"]) == pytest.approx(1.0)
    assert float(sums.extremes["sampling/importance_sampling_ratio/max"]) == pytest.approx(math.e)


def test_the_penalty_in_the_rewards():
    buffers = [fill(make_buffer(with_gaps=gaps), -80.0) for gaps in (True, False)]
    penalties = [
        KLPenalty(0.1, KLOptions("k1", "reward")).of_rewards(buffer, torch.device("cpu")) for buffer in buffers
    ]
    mask_N = buffers[0].joined("loss_mask")
    torch.testing.assert_close(penalties[0][mask_N], penalties[1])
    assert not penalties[0][~mask_N].any()
    assert buffers[0].metrics == pytest.approx(buffers[1].metrics)
    torch.testing.assert_close(rewards_per_token(buffers[0])[mask_N], rewards_per_token(buffers[1]))
