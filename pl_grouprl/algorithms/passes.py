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
from pl_grouprl.algorithms.schedule import agree, plan_schedule
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
        ValueError: If a rollout, or a prompt, is too long for the budget.
    """

    def __init__(self, buffer: RolloutBuffer, indices: Sequence[int], options: RowOptions) -> None:
        self._buffer, self._options = buffer, options
        ranks = options.sequence_ranks
        limit = None if options.max_tokens is None else options.max_tokens * ranks
        self._schedule = plan_schedule(buffer.groups, indices, options.sharing, limit)
        self._shape = agree(gather_plain(self._schedule.shape, options.device))

    @property
    def number(self) -> int:
        """How many backward passes there will be."""
        rows, *slices = self._shape
        return self._options.sequence_ranks * (rows + sum(count + 1 for count in slices))

    def __iter__(self) -> Iterator[MiniBatch | PrefixPass]:
        """Slices of a large group come first, then the pass through its prefix, which goes backward only."""
        rows, *slices = self._shape
        own = [self._buffer.select(row) for row in self._schedule.rows]
        for number, count in enumerate(slices):
            for chosen in self._of_peers(self._slices(number, count)):
                group = chosen[-1][0][0]
                prefix = PrefixPass(group, self._options.device, self._options.sequence_group)
                yield from (self._mini_batch(part, prefix) for part in chosen)
                yield prefix
        for row in [self._filler()] * (rows - len(own)) + own:  # real rows are last
            yield from (self._mini_batch(chosen) for (chosen,) in self._of_peers([row]))

    def _slices(self, number: int, count: int) -> list[Chosen]:
        """The slices of a split group, with fillers in front."""
        splits = self._schedule.splits
        parts = [(splits[number].group, own) for own in splits[number].slices] if number < len(splits) else []
        return [self._filler()] * (count - len(parts)) + [self._buffer.select([part]) for part in parts]

    def _filler(self) -> Chosen:
        like = {name: values[0] for name, values in self._buffer.tokens.items()}
        return [filler_group(self._buffer.groups[0])], filler_tokens(like), ()

    def _of_peers(self, own: list[Chosen]) -> Iterator[list[Chosen]]:
        """What this rank is to run: its own, or what the ranks of its sequence group have, one after another."""
        group = self._options.sequence_group
        if group is None:
            yield own
            return
        states = [([to_state(one) for one in groups], tokens, numbers) for groups, tokens, numbers in own]
        for peer in gather_plain(states, self._options.device, group):
            yield [([from_state(one) for one in groups], tokens, numbers) for groups, tokens, numbers in peer]

    def _mini_batch(self, chosen: Chosen, prefix: PrefixPass | None = None) -> MiniBatch:
        groups, tokens, numbers = chosen
        options = self._options
        scoring = lay_out(groups, options.sharing, options.device, prefix, options.sequence_group)
        on_device = {name: own.to(options.device) for name, own in tokens.items()}
        return MiniBatch(scoring, on_device, groups, numbers, 1 / options.sequence_ranks)
