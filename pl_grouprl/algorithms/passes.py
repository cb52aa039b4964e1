"""The passes of an optimizer step, made one after another: forward here, backward by whoever asks for the next one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pl_grouprl.algorithms.distribution import from_state, to_state
from pl_grouprl.algorithms.mini_batch import MiniBatch, filler_group, filler_tokens, lay_out
from pl_grouprl.algorithms.rollout_buffer import RolloutBuffer
from pl_grouprl.algorithms.schedule import Part, Schedule, agree, plan_schedule
from pl_grouprl.models.prefix_pass import PrefixPass
from pl_grouprl.packing import Sharing
from pl_grouprl.types import RolloutGroup
from pl_grouprl.utilities.distributed import gather_plain

Chosen = tuple[list[RolloutGroup], dict[str, Tensor], tuple[int, ...]]
"""What `RolloutBuffer.select` returns."""


@dataclass(frozen=True)
class RowOptions:
    """How rollouts are laid out.

    Attributes:
        sharing: `shared` or `repeated`.
        max_tokens: Most tokens of a pass on one rank; None is no limit.
        device: Where the tensors are put.
        sequence_group: The ranks that share the tokens of each row; None if every rank runs its own.
        sequence_ranks: Their number.
    """

    sharing: Sharing
    max_tokens: int | None
    device: torch.device
    sequence_group: Any = None
    sequence_ranks: int = 1


class Passes:
    """The passes over some groups of a buffer, as many and of the same kinds on every rank.

    Args:
        buffer: This rank's rollouts.
        indices: Which of its groups take part.
        options: How they are laid out.

    Raises:
        ValueError: If a rollout is too long for the budget, or a group has to be split that cannot be.
    """

    def __init__(self, buffer: RolloutBuffer, indices: Sequence[int], options: RowOptions) -> None:
        self._buffer, self._options = buffer, options
        ranks = options.sequence_ranks
        limit = None if options.max_tokens is None else options.max_tokens * ranks
        self._schedule = plan_schedule(buffer.groups, indices, options.sharing, limit)
        if self._schedule.splits and ranks > 1:
            raise ValueError(
                f"a group is larger than max_tokens_per_micro_batch={options.max_tokens} on each of "
                f"sequence_parallel_size={ranks} ranks; groups are split on single ranks only. Raise one of them."
            )
        self._shape = agree(gather_plain(self._schedule.shape, options.device))

    @property
    def number(self) -> int:
        """How many backward passes there will be."""
        rows, *slices = self._shape
        return rows * self._options.sequence_ranks + sum(count + 1 for count in slices)

    def __iter__(self) -> Iterator[MiniBatch | PrefixPass]:
        """Slices of a large group come first, then the pass through its prefix, which goes backward only."""
        rows, *slices = self._shape
        for number, count in enumerate(slices):
            yield from self._split(number, count)
        own = self._schedule.rows
        for number in range(rows):
            filled = number - (rows - len(own))  # real rows are last
            yield from self._together(own[filled] if filled >= 0 else None)

    def _split(self, number: int, count: int) -> Iterator[MiniBatch | PrefixPass]:
        splits = self._schedule.splits
        group = filler_group(self._buffer.groups[0])
        parts: list[Part] = []
        if number < len(splits):
            index = splits[number].group
            group, parts = self._buffer.groups[index], [(index, own) for own in splits[number].slices]
        prefix = PrefixPass(group, self._options.device)
        for _ in range(count - len(parts)):
            yield self._mini_batch(self._filling(group), prefix)
        for part in parts:
            yield self._mini_batch(self._buffer.select([part]), prefix)
        yield prefix

    def _filling(self, group: RolloutGroup) -> Chosen:
        like = {name: values[0] for name, values in self._buffer.tokens.items()}
        return [filler_group(group)], filler_tokens(like), ()

    def _together(self, row: tuple[Part, ...] | None) -> Iterator[MiniBatch]:
        """A row of this rank, or those of all ranks of the sequence group one after another."""
        group = self._options.sequence_group
        chosen = self._filling(self._buffer.groups[0]) if row is None else self._buffer.select(row)
        if group is None:
            yield self._mini_batch(chosen)
            return
        groups, tokens, _ = chosen
        state = {"groups": [to_state(own) for own in groups], "tokens": tokens}
        for row_of_peer in gather_plain(state, self._options.device, group):
            yield self._mini_batch(([from_state(own) for own in row_of_peer["groups"]], row_of_peer["tokens"], ()))

    def _mini_batch(self, chosen: Chosen, prefix: PrefixPass | None = None) -> MiniBatch:
        groups, tokens, numbers = chosen
        options = self._options
        scoring = lay_out(groups, options.sharing, options.device, prefix, options.sequence_group)
        on_device = {name: own.to(options.device) for name, own in tokens.items()}
        return MiniBatch(scoring, on_device, groups, numbers, 1 / options.sequence_ranks)
