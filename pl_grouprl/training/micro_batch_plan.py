"""Which passes an optimizer step consists of, the same kinds in the same order on every rank.

A *pass* is a forward and a backward: of a row of whole groups, or of a slice of one large group behind its prefix.
Sharded strategies gather weights and reduce gradients in every pass, so ranks with fewer run fillers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pl_grouprl.packing import Sharing, SplitGroup, plan_repeated_rows, plan_rows
from pl_grouprl.types import RolloutGroup

Part = tuple[int, tuple[int, ...]]
"""Index of a group, and the indices of those of its rollouts that take part."""


@dataclass(frozen=True)
class MicroBatchPlan:
    """The passes of one step on this rank.

    Attributes:
        rows: Of each row what is in it.
        splits: Groups that are larger than the budget, with the slices of their rollouts.
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
    """Cut some groups into passes of at most `max_tokens` tokens.

    Args:
        groups: All groups at hand.
        indices: Which of them take part.
        sharing: How rows are packed.
        max_tokens: Most tokens of a row, prompts included, or of a slice, prompt excluded; None puts all in one row.

    Raises:
        ValueError: If a rollout, or a prompt, is too long for that by itself.
    """
    if not indices:
        return MicroBatchPlan(())
    sizes = [(len(groups[i].prompt_ids), [len(r.token_ids) for r in groups[i].rollouts]) for i in indices]
    everything = tuple((i, tuple(range(len(groups[i].rollouts)))) for i in indices)
    if max_tokens is None:
        return MicroBatchPlan((everything,))
    if sharing == "repeated":
        rows = plan_repeated_rows(sizes, max_tokens)
        return MicroBatchPlan(tuple(tuple((indices[group], tuple(own)) for group, own in row) for row in rows))
    plan = plan_rows(sizes, max_tokens)
    splits = [SplitGroup(indices[split.group], split.slices) for split in plan.splits]
    return MicroBatchPlan(
        tuple(tuple(everything[group] for group in row) for row in plan.rows),
        tuple(sorted(splits, key=lambda split: -len(split.slices))),
    )


def elementwise_max(shapes: Sequence[Sequence[int]]) -> list[int]:
    """The shape that holds those of all ranks. There is a row at the end always: it reaches every parameter."""
    width = max(len(shape) for shape in shapes)
    filled = [[*shape, *[0] * (width - len(shape))] for shape in shapes]
    rows, *slices = (max(column) for column in zip(*filled, strict=True))
    return [max(rows, 1), *slices]
