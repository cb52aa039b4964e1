"""The segments of branched rollouts as a forest.

Legend: B rollouts, P prompts (groups), M nodes: the prompts, then one node per segment, T length of the longest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


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
