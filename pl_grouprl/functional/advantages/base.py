"""Advantage estimators by name, and what they share: statistics of groups, and forests of branches.

Groups are given by explicit ids, in any order and of any size. Conventions of all group-based estimators:

- a NaN reward means that the rollout has none: it does not enter any statistics and its advantage is 0 (callers also
  mask it out of the loss);
- a group whose rewards are all equal up to rounding (`differ`), or with fewer than two, gets exactly 0;
- statistics are computed in float64 and returned in the dtype of the rewards (at least float32), without gradient.

The only rollout of a group gets an advantage of 0, as in TRL; in verl it gets its reward.

Legend: B rollouts, P prompts (groups), M nodes of branched groups: the prompts, then one node per segment, T length of
the longest row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pl_grouprl.functional.masked import differ
from pl_grouprl.functional.registry import F, RegisteredFunction, choose


class Groups(NamedTuple):
    """Rewards, the group of each, and statistics per group.

    Attributes:
        rewards_B: float64, 0 where a rollout has none.
        valid_B: True for rollouts with a reward.
        index_B: Group of each rollout, int64 in [0, P), in the order of the sorted ids.
        count_P: Rewards of each group, float64.
        mean_P: Their mean, 0 where there is none.
        spread_P: True where the rewards of the group differ.
        dtype: Dtype of the results.
    """

    rewards_B: Tensor
    valid_B: Tensor
    index_B: Tensor
    count_P: Tensor
    mean_P: Tensor
    spread_P: Tensor
    dtype: torch.dtype

    def sum(self, values_B: Tensor) -> Tensor:
        """Add up the values of each group, shape [P]; they must be 0 where there is no reward."""
        return torch.zeros_like(self.count_P).index_add(0, self.index_B, values_B)

    def largest(self, values_B: Tensor) -> Tensor:
        """Return the largest value of each group, shape [P]; -inf for a group without any."""
        return torch.full_like(self.count_P, -torch.inf).scatter_reduce(0, self.index_B, values_B, "amax")

    def centered(self) -> Tensor:
        """Subtract from each reward the mean of its group, shape [B]; exactly 0 without a reward or without spread."""
        centered_B = self.rewards_B - self.mean_P[self.index_B]
        return centered_B.masked_fill(~self.trained(), 0)

    def std(self) -> Tensor:
        """Return the unbiased standard deviation of each group, shape [P]; 0 for fewer than two rewards."""
        return (self.sum(self.centered().square()) / (self.count_P - 1).clamp(min=1)).sqrt()

    def finish(self, advantages_B: Tensor) -> Tensor:
        """Zero advantages without reward or spread, and cast to the dtype of the results."""
        return advantages_B.masked_fill(~self.trained(), 0).to(self.dtype)

    def trained(self) -> Tensor:
        """Whether each rollout has a reward and its group has spread, bool, shape [B]."""
        return self.valid_B & self.spread_P[self.index_B]


def gather_groups(rewards: Tensor, group_ids: Tensor | Sequence[int]) -> Groups:
    """Gather the rewards of each group.

    Args:
        rewards: Scalar reward of each rollout, shape [B], any unit; NaN marks a rollout without a reward.
        group_ids: Prompt of each rollout, shape [B], any integers, in any order.

    Raises:
        ValueError: If the rewards have another shape, or one is infinite.
    """
    check_rewards(rewards)
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    valid_B = ~rewards.isnan()
    rewards_B = rewards.to(torch.float64).masked_fill(~valid_B, 0)
    unique_P, index_B = torch.as_tensor(group_ids, device=rewards.device).unique(return_inverse=True)
    zeros_P = rewards_B.new_zeros(len(unique_P))
    count_P = zeros_P.index_add(0, index_B, valid_B.to(torch.float64))
    mean_P = zeros_P.index_add(0, index_B, rewards_B) / count_P.clamp(min=1)
    highest_B, lowest_B = rewards_B.masked_fill(~valid_B, -torch.inf), rewards_B.masked_fill(~valid_B, torch.inf)
    highest_P = (zeros_P - torch.inf).scatter_reduce(0, index_B, highest_B, "amax")
    lowest_P = (zeros_P + torch.inf).scatter_reduce(0, index_B, lowest_B, "amin")
    return Groups(rewards_B, valid_B, index_B, count_P, mean_P, differ(lowest_P, highest_P), dtype)


def check_rewards(rewards: Tensor, name: str = "rewards") -> None:
    """Raise a ValueError for rewards that are not one finite scalar (or NaN) per rollout, shape [B]."""
    if rewards.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(rewards.shape)}; pass one scalar per rollout, shape [B].")
    if rewards.isinf().any():
        infinite = rewards.isinf().nonzero().flatten().tolist()
        raise ValueError(f"{name} is infinite for rollouts {infinite[:5]}; use NaN to omit a rollout from training.")


# The segments of branched rollouts as a forest.


class BranchPaths(NamedTuple):
    """How the rollouts of groups branch; `pl_grouprl.types.Rollout` defines both.

    Attributes:
        points: `branch_points` of each rollout, B sequences: indices of the first tokens after its branch points.
        paths: `branch_path` of each rollout, B sequences, one number more than points. A rollout with an empty path
            continues the prompt and shares no segment.
    """

    points: Sequence[Sequence[int]]
    paths: Sequence[Sequence[int]]


class Forest(NamedTuple):
    """All trees of a call. A node is the state at the end of its segment; the first P are the prompts.

    Attributes:
        parent_M: The node that each segment continues; a prompt is its own parent.
        number_M: Which continuation of its parent a segment is, as `branch_path` has it.
        levels: Nodes of depth 1, 2, ..., as slices.
        leaf_B: The last segment of each rollout.
        segments: The nodes of each rollout in order, B sequences.
        points: Where the segments of each rollout end, all but the last, B sequences of token indices.
    """

    parent_M: Tensor
    number_M: Tensor
    levels: list[slice]
    leaf_B: Tensor
    segments: list[list[int]]
    points: Sequence[Sequence[int]]

    def at_leaves(self, values_B: Tensor) -> Tensor:
        """Put the value of each rollout at its leaf, 0 elsewhere, shape [M]."""
        return values_B.new_zeros(len(self.parent_M)).index_put((self.leaf_B,), values_B)

    def per_token(self, values_M: Tensor, width: int) -> Tensor:
        """Give each token the value of its segment, shape [B, width]."""
        deepest = max(map(len, self.segments), default=0)
        nodes = [[*row, *[0] * (deepest - len(row))] for row in self.segments]
        ends = [[*points, *[width] * (deepest - 1 - len(points))] for points in self.points]
        ends_BK = torch.tensor(ends, dtype=torch.long).view(len(ends), max(deepest - 1, 0))
        place_BT = torch.searchsorted(ends_BK, torch.arange(width).repeat(len(ends), 1), right=True)
        nodes_BK = torch.tensor(nodes, dtype=torch.long).view(len(nodes), deepest)
        return values_M[nodes_BK.gather(1, place_BT).to(values_M.device)]


def build_forest(index_B: Tensor, branches: BranchPaths) -> Forest:
    """Build the trees of all groups.

    Args:
        index_B: Group of each rollout, int64 in [0, P).
        branches: How they branch.

    Raises:
        ValueError: If a path does not match its points, points do not increase, two rollouts of a group have the same
            path, or rollouts that share a segment disagree on where it ends.
    """
    for rollout, (points, path) in enumerate(zip(*branches, strict=True)):
        has_length = len(path) == len(points) + 1 or not (path or points)
        if not has_length or min(path, default=0) < 0 or list(points) != sorted(points) or min(points, default=0) < 0:
            raise ValueError(
                f"rollout {rollout} has branch_points {tuple(points)} and branch_path {tuple(path)}; pass increasing "
                "indices of tokens, and one number more, from 0 on."
            )
    current: list[int] = index_B.tolist()
    segments: list[list[int]] = [[] for _ in current]
    num_groups = max(current, default=-1) + 1
    parents, numbers, levels = list(range(num_groups)), [0] * num_groups, []
    # A rollout without a path gets one of its own.
    paths = [tuple(path) or (-1 - rollout,) for rollout, path in zip(range(len(current)), branches.paths, strict=True)]
    for depth in range(max(map(len, paths), default=0)):
        first = len(parents)
        children: dict[tuple[int, int], int] = {}
        ends: dict[int, tuple[int, int | None]] = {}
        for rollout, path in enumerate(paths):
            if depth >= len(path):
                continue
            node = children.setdefault((current[rollout], path[depth]), first + len(children))
            if node == len(parents):
                parents.append(current[rollout])
                numbers.append(path[depth])
            end = branches.points[rollout][depth] if depth < len(path) - 1 else None  # None: the end of the rollout
            other, known = ends.setdefault(node, (rollout, end))
            if other != rollout and (known != end or end is None):
                raise ValueError(
                    f"rollouts {other} and {rollout} share the segment {path[: depth + 1]} of branch_path, but it ends "
                    f"at token {known} in one and {end} in the other (None: the last token); give shared segments the "
                    "same branch_points, and each rollout of a group its own branch_path."
                )
            current[rollout] = node
            segments[rollout].append(node)
        levels.append(slice(first, len(parents)))
    parent_M, number_M, leaf_B = (
        torch.tensor(values, dtype=torch.long, device=index_B.device) for values in (parents, numbers, current)
    )
    return Forest(parent_M, number_M, levels, leaf_B, segments, branches.points)


# The registry.
#
# Estimators per rollout map rewards [B] to advantages [B]. Estimators per token return [B, T], from rewards per token,
# [B, T], or per rollout, [B]. One call gets all rollouts of a group.
#
# `gae` and `group_ppo` need a critic, so they belong to the modules that train one and are not registered here.

_WITH_CRITIC = {"gae": "pl_grouprl.PPO (base/ppo.yaml)", "group_ppo": "pl_grouprl.GroupPPO (base/group_ppo.yaml)"}


@dataclass(frozen=True, repr=False)
class AdvantageEstimator(RegisteredFunction):
    """A registered estimator bound to its options; all estimators are called the same way, and get what they need.

    Attributes:
        per_token: Whether it returns rows of tokens, [B, T].
        takes_token_rewards: Whether its rewards are rows of tokens, [B, T].
        takes_steps: Whether its rewards may also be those of steps, several per rollout.
        skips_rollouts: Whether the rollouts whose advantages are all 0 are not meant to be trained.
    """

    per_token: bool = False
    takes_token_rewards: bool = False
    takes_steps: bool = False
    skips_rollouts: bool = False

    argument: ClassVar[str] = "advantage_estimator"
    data: ClassVar[tuple[str, ...]] = (
        *("group_ids", "lengths", "greedy_rewards"),
        *("mask", "branches", "score_norms", "turns", "states", "reduce"),  # per token
    )

    @property
    def needs_greedy(self) -> bool:
        """Whether it needs the reward of a greedy rollout of each prompt."""
        return "greedy_rewards" in self.needs

    @property
    def needs_score_norms(self) -> bool:
        """Whether it needs a forward of the policy before the updates, for the norm of each token's score."""
        return "score_norms" in self.needs

    @property
    def compares_rollouts(self) -> bool:
        """Whether it compares the rollouts of a prompt with each other."""
        return "group_ids" in self.needs

    def __call__(self, rewards: Tensor, group_ids: Tensor | Sequence[int], **data: Any) -> Tensor:
        """Return advantages, shape [B], or [B, T] if `per_token`.

        Args:
            rewards: Shape [B], or [B, T] if it takes token rewards.
            group_ids: Prompt of each rollout, shape [B].
            **data: By the names in `data`.

        Raises:
            ValueError: If data that the function needs is missing.
        """
        advantages: Tensor = self.call(rewards, group_ids=group_ids, **data)
        return advantages


ADVANTAGE_ESTIMATORS: dict[str, AdvantageEstimator] = {}
"""The registered estimators."""


def register_advantage_estimator(
    name: str,
    *,
    per_token: bool = False,
    takes_token_rewards: bool = False,
    takes_steps: bool = False,
    skips_rollouts: bool = False,
) -> Callable[[F], F]:
    """Register a function as an advantage estimator; a decorator, `@register_advantage_estimator("name")`.

    The function takes rewards first (NaN for a rollout without one), then by these names what it needs: `group_ids`,
    the prompt of each rollout, shape [B]; `lengths`, generated tokens, shape [B]; `greedy_rewards`, the reward of the
    prompt's greedy rollout, shape [B]. With `per_token`: `group_ids`; `mask`, trained tokens, bool, shape [B, T];
    `branches`, how they branch, a `BranchPaths`; `score_norms`, the squared norm of the gradient of each token's
    log-probability by the logits, shape [B, T]; `turns`, the turn of each token, and `states`, the state in which it
    was written, both int64, shape [B, T], see `gagpo_advantages`; `reduce`, which sums over ranks, or None on one rank.
    Estimators per token get the rollouts of their rank, those per rollout the rollouts of all ranks.

    Its other keyword-only arguments are the estimator's options; it should raise a ValueError for values out of range.

    Args:
        name: Its name as a value of the option `advantage_estimator`. The last function registered under a name counts.
        per_token: The function returns advantages [B, T], not [B].
        takes_token_rewards: With `per_token`: rewards are per token, [B, T], not per rollout, [B].
        takes_steps: The function also works on rewards per step, several per rollout (process supervision); it may
            only need `group_ids`.
        skips_rollouts: The rollouts whose advantages are all 0 are not meant to be trained. If no other loss trains
            them, updates and their metrics omit them.
    """

    def register(function: F) -> F:
        ADVANTAGE_ESTIMATORS[name] = AdvantageEstimator(
            name,
            function,
            per_token=per_token,
            takes_token_rewards=takes_token_rewards,
            takes_steps=takes_steps,
            skips_rollouts=skips_rollouts,
        )
        return function

    return register


def make_advantage_estimator(name: str, /, **options: Any) -> AdvantageEstimator:
    """Return the estimator registered as `name`, bound to options.

    Raises:
        ValueError: If the name is not registered, or an option is unknown.
    """
    if name in _WITH_CRITIC.keys() - ADVANTAGE_ESTIMATORS.keys():
        raise ValueError(f"advantage_estimator is {name!r}, which needs a critic; train {_WITH_CRITIC[name]}.")
    return choose(ADVANTAGE_ESTIMATORS, "advantage_estimator", name, options)
