"""Plan the micro-batches of an optimizer step: the same kinds in the same order on every rank.

A micro-batch is a row of whole groups, or a slice of one large group that continues its prefix. Sharded strategies
gather weights and reduce gradients in each, so ranks with fewer micro-batches run dummies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pl_grouprl.packing import Sharing, SplitGroup, plan_repeated_rows, plan_rows
from pl_grouprl.types import RolloutGroup

Part = tuple[int, tuple[int, ...]]
"""Index of a group, and the indices of its selected rollouts."""


@dataclass(frozen=True)
class MicroBatchPlan:
    """The micro-batches of one step on this rank.

    Attributes:
        rows: The contents of each row.
        splits: Groups larger than the budget, with the slices of their rollouts.
    """

    rows: tuple[tuple[Part, ...], ...]
    splits: tuple[SplitGroup, ...] = ()

    @property
    def shape(self) -> list[int]:
        """Number of rows, then the number of slices of each split group, largest first."""
        return [len(self.rows), *(len(split.slices) for split in self.splits)]


def plan_micro_batches(
    groups: Sequence[RolloutGroup], indices: Sequence[int], sharing: Sharing, max_tokens: int | None
) -> MicroBatchPlan:
    """Cut some groups into micro-batches of at most `max_tokens` tokens.

    Args:
        groups: All groups of this rank.
        indices: Which of them to plan.
        sharing: How rows are packed.
        max_tokens: Most tokens in a row, with prompts, or in a slice, without its prompt; None puts all in one row.

    Raises:
        ValueError: If a single rollout or prompt exceeds `max_tokens`.
    """
    if not indices:
        return MicroBatchPlan(())
    sizes = [(len(groups[i].prompt_ids), [len(r.token_ids) for r in groups[i].rollouts]) for i in indices]
    everything = tuple((i, tuple(range(len(groups[i].rollouts)))) for i in indices)
    if max_tokens is None:
        return MicroBatchPlan((everything,))
    if sharing == "repeated":
        rows = plan_repeated_rows(sizes, max_tokens)
        return MicroBatchPlan(
            tuple(tuple((indices[group], tuple(rollouts)) for group, rollouts in row) for row in rows)
        )
    plan = plan_rows(sizes, max_tokens)
    splits = [SplitGroup(indices[split.group], split.slices) for split in plan.splits]
    return MicroBatchPlan(
        tuple(tuple(everything[group] for group in row) for row in plan.rows),
        tuple(sorted(splits, key=lambda split: -len(split.slices))),
    )


def elementwise_max(shapes: Sequence[Sequence[int]]) -> list[int]:
    """The smallest shape that fits all ranks. It has at least one row, which runs last and reaches every parameter."""
    width = max(len(shape) for shape in shapes)
    filled = [[*shape, *[0] * (width - len(shape))] for shape in shapes]
    rows, *slices = (max(column) for column in zip(*filled, strict=True))
    return [max(rows, 1), *slices]
