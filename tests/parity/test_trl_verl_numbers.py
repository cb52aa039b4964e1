"""The losses of TRL and verl, stated again on padded [B, L] matrices, against ours on the flat token axis.

The oracles below follow the published definitions and what the two libraries compute (TRL of July 2026, verl of
August 2026), written down independently and kept slow: one token after another.
Legend: B rollouts, L padded response length.
"""

import math

import pytest
import torch

from pl_grouprl.functional.advantages import group_relative_advantages, rloo_advantages
from pl_grouprl.functional.kl import kl_estimate
from pl_grouprl.functional.losses import LOSS_AGG_MODES, LOSS_PRESETS, aggregate
from pl_grouprl.functional.policy_loss import make_policy_loss

LENGTHS = [7, 3, 1, 5, 6, 2]
B, L = len(LENGTHS), max(LENGTHS)
MAX_COMPLETION_LENGTH = 11
TOLERANCE = {"atol": 1e-6, "rtol": 1e-6}


class Batch:
    """Random padded matrices, the padding filled with junk, and one tool token masked inside the fourth rollout."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.policy = (-3 * torch.rand(B, L, generator=generator)).requires_grad_()
        self.old = self.policy.detach() + 0.6 * torch.randn(B, L, generator=generator)
        self.ref = self.old + 0.3 * torch.randn(B, L, generator=generator)
        self.advantages = torch.randn(B, generator=generator)
        self.response = torch.arange(L) < torch.tensor(LENGTHS)[:, None]
        self.mask = self.response.clone()
        self.mask[3, 2] = False

    def flat(self, matrix):
        return matrix[self.response]

    @property
    def rollouts(self):
        return {
            "mask_N": self.flat(self.mask),
            "rollout_index_N": torch.arange(B).repeat_interleave(torch.tensor(LENGTHS)),
            "num_rollouts": B,
        }

    def ours(self, loss, mode, beta=0.0, **options):
        result = make_policy_loss(loss, **options)(
            self.flat(self.policy),
            self.flat(self.old),
            self.flat(self.advantages[:, None].expand(B, L)),
            **self.rollouts,
        )
        kl = kl_estimate(self.flat(self.policy), self.flat(self.ref), "k3")
        norm = MAX_COMPLETION_LENGTH if mode == "seq-mean-token-sum-norm" else None
        value = aggregate(result.per_token_N + beta * kl, mode=mode, norm=norm, **self.rollouts)
        metrics = {name: float(total / result.metric_count) for name, total in result.metrics.items()}
        return value, metrics

    def assert_equal(self, ours, theirs):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)
        (gradient,) = torch.autograd.grad(ours, self.policy)
        (expected,) = torch.autograd.grad(theirs, self.policy)
        torch.testing.assert_close(gradient, expected, **TOLERANCE)


def _tokens(batch):
    """Trained (rollout, position) pairs."""
    return [(i, t) for i in range(B) for t in range(L) if batch.mask[i, t]]


def _reduce(batch, losses, mode):
    """Aggregate a dictionary of losses by (rollout, position) as the names of the modes say."""
    per_rollout = [[losses[i, t] for t in range(L) if (i, t) in losses] for i in range(B)]
    sums = torch.stack([sum(row) for row in per_rollout])
    counts = torch.tensor([float(len(row)) for row in per_rollout])
    return {
        "token-mean": sums.sum() / counts.sum(),
        "seq-mean-token-sum": sums.mean(),
        "seq-mean-token-mean": (sums / counts).mean(),
        "seq-mean-token-sum-norm": (sums / MAX_COMPLETION_LENGTH).mean(),
    }[mode]


def _surrogate(ratio, advantage, low, high):
    clipped = min(max(ratio.item(), 1 - low), 1 + high)
    return torch.maximum(-ratio * advantage, -clipped * advantage) if clipped != ratio.item() else -ratio * advantage


def _ratio(batch, i, t):
    return torch.exp(batch.policy[i, t] - batch.old[i, t])


def _sequence_ratio(batch, i):
    logs = [batch.policy[i, t] - batch.old[i, t] for t in range(L) if batch.mask[i, t]]
    return torch.exp(sum(logs) / len(logs))


def _k3(batch, i, t):
    x = batch.ref[i, t] - batch.policy[i, t]
    return torch.exp(x) - x - 1


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_verl_dual_clip(mode, seed):
    """verl's `vanilla`: `clip_ratio_low` 0.2, `clip_ratio_high` 0.28, `clip_ratio_c` 1.5."""
    batch, losses = Batch(seed), {}
    for i, t in _tokens(batch):
        advantage = batch.advantages[i]
        loss = _surrogate(_ratio(batch, i, t), advantage, 0.2, 0.28)
        losses[i, t] = torch.minimum(loss, -1.5 * advantage) if advantage < 0 else loss
    ours, _ = batch.ours("ppo", mode, epsilon=0.2, epsilon_high=0.28, delta=1.5)
    batch.assert_equal(ours, _reduce(batch, losses, mode))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "bnpo"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("delta", [None, 1.5])
def test_trl_loss_types(loss_type, beta, delta, seed):
    """TRL limits the ratio itself by `delta`; its KL term is k3 without limits."""
    batch, losses = Batch(seed), {}
    low_count = high_count = 0
    for i, t in _tokens(batch):
        advantage, ratio = batch.advantages[i], _ratio(batch, i, t)
        first = ratio if delta is None else ratio.clamp(max=delta)
        second = ratio.clamp(0.8, 1.28)
        losses[i, t] = -torch.minimum(first * advantage, second * advantage) + beta * _k3(batch, i, t)
        low_count += bool(ratio < 0.8 and advantage < 0)
        high_count += bool(ratio > 1.28 and advantage > 0)
    preset = LOSS_PRESETS[loss_type]
    options = {} if delta is None else {"delta": delta}
    ours, metrics = batch.ours(preset.loss, preset.aggregation, beta, epsilon=0.2, epsilon_high=0.28, **options)
    batch.assert_equal(ours, _reduce(batch, losses, preset.aggregation))
    assert low_count + high_count > 0
    number = len(losses)
    assert metrics["clip_ratio/low_mean"] == pytest.approx(low_count / number)
    assert metrics["clip_ratio/high_mean"] == pytest.approx(high_count / number)
    assert metrics["clip_ratio/region_mean"] == pytest.approx((low_count + high_count) / number)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("high", [0.05, 0.3])
def test_trl_sequence_level(high, seed):
    """TRL's GSPO: the gradient goes through the sequence ratio itself."""
    batch, losses = Batch(seed), {}
    clipped = 0
    for i in range(B):
        ratio, advantage = _sequence_ratio(batch, i), batch.advantages[i]
        clipped += bool((ratio < 0.95 and advantage < 0) or (ratio > 1 + high and advantage > 0))
        loss = _surrogate(ratio, advantage, 0.05, high)
        losses.update({(i, t): loss for t in range(L) if batch.mask[i, t]})
    ours, metrics = batch.ours("gspo", LOSS_PRESETS["gspo"].aggregation, epsilon=0.05, epsilon_high=high)
    batch.assert_equal(ours, _reduce(batch, losses, "seq-mean-token-mean"))
    assert metrics["clip_ratio/region_mean"] == pytest.approx(clipped / B)


@pytest.mark.parametrize("seed", [0, 1])
def test_verl_sequence_level(seed):
    """verl's GSPO: value of the sequence ratio, gradient of each token's own log-probability."""
    batch, losses = Batch(seed), {}
    for i, t in _tokens(batch):
        own = batch.policy[i, t] - batch.policy[i, t].detach()
        ratio = _sequence_ratio(batch, i).detach() * own.exp()
        losses[i, t] = _surrogate(ratio, batch.advantages[i], 0.05, 0.3)
    ours, _ = batch.ours("gspo", "seq-mean-token-mean", epsilon=0.05, epsilon_high=0.3)
    batch.assert_equal(ours, _reduce(batch, losses, "seq-mean-token-mean"))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("options", "bounds"),
    [({"epsilon": 0.2, "epsilon_high": 0.28}, (0.8, 1.28)), ({"epsilon_max": 1.3}, (0.0, 1.3))],
    ids=["verl", "trl"],
)
def test_cispo(options, bounds, seed):
    batch, losses = Batch(seed), {}
    for i, t in _tokens(batch):
        weight = _ratio(batch, i, t).detach().clamp(*bounds)
        losses[i, t] = -weight * batch.advantages[i] * batch.policy[i, t]
    ours, _ = batch.ours("cispo", LOSS_PRESETS["cispo"].aggregation, **options)
    batch.assert_equal(ours, _reduce(batch, losses, "token-mean"))


# Two prompts of four rollouts. Group means 0.5 and 2; unbiased variances 1/3 and (4 + 0 + 1 + 9) / 3 = 14/3.
REWARDS = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0, 2.0, 1.0, 5.0])
GROUPS = torch.arange(8) // 4
CENTRED = torch.tensor([-0.5, 0.5, 0.5, -0.5, -2.0, 0.0, -1.0, 3.0])


def test_verl_advantages_by_hand():
    """verl: eps 1e-6 next to the unbiased standard deviation; `rloo` is (r - mean) n / (n - 1)."""
    std = torch.tensor([1 / 3] * 4 + [14 / 3] * 4).sqrt()
    torch.testing.assert_close(group_relative_advantages(REWARDS, GROUPS), CENTRED / (std + 1e-6), **TOLERANCE)
    torch.testing.assert_close(group_relative_advantages(REWARDS, GROUPS, scale="none"), CENTRED, **TOLERANCE)
    torch.testing.assert_close(rloo_advantages(REWARDS, GROUPS), CENTRED * 4 / 3, **TOLERANCE)


def test_trl_advantages_by_hand():
    """TRL: eps 1e-4; `batch` divides by the spread of all: mean 1.25, squares 32 - 8 * 1.5625 = 19.5, over 7."""
    std = torch.tensor([1 / 3] * 4 + [14 / 3] * 4).sqrt()
    ours = group_relative_advantages(REWARDS, GROUPS, eps=1e-4)
    torch.testing.assert_close(ours, CENTRED / (std + 1e-4), **TOLERANCE)
    ours = group_relative_advantages(REWARDS, GROUPS, scale="batch", eps=1e-4)
    torch.testing.assert_close(ours, CENTRED / (math.sqrt(19.5 / 7) + 1e-4), **TOLERANCE)


def test_trl_missing_rewards_by_hand():
    """A None reward is left out and gets 0. Left are 1, 2, 6: mean 3, variance (4 + 1 + 9) / 2 = 7."""
    rewards = torch.tensor([1.0, math.nan, 2.0, 6.0])
    groups = torch.zeros(4, dtype=torch.int64)
    expected = torch.tensor([-2.0, 0.0, -1.0, 3.0])
    ours = group_relative_advantages(rewards, groups, eps=1e-4)
    torch.testing.assert_close(ours, expected / (math.sqrt(7) + 1e-4), **TOLERANCE)
    torch.testing.assert_close(rloo_advantages(rewards, groups), expected * 1.5, **TOLERANCE)


@pytest.mark.parametrize("kind", ["low_var_kl", "k3"])
def test_verl_low_variance_kl_by_hand(kind):
    """verl limits the log-ratio to 20 and the value to 10: x = 0.5, -1, 3 and 100."""
    x = torch.tensor([0.5, -1.0, 3.0, 100.0])
    expected = torch.tensor([math.exp(0.5) - 1.5, math.exp(-1), 10.0, 10.0])
    torch.testing.assert_close(kl_estimate(torch.zeros(4), x, kind, max_value=10.0), expected, **TOLERANCE)
    expected[2] = math.exp(3) - 4  # TRL
    torch.testing.assert_close(kl_estimate(torch.zeros(4), x, kind)[:3], expected[:3], **TOLERANCE)
