"""Yields the micro-batches of an update; the caller runs forward and backward before asking for the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, TypeVar

import torch

from pl_grouprl.models.prefix_pass import PrefixPass
from pl_grouprl.packing import ScoringBatch, SplitGroup, SplitShape
from pl_grouprl.packing.transfer import move_together
from pl_grouprl.training.micro_batch import MicroBatch, RowOptions, dummy_group, dummy_tokens, lay_out
from pl_grouprl.training.micro_batch_plan import Shape, largest, plan_micro_batches
from pl_grouprl.training.rollout_buffer import RolloutBuffer
from pl_grouprl.training.split_passes import (
    Pass,
    Selection,
    passes_from_state,
    passes_of,
    passes_to_state,
    selection_from_state,
    selection_to_state,
)
from pl_grouprl.types import RolloutGroup
from pl_grouprl.utilities.distributed import gather_plain, raise_on_all_ranks
from pl_grouprl.utilities.progress import tick

T = TypeVar("T")


class PackedRowCache:
    """Caches the last packed row, so scoring and updating the same rollouts share it and its attention plan."""

    def __init__(self) -> None:
        self._key: Any = None
        self._scoring: ScoringBatch | None = None

    def get(self, groups: list[RolloutGroup], options: RowOptions, lay_out: Callable[[], ScoringBatch]) -> ScoringBatch:
        """Return the cached row if it has the same tokens and options; otherwise pack and cache a new one."""
        key = (options, [_contents(group) for group in groups])
        if self._scoring is None or self._key != key:
            self.clear()  # free the old row first
            self._key, self._scoring = key, lay_out()
        return self._scoring

    def clear(self) -> None:
        """Drop the cached row."""
        self._key = self._scoring = None


def _contents(group: RolloutGroup) -> tuple[Any, ...]:
    """What a row of text depends on. Copied, because the lists may be changed in place later."""
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
        ValueError: If a single rollout or prompt, or an episode that must stay whole, exceeds the token budget. Other
            ranks then raise a RuntimeError.
    """

    def __init__(
        self,
        buffer: RolloutBuffer,
        indices: Sequence[int],
        options: RowOptions,
        cache: PackedRowCache | None = None,
    ) -> None:
        self._buffer, self._options = buffer, options
        self._cache = PackedRowCache() if cache is None else cache
        self._plan = raise_on_all_ranks(partial(plan_micro_batches, buffer.groups, indices, options), options.device)
        per_rank = gather_plain(self._plan.shape.to_plain(), options.device)
        # Always run at least one row: it reaches every parameter.
        self._shape = largest([Shape(1), *map(Shape.from_plain, per_rank)])

    @property
    def number(self) -> int:
        """Number of micro-batches, including the prompts and branches of split groups."""
        return self._options.sequence_ranks * self._shape.number

    def __iter__(self) -> Iterator[MicroBatch | PrefixPass]:
        """Yield the passes of split groups, bottom-up, then the rows.

        A prompt or branch comes after the branches and slices that continue it, since its backward needs their
        gradients. Its forward runs with the first of those slices.
        """
        for split, shape in zip_longest(self._plan.splits, self._shape.splits):  # dummies are last
            for passes in self._for_sequence_group(self._passes(split, shape), passes_to_state, passes_from_state):
                yield from self._bottom_up(passes)
        for parts in [()] * (self._shape.rows - len(self._plan.rows)) + [*self._plan.rows]:  # real rows are last
            row = self._buffer.select(parts) if parts else self._dummy()
            for selection in self._for_sequence_group(row, selection_to_state, selection_from_state):
                yield self._micro_batch(selection)

    def _bottom_up(self, passes: Sequence[Pass]) -> Iterator[MicroBatch | PrefixPass]:
        """Yield the slices that continue a prompt or branch, then its own pass, once all branches below it are done."""
        path: list[tuple[PrefixPass, list[Selection]]] = []
        for one in passes:
            yield from self._up_to(one.depth, path)
            path.append((self._prefix_pass(one, path), one.slices))
        yield from self._up_to(0, path)

    def _prefix_pass(self, one: Pass, path: Sequence[tuple[PrefixPass, Any]]) -> PrefixPass:
        if one.prompt is None:
            return path[-1][0].branch(one.token_ids)
        return PrefixPass(one.prompt, self._options.device, self._options.sequence_group)

    def _up_to(self, depth: int, path: list[tuple[PrefixPass, list[Selection]]]) -> Iterator[MicroBatch | PrefixPass]:
        """Take the passes from a depth on off the path, the deepest first."""
        while len(path) > depth:
            prefix, slices = path.pop()
            for selection in slices:
                yield self._micro_batch(selection, prefix)
            yield prefix

    def _passes(self, split: SplitGroup | None, shape: SplitShape) -> list[Pass]:
        """The passes of a split group; all dummies if this rank has fewer split groups than others."""
        number = 0 if split is None else split.group
        select = partial(self._select_of, number)
        return passes_of(self._buffer.groups[number], split, shape, select, self._dummy())

    def _select_of(self, group: int, rollouts: Sequence[int]) -> Selection:
        return self._buffer.select([(group, rollouts)])

    def _dummy(self) -> Selection:
        return [dummy_group(self._buffer.groups[0])], dummy_tokens(self._buffer.values), ()

    def _for_sequence_group(self, own: T, to_plain: Callable[[T], Any], from_plain: Callable[[Any], T]) -> list[T]:
        """What this rank helps to run: that of each rank of its sequence group in turn, or only its own without one."""
        group = self._options.sequence_group
        if group is None:
            return [own]
        return [from_plain(state) for state in gather_plain(to_plain(own), self._options.device, group)]

    def _micro_batch(self, selection: Selection, prefix: PrefixPass | None = None) -> MicroBatch:
        """Lay out a micro-batch. Rows of text are cached, unless a sequence group runs them together."""
        tick()
        groups, tokens, numbers = selection
        options = self._options
        pack_row = partial(lay_out, groups, options, prefix)
        is_cached = prefix is None and options.sequence_group is None and not any(group.media for group in groups)
        is_cached = is_cached and not torch.is_inference_mode_enabled()  # inference tensors cannot be trained on
        scoring = self._cache.get(groups, options, pack_row) if is_cached else pack_row()
        return MicroBatch(scoring, move_together(tokens, options.device), groups, numbers, options)
