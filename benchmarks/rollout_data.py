"""Rollouts with realistic rewards, values and score norms, though the models are random.

A random critic's temporal-difference errors say nothing about where token groups end in training. So they are
simulated: a rollout's chance of success changes in a few large and many small steps, the critic observes it with noise,
the reward at the last token is success or failure, and the policy is nearly certain of most tokens.

Legend: B rollouts, T length of the longest one, N response tokens of all rollouts, concatenated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.cases import Case
from pl_grouprl.functional.advantages import td_errors
from pl_grouprl.functional.masked import from_rows
from pl_grouprl.functional.token_groups import ThresholdController, TokenGroups, find_token_groups
from pl_grouprl.types import RolloutGroup

STEP_STD, VALUE_NOISE = 4.0, 0.02
"""Spread of the log-odds of success over a rollout, and the standard deviation of the critic's error per token."""


@dataclass(frozen=True)
class RolloutData:
    """Groups of rollouts with simulated outputs of a critic and a policy.

    Attributes:
        groups: Each rollout has its reward, 0 or 1.
        rewards: That reward at the last token, 0 elsewhere, shape [B, T].
        values: V_t, the value before token t, shape [B, T].
        score_norms: Squared norm of the gradient of each token's log-probability by the logits, shape [B, T].
        mask: Tokens of the rollouts, bool, shape [B, T].
    """

    groups: list[RolloutGroup]
    rewards: Tensor
    values: Tensor
    score_norms: Tensor
    mask: Tensor

    @property
    def lengths(self) -> Tensor:
        """Tokens of each rollout, shape [B]."""
        return self.mask.sum(dim=1)

    def flat(self, rows: Tensor) -> Tensor:
        """A quantity of shape [B, T] without padding, shape [N]."""
        return from_rows(rows, self.lengths)

    def cut(self, threshold: float, max_size: int) -> TokenGroups:
        """Find the token groups."""
        errors = td_errors(self.rewards, self.values, self.mask, gamma=1.0)
        return find_token_groups(errors, self.score_norms, self.mask, threshold=threshold, max_size=max_size)

    def find_threshold(self, target: float, max_size: int, updates: int = 60) -> float:
        """Run the adaptive threshold on these rollouts, and return the value that came closest to the target.

        Steps are larger and the upper bound is higher than a run's defaults, with which a target of 0.9 may be out of
        reach. Some compressions (often 0.5) are reached by no threshold, because groups of one token become groups of
        two all at once.
        """
        controller = ThresholdController(
            threshold_lr=2.0, target_compression=target, max_threshold=1000.0, max_size=max_size
        )
        distances: dict[float, float] = {}
        while len(distances) < updates and min(distances.values(), default=1.0) > 1e-3:
            threshold = controller.threshold
            if threshold in distances:  # at a bound
                break
            compression = compression_of(self.cut(threshold, max_size).starts, self.mask)
            distances[threshold] = abs(compression - target)
            controller.update(compression)
        return min(distances, key=distances.__getitem__)


def compression_of(starts: Tensor, mask: Tensor) -> float:
    """1 - groups / tokens."""
    return 1 - float(starts.sum()) / float(mask.sum())


def draw_rollouts(case: Case, seed: int = 0) -> RolloutData:
    """Draw the groups of a case with everything that belongs to them."""
    groups = case.make_groups(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    lengths_B = torch.tensor([len(rollout.token_ids) for group in groups for rollout in group.rollouts])
    shape = (len(lengths_B), int(lengths_B.max()))
    mask_BT = torch.arange(shape[1]) < lengths_B[:, None]
    # One step in ten is large. Entry t is the chance before token t.
    large_BT = 1 + 4 * (torch.rand(shape, generator=generator) < 0.1)
    steps_BT = torch.randn(shape, generator=generator) * large_BT * (STEP_STD / (3.4 * lengths_B[:, None]).sqrt())
    chance_BT = (steps_BT.cumsum(dim=1) - steps_BT).sigmoid()
    values_BT = chance_BT + VALUE_NOISE * torch.randn(shape, generator=generator)
    last_B = lengths_B[:, None] - 1
    rewards_B = (torch.rand(len(lengths_B), generator=generator) < chance_BT.gather(1, last_B)[:, 0]).float()
    certainty_BT = 1 - torch.rand(shape, generator=generator) ** 4  # the probability of the token that was sampled
    norms_BT = (1 - certainty_BT) ** 2 * 1.2  # plus a little for the other tokens
    for rollout, reward in zip((r for group in groups for r in group.rollouts), rewards_B.tolist(), strict=True):
        rollout.reward = reward
    rewards_BT = torch.zeros(shape).scatter(1, last_B, rewards_B[:, None])
    return RolloutData(groups, rewards_BT, values_BT.masked_fill(~mask_BT, 0), norms_BT, mask_BT)
