"""The micro-batches of an update, one at a time: the caller runs forward and backward before it asks for the next."""

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

Chosen = tuple[list[RolloutGroup], dict[str, Tensor], tuple[int, ...]]
"""What `RolloutBuffer.select` returns."""


@dataclass(frozen=True)
class RowOptions:
    """How rollouts are laid out.

    Attributes:
        sharing: `shared` or `repeated`.
        max_tokens: Most tokens of a micro-batch on one rank; None is no limit.
        device: Where the tensors are put.
        sequence_group: The ranks that share the tokens of each row; None if every rank runs its own.
        sequence_ranks: Their number.
    """

    sharing: Sharing
    max_tokens: int | None
    device: torch.device
    sequence_group: Any = None
    sequence_ranks: int = 1


class PackedRowCache:
    """The row that was packed last: scoring and update of the same rollouts share it, with its attention plan."""

    def __init__(self) -> None:
        self._of: Any = None
        self._scoring: ScoringBatch | None = None

    def get(self, groups: list[RolloutGroup], options: RowOptions, lay_out: Callable[[], ScoringBatch]) -> ScoringBatch:
        """The row of these groups; packed again if the last one was another, or if a token of it has changed."""
        of = (options, [_contents(group) for group in groups])
        if self._scoring is None or self._of != of:
            self.clear()  # before there are two
            self._of, self._scoring = of, lay_out()
        return self._scoring

    def clear(self) -> None:
        """Forget it."""
        self._of = self._scoring = None


def _contents(group: RolloutGroup) -> tuple[Any, ...]:
    """What a row of text is made of; copies, because lists may be changed in place."""
    rollouts = [(tuple(own.token_ids), own.loss_mask and tuple(own.loss_mask)) for own in group.rollouts]
    return tuple(group.prompt_ids), group.group_id, rollouts


class MicroBatchSchedule:
    """The micro-batches of some groups of a buffer, as many and of the same kinds on every rank.

    Args:
        buffer: This rank's rollouts.
        indices: Which of its groups take part.
        options: How they are laid out.
        cache: Keeps the last row for further micro-batches.

    Raises:
        ValueError: If a rollout, or a prompt, is too long for the budget.
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
        """Number of micro-batches, prefixes of split groups included."""
        rows, *slices = self._shape
        return self._options.sequence_ranks * (rows + sum(count + 1 for count in slices))

    def __iter__(self) -> Iterator[MicroBatch | PrefixPass]:
        """Slices of a large group come first, then the pass through its prefix, which runs backward only."""
        rows, *slices = self._shape
        for number, count in enumerate(slices):
            for chosen in self._of_peers(self._slices(number, count)):
                group = chosen[-1][0][0]
                prefix = PrefixPass(group, self._options.device, self._options.sequence_group)
                yield from (self._micro_batch(part, prefix) for part in chosen)
                yield prefix
        for parts in [()] * (rows - len(self._plan.rows)) + [*self._plan.rows]:  # real rows are last
            row = self._buffer.select(parts) if parts else self._filler()
            for (peers_row,) in self._of_peers([row]):
                yield self._micro_batch(peers_row)

    def _slices(self, number: int, count: int) -> list[Chosen]:
        """The slices of a split group, after dummies."""
        splits = self._plan.splits
        parts = [(splits[number].group, own) for own in splits[number].slices] if number < len(splits) else []
        return [self._filler()] * (count - len(parts)) + [self._buffer.select([part]) for part in parts]

    def _filler(self) -> Chosen:
        like = {name: values[0] for name, values in self._buffer.tokens.items()}
        return [dummy_group(self._buffer.groups[0])], dummy_tokens(like), ()

    def _of_peers(self, own: list[Chosen]) -> Iterator[list[Chosen]]:
        """What this rank runs: its own, or in turn what each rank of its sequence group has."""
        group = self._options.sequence_group
        if group is None:
            yield own
            return
        states = [([to_state(one) for one in groups], tokens, numbers) for groups, tokens, numbers in own]
        for peer in gather_plain(states, self._options.device, group):
            yield [([from_state(one) for one in groups], tokens, numbers) for groups, tokens, numbers in peer]

    def _micro_batch(self, chosen: Chosen, prefix: PrefixPass | None = None) -> MicroBatch:
        """Lay out a micro-batch. A row of text that no peer shares is cached."""
        tick()
        groups, tokens, numbers = chosen
        options = self._options
        lay = partial(lay_out, groups, options.sharing, options.device, prefix, options.sequence_group)
        keeps = prefix is None and options.sequence_group is None and not any(group.media for group in groups)
        keeps = keeps and not torch.is_inference_mode_enabled()  # such tensors cannot be trained on
        scoring = self._cache.get(groups, options, lay) if keeps else lay()
        return MicroBatch(scoring, move_together(tokens, options.device), groups, numbers, 1 / options.sequence_ranks)
