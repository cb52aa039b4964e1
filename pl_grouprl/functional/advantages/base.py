"""Advantage estimators by name, and what they share: statistics of groups, and forests of branches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pl_grouprl.functional.masked import Reduce, differ
from pl_grouprl.functional.registry import F, RegisteredFunction, build, registering
from pl_grouprl.utilities.options import describe_value

# Group statistics of rewards, the first step of every group-based estimator.
#
# Legend: B rollouts, P prompts (groups).
#
# Groups are given by explicit ids, in any order and of any size. Conventions of all group-based estimators:
# - a NaN reward means that the rollout has none: it is left out of all statistics and its advantage is 0 (callers also
#   mask it out of the loss);
# - a group whose rewards are all equal up to rounding (`differ`), or with fewer than two, gets exactly 0;
# - statistics are computed in float64 and returned in the dtype of the rewards (at least float32), without gradient.
#
# The only rollout of a group gets an advantage of 0, as in TRL; in verl it gets its reward.


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

    def centred(self) -> Tensor:
        """Subtract from each reward the mean of its group, shape [B]; exactly 0 without a reward or without spread."""
        centred_B = self.rewards_B - self.mean_P[self.index_B]
        return centred_B.masked_fill(~self.trained(), 0)

    def std(self) -> Tensor:
        """Return the unbiased standard deviation of each group, shape [P]; 0 for fewer than two rewards."""
        return (self.sum(self.centred().square()) / (self.count_P - 1).clamp(min=1)).sqrt()

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
        ValueError: If the shapes differ, the ids are not integers, or a reward is infinite.
    """
    ids_B = torch.as_tensor(group_ids, device=rewards.device)
    check_rewards(rewards)
    _check_ids(ids_B, len(rewards))
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    valid_B = ~rewards.isnan()
    rewards_B = rewards.to(torch.float64).masked_fill(~valid_B, 0)
    unique_P, index_B = ids_B.unique(return_inverse=True)

    zeros_P = rewards_B.new_zeros(len(unique_P))
    count_P = zeros_P.index_add(0, index_B, valid_B.to(torch.float64))
    mean_P = zeros_P.index_add(0, index_B, rewards_B) / count_P.clamp(min=1)
    highest_B, lowest_B = rewards_B.masked_fill(~valid_B, -torch.inf), rewards_B.masked_fill(~valid_B, torch.inf)
    highest_P = (zeros_P - torch.inf).scatter_reduce(0, index_B, highest_B, "amax")
    lowest_P = (zeros_P + torch.inf).scatter_reduce(0, index_B, lowest_B, "amin")
    return Groups(rewards_B, valid_B, index_B, count_P, mean_P, differ(lowest_P, highest_P), dtype)


def check_rewards(rewards: Tensor, name: str = "rewards") -> None:
    """Refuse rewards that are not one finite scalar (or NaN) per rollout.

    Args:
        rewards: Shape [B].
        name: Name of the argument, for the error.

    Raises:
        ValueError: If it has another shape, or an entry is infinite.
    """
    if rewards.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(rewards.shape)}; pass one scalar per rollout, shape [B].")
    infinite = rewards.isinf().nonzero().flatten()
    if len(infinite):
        raise ValueError(
            f"{name} is infinite for rollouts {infinite[:5].tolist()} ({len(infinite)} in all); "
            "return a finite reward, or NaN to leave a rollout out of training."
        )


def _check_ids(ids_B: Tensor, num_rollouts: int) -> None:
    if ids_B.dim() != 1 or len(ids_B) != num_rollouts:
        raise ValueError(
            f"group_ids has {ids_B.numel()} entries (shape {tuple(ids_B.shape)}) for {num_rollouts} rewards; "
            "pass the prompt's number once per rollout, in the order of the rewards."
        )
    if len(ids_B) and (ids_B.is_floating_point() or ids_B.is_complex() or ids_B.dtype == torch.bool):
        raise ValueError(f"group_ids has dtype {ids_B.dtype}; pass integers, one number per prompt.")


# The segments of branched rollouts as a forest.
#
# Legend: B rollouts, P prompts (groups), M nodes: the prompts, then one node per segment, T length of the longest row.


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

    @property
    def has_branches(self) -> bool:
        """Whether any rollout has a branch point."""
        return any(map(len, self.points))

    @property
    def first_B(self) -> Tensor:
        """The first segment of each rollout."""
        first = [row[0] for row in self.segments]
        return torch.tensor(first, dtype=torch.long, device=self.leaf_B.device)

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
        ValueError: If the numbers of paths, points and rollouts do not match, points do not increase, two rollouts of a
            group have the same path, or rollouts that share a segment disagree on where it ends.
    """
    _check(branches, len(index_B))
    current: list[int] = index_B.tolist()
    segments: list[list[int]] = [[] for _ in current]
    num_groups = max(current, default=-1) + 1
    parents, numbers, levels = list(range(num_groups)), [0] * num_groups, []
    paths = [tuple(path) or (-1 - rollout,) for rollout, path in enumerate(branches.paths)]
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
            _check_end(ends.setdefault(node, (rollout, _end(branches, rollout, depth))), branches, rollout, depth)
            current[rollout] = node
            segments[rollout].append(node)
        levels.append(slice(first, len(parents)))
    device = index_B.device
    return Forest(
        torch.tensor(parents, dtype=torch.long, device=device),
        torch.tensor(numbers, dtype=torch.long, device=device),
        levels,
        torch.tensor(current, dtype=torch.long, device=device),
        segments,
        branches.points,
    )


def _end(branches: BranchPaths, rollout: int, depth: int) -> int | None:
    """Where a rollout's segment of this depth ends; None if it is the last."""
    points = branches.points[rollout]
    return points[depth] if depth < len(points) else None


def _check_end(known: tuple[int, int | None], branches: BranchPaths, rollout: int, depth: int) -> None:
    first, end = known
    own = _end(branches, rollout, depth)
    if first != rollout and (own != end or own is None):
        where = [f"at token {place}" if place is not None else "with the rollout" for place in (end, own)]
        raise ValueError(
            f"rollouts {first} and {rollout} share the segment {tuple(branches.paths[rollout][: depth + 1])} of "
            f"branch_path, which ends {where[0]} in one and {where[1]} in the other; give shared segments the same "
            "branch_points, and each rollout of a group its own branch_path."
        )


def _check(branches: BranchPaths, num_rollouts: int) -> None:
    for name, rows in zip(branches._fields, branches, strict=True):
        if len(rows) != num_rollouts:
            raise ValueError(f"branches.{name} has {len(rows)} rows for {num_rollouts} rollouts; pass one per rollout.")
    for rollout, (points, path) in enumerate(zip(*branches, strict=True)):
        if len(path) != (len(points) + 1 if points else min(len(path), 1)):
            raise _refused(rollout, "branch_path", path, f"one number more than branch_points, {tuple(points)}")
        if any(number < 0 for number in path):
            raise _refused(rollout, "branch_path", path, "numbers from 0 on")
        if any(end < start for start, end in zip((0, *points), points, strict=False)):
            raise _refused(rollout, "branch_points", points, "increasing indices of tokens")


def _refused(rollout: int, name: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"{name} of rollout {rollout} is {tuple(value)}; it must have {expected}.")


# Advantage estimators by name, with their options.
#
# There are two kinds. Per-rollout estimators map rewards [B] to advantages [B]. Per-token estimators return [B, T],
# from
# rewards per token, [B, T], or per rollout, [B]. One call gets all rollouts of a group.
#
# `gae` and `group_ppo` need a critic, so they belong to the modules that train one and are not registered here.
#
# Legend: B rollouts, T length of the longest row.

OF_ROLLOUTS = ("group_ids", "lengths", "greedy_rewards")
OF_TOKENS = ("group_ids", "mask", "branches", "score_norms", "reduce")


@dataclass(frozen=True, repr=False)
class AdvantageEstimator(RegisteredFunction):
    """A registered estimator bound to its options; all estimators are called the same way, and read what they need.

    Attributes:
        needs: The data that the function takes besides rewards.
        per_token: Whether it returns rows of tokens, [B, T].
        takes_token_rewards: Whether its rewards are rows of tokens, [B, T].
        takes_steps: Whether its rewards may also be those of steps, several per rollout.
        skips_rollouts: Whether the rollouts whose advantages are all 0 are not meant to be trained.
    """

    needs: tuple[str, ...] = ("group_ids",)
    per_token: bool = False
    takes_token_rewards: bool = False
    takes_steps: bool = False
    skips_rollouts: bool = False

    argument: ClassVar[str] = "advantage_estimator"
    data: ClassVar[tuple[str, ...]] = tuple(dict.fromkeys(OF_ROLLOUTS + OF_TOKENS))

    @property
    def takes(self) -> tuple[str, ...]:
        """Same as `needs`."""
        return self.needs

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

    def __call__(
        self,
        rewards: Tensor,
        group_ids: Tensor | Sequence[int],
        *,
        lengths: Tensor | None = None,
        greedy_rewards: Tensor | None = None,
        mask: Tensor | None = None,
        branches: BranchPaths | None = None,
        score_norms: Tensor | None = None,
        reduce: Reduce | None = None,
    ) -> Tensor:
        """Return advantages, shape [B], or [B, T] if `per_token`.

        Raises:
            ValueError: If data that the function needs is missing.
        """
        available = {
            "group_ids": group_ids,
            "lengths": lengths,
            "greedy_rewards": greedy_rewards,
            "mask": mask,
            "branches": branches,
            "score_norms": score_norms,
            "reduce": reduce,
        }
        data = {name: available[name] for name in self.needs}
        for name, value in data.items():
            if value is None and name != "reduce":
                raise ValueError(f"{name} is None, but the estimator {self.name!r} needs it; pass it by name.")
        advantages: Tensor = self.function(rewards, **data, **self.options)
        return advantages

    def try_out(self) -> None:
        """Call the function on a group of two rollouts of one token each.

        Raises:
            TypeError: If it returns anything but advantages of the right shape.
        """
        zeros_B = torch.zeros(2, device="cpu")
        zeros_BT, ids_B = zeros_B[:, None], zeros_B.long()
        advantages = self(
            zeros_BT if self.takes_token_rewards else zeros_B,
            ids_B,
            lengths=ids_B + 1,
            greedy_rewards=zeros_B,
            mask=zeros_BT == 0,
            branches=BranchPaths([(), ()], [(), ()]),
            score_norms=zeros_BT,
        )
        expected = (zeros_BT if self.per_token else zeros_B).shape
        if not isinstance(advantages, Tensor) or advantages.shape != expected:
            found = f"shape {tuple(advantages.shape)}" if isinstance(advantages, Tensor) else describe_value(advantages)
            raise TypeError(
                f"advantage_estimator={self.name!r} returned {found} for two rollouts of one token; return advantages "
                f"of shape {'[B, T]' if self.per_token else '[B]'}."
            )


ADVANTAGE_ESTIMATORS: dict[str, AdvantageEstimator] = {}
"""The registered estimators."""


def register_advantage_estimator(
    name: str,
    *,
    needs: Sequence[str] = ("group_ids",),
    per_token: bool = False,
    takes_token_rewards: bool = False,
    takes_steps: bool = False,
    skips_rollouts: bool = False,
) -> Callable[[F], F]:
    """Register a function as an advantage estimator; a decorator, `@register_advantage_estimator("name")`.

    The function takes rewards first (NaN for a rollout without one), then by name what it needs. Its other keyword-only
    arguments are the estimator's options, with their types and defaults; it should raise a ValueError for values out of
    range. It is called on two rollouts whenever it is chosen, as a check.

    Args:
        name: Its name as a value of the option `advantage_estimator`.
        needs: Names of the data that the function takes besides rewards: `group_ids`, the prompt of each rollout, shape
            [B]; `lengths`, generated tokens, shape [B]; `greedy_rewards`, the reward of the prompt's greedy rollout,
            shape [B]. With `per_token`: `group_ids`; `mask`, trained tokens, bool, shape [B, T]; `branches`, how they
            branch, a `BranchPaths`; `score_norms`, the squared norm of the gradient of each token's log-probability by
            the logits, shape [B, T]; `reduce`, which sums over ranks, or None on one rank. Per-token estimators get the
            rollouts of their rank, per-rollout estimators those of all ranks.
        per_token: The function returns advantages [B, T], not [B].
        takes_token_rewards: With `per_token`: rewards are per token, [B, T], not per rollout, [B].
        takes_steps: The function also works on rewards per step, several per rollout (process supervision); it may
            only need `group_ids`.
        skips_rollouts: The rollouts whose advantages are all 0 are not meant to be trained. If no other loss trains
            them, updates leave them out, and so do metrics of the update.

    Raises:
        ValueError: If the name belongs to another function, or `needs` has unknown names.
        TypeError: If the function's arguments do not fit what is declared.
    """
    if isinstance(needs, str):
        raise TypeError(f"advantage_estimator {name!r}: needs is the string {needs!r}; pass a tuple, ({needs!r},).")
    available = OF_TOKENS if per_token else OF_ROLLOUTS
    missing = [need for need in needs if need not in available]
    if missing or (takes_token_rewards and not per_token):
        what = ", ".join(missing) or "takes_token_rewards"
        raise ValueError(
            f"advantage_estimator {name!r} needs {what}; with per_token={per_token} there are {', '.join(available)}."
        )
    if takes_steps and (per_token or set(needs) != {"group_ids"}):
        raise ValueError(f"advantage_estimator {name!r} takes steps, for which it may only need group_ids.")
    return registering(
        ADVANTAGE_ESTIMATORS,
        AdvantageEstimator,
        name,
        needs=tuple(needs),
        per_token=per_token,
        takes_token_rewards=takes_token_rewards,
        takes_steps=takes_steps,
        skips_rollouts=skips_rollouts,
    )


def make_advantage_estimator(name: str, /, **options: Any) -> AdvantageEstimator:
    """Return the estimator registered as `name`, bound to options.

    Raises:
        ValueError: If the name is not registered, or an option is unknown, of the wrong type or out of range.
    """
    return build(ADVANTAGE_ESTIMATORS, "advantage_estimator", name, options)
