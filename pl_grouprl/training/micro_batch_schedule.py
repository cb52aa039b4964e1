"""Yields the micro-batches of an update; the caller runs forward and backward before asking for the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pl_grouprl.models.prefix_pass import PrefixPass
from pl_grouprl.packing import ScoringBatch, Sharing
from pl_grouprl.packing.transfer import move_together
from pl_grouprl.training.distribution import from_state, to_state
from pl_grouprl.training.micro_batch import MicroBatch, dummy_group, dummy_tokens, lay_out
from pl_grouprl.training.micro_batch_plan import elementwise_max, plan_micro_batches
from pl_grouprl.training.rollout_buffer import RolloutBuffer
from pl_grouprl.types import RolloutGroup
from pl_grouprl.utilities.distributed import gather_plain
from pl_grouprl.utilities.progress import tick

Selection = tuple[list[RolloutGroup], dict[str, Tensor], tuple[int, ...]]
"""What `RolloutBuffer.select` returns."""


@dataclass(frozen=True)
class RowOptions:
    """How rollouts are laid out.

    Attributes:
        sharing: `shared` or `repeated`.
        max_tokens: Most tokens of a micro-batch on one rank; None is no limit.
        device: Device of the tensors.
        sequence_group: The ranks that split the tokens of each row; None if every rank runs its own rows.
        sequence_ranks: Number of those ranks.
    """

    sharing: Sharing
    max_tokens: int | None
    device: torch.device
    sequence_group: Any = None
    sequence_ranks: int = 1


class PackedRowCache:
    """Caches the last packed row, so scoring and updating the same rollouts share it and its attention plan."""

    def __init__(self) -> None:
        self._key: Any = None
        self._scoring: ScoringBatch | None = None

    def get(self, groups: list[RolloutGroup], options: RowOptions, lay_out: Callable[[], ScoringBatch]) -> ScoringBatch:
        """Return the row of these groups, packed again unless the last one had the same tokens and options."""
        key = (options, [_contents(group) for group in groups])
        if self._scoring is None or self._key != key:
            self.clear()  # free the old row first
            self._key, self._scoring = key, lay_out()
        return self._scoring

    def clear(self) -> None:
        """Drop the cached row."""
        self._key = self._scoring = None


def _contents(group: RolloutGroup) -> tuple[Any, ...]:
    """What a row of text depends on; copied, because lists may be changed in place."""
    rollouts = [(tuple(r.token_ids), r.loss_mask and tuple(r.loss_mask)) for r in group.rollouts]
    return tuple(group.prompt_ids), group.group_id, rollouts


class MicroBatchSchedule:
    """The micro-batches of some groups of a buffer, with the same number and kinds on every rank.

    Args:
        buffer: This rank's rollouts.
        indices: Which of its groups to use.
        options: How they are laid out.
        cache: Keeps the last packed row.

    Raises:
        ValueError: If a single rollout or prompt exceeds the token budget.
    """

    def __init__(
        self, buffer: RolloutBuffer, indices: Sequence[int], options: RowOptions, cache: PackedRowCache | None = None
    ) -> None:
        self._buffer, self._options = buffer, options
        self._cache = PackedRowCache() if cache is None else cache
        ranks = options.sequence_ranks
        limit = None if options.max_tokens is None else options.max_tokens * ranks
        self._plan = plan_micro_batches(buffer.groups, indices, options.sharing, limit)
        self._shape = elementwise_max(gather_plain(self._plan.shape, options.device))

    @property
    def number(self) -> int:
        """Number of micro-batches, including the prefixes of split groups."""
        rows, *slices = self._shape
        return self._options.sequence_ranks * (rows + sum(count + 1 for count in slices))

    def __iter__(self) -> Iterator[MicroBatch | PrefixPass]:
        """Yield the slices of each split group and then its prefix, whose backward is still to run; then the rows.

        The first slice runs the prefix's forward.
        """
        rows, *slices = self._shape
        for number, count in enumerate(slices):
            for selections in self._of_peers(self._slices(number, count)):
                group = selections[-1][0][0]
                prefix = PrefixPass(group, self._options.device, self._options.sequence_group)
                yield from (self._micro_batch(selection, prefix) for selection in selections)
                yield prefix
        for parts in [()] * (rows - len(self._plan.rows)) + [*self._plan.rows]:  # real rows are last
            row = self._buffer.select(parts) if parts else self._dummy()
            for (peers_row,) in self._of_peers([row]):
                yield self._micro_batch(peers_row)

    def _slices(self, number: int, count: int) -> list[Selection]:
        """The slices of a split group, padded with dummies in front."""
        splits = self._plan.splits
        parts = [(splits[number].group, rollouts) for rollouts in splits[number].slices] if number < len(splits) else []
        return [self._dummy()] * (count - len(parts)) + [self._buffer.select([part]) for part in parts]

    def _dummy(self) -> Selection:
        like = {name: values[0] for name, values in self._buffer.tokens.items()}
        return [dummy_group(self._buffer.groups[0])], dummy_tokens(like), ()

    def _of_peers(self, selections: list[Selection]) -> Iterator[list[Selection]]:
        """What this rank runs: its own selections, or those of each rank of its sequence group in turn."""
        group = self._options.sequence_group
        if group is None:
            yield selections
            return
        states = [([to_state(one) for one in groups], tokens, numbers) for groups, tokens, numbers in selections]
        for peer in gather_plain(states, self._options.device, group):
            yield [([from_state(one) for one in groups], tokens, numbers) for groups, tokens, numbers in peer]

    def _micro_batch(self, selection: Selection, prefix: PrefixPass | None = None) -> MicroBatch:
        """Lay out a micro-batch. A row of text that no peer shares is cached."""
        tick()
        groups, tokens, numbers = selection
        options = self._options
        lay = partial(lay_out, groups, options.sharing, options.device, prefix, options.sequence_group)
        keeps = prefix is None and options.sequence_group is None and not any(group.media for group in groups)
        keeps = keeps and not torch.is_inference_mode_enabled()  # inference tensors cannot be trained on
        scoring = self._cache.get(groups, options, lay) if keeps else lay()
        return MicroBatch(scoring, move_together(tokens, options.device), groups, numbers, 1 / options.sequence_ranks)
