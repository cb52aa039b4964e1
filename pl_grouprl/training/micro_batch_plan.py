"""Plans the micro-batches of an optimizer step: the same kinds in the same order on every rank.

A micro-batch is a row of whole groups, or a slice of one large group that continues its prompt or a branch. Sharded
strategies gather weights and reduce gradients in each, so ranks with fewer micro-batches run dummies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest
from typing import Any

from pl_grouprl.packing import SplitGroup, SplitShape, Trie, build_trie, plan_repeated_rows, plan_rows
from pl_grouprl.packing.bins import pack_sizes
from pl_grouprl.training.micro_batch import RowOptions
from pl_grouprl.types import EpisodeRows, RolloutGroup

Part = tuple[int, tuple[int, ...]]
"""Index of a group, and the indices of its selected rollouts."""


@dataclass(frozen=True)
class MicroBatchPlan:
    """The micro-batches of one step on this rank.

    Attributes:
        rows: The contents of each row.
        splits: Groups larger than the budget.
    """

    rows: tuple[tuple[Part, ...], ...]
    splits: tuple[SplitGroup, ...] = ()

    @property
    def shape(self) -> Shape:
        """What all ranks must agree on: the number of rows, and the passes of each split group."""
        return Shape(len(self.rows), tuple(split.shape for split in self.splits))


@dataclass(frozen=True)
class Shape:
    """Number of passes of each kind in a plan.

    Attributes:
        rows: Number of rows.
        splits: `SplitGroup.shape` of each split group.
    """

    rows: int
    splits: tuple[SplitShape, ...] = ()

    @property
    def number(self) -> int:
        """Number of micro-batches: rows and slices, and each prompt and branch that runs by itself."""
        return self.rows + sum(map(_num_passes, self.splits))

    def to_plain(self) -> list[Any]:
        """As lists, to be sent to other ranks."""
        return [self.rows, [[list(one) for one in split] for split in self.splits]]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> Shape:
        """The shape that `to_plain` was called on."""
        rows, splits = plain
        return cls(rows, tuple(tuple((depth, count) for depth, count in split) for split in splits))


def _num_passes(split: SplitShape) -> int:
    return sum(1 + count for _, count in split)


def plan_micro_batches(groups: Sequence[RolloutGroup], indices: Sequence[int], options: RowOptions) -> MicroBatchPlan:
    """Cut some groups into micro-batches.

    Args:
        groups: All groups of this rank.
        indices: Which of them to plan.
        options: How they are laid out. The token budget counts prompts in rows; in slices it does not count the path
            that they continue. With `whole_episodes`, a group whose episodes have several rows is split into slices
            only, without branches.

    Raises:
        ValueError: If a single rollout or prompt, or an episode that must stay whole, exceeds the budget.
    """
    max_tokens, least = options.tokens_per_row, options.min_saved_tokens
    if not indices:
        return MicroBatchPlan(())
    everything = tuple((i, tuple(range(len(groups[i].rollouts)))) for i in indices)
    if max_tokens is None:
        return MicroBatchPlan((everything,))
    if options.sharing == "repeated":
        return MicroBatchPlan(_repeated_rows(groups, indices, max_tokens, options.whole_episodes))
    plan = plan_rows([_prompt_and_trie(groups[i], least) for i in indices], max_tokens)
    splits = [replace(split, group=indices[split.group]) for split in plan.splits]
    if options.whole_episodes:
        splits = [_with_whole_episodes(split, groups[split.group], max_tokens, least) for split in splits]
    # Largest first on every rank, so that few dummies fill the differences.
    return MicroBatchPlan(
        tuple(tuple(everything[group] for group in row) for row in plan.rows),
        tuple(sorted(splits, key=lambda split: -_num_passes(split.shape))),
    )


def _repeated_rows(
    groups: Sequence[RolloutGroup], indices: Sequence[int], max_tokens: int, whole_episodes: bool
) -> tuple[tuple[Part, ...], ...]:
    """Padded batches."""
    sizes = [(len(groups[i].prompt_ids), [len(r.token_ids) for r in groups[i].rollouts]) for i in indices]
    together = None
    if whole_episodes:
        for group in (groups[i] for i in indices):
            _check_episodes(group, [_padded_size(group, episode) for episode in group.episodes], max_tokens)
        together = [groups[i].rows_per_episode for i in indices]
    rows = plan_repeated_rows(sizes, max_tokens, together)
    return tuple(tuple((indices[group], rollouts) for group, rollouts in row) for row in rows)


def _padded_size(group: RolloutGroup, episode: EpisodeRows) -> int:
    return len(episode.rows) * (len(group.prompt_ids) + max(len(row.token_ids) for row in episode.rows))


def _with_whole_episodes(
    split: SplitGroup, group: RolloutGroup, max_tokens: int, min_saved_tokens: int | None
) -> SplitGroup:
    """If episodes of the group have several rows, split it into slices of whole episodes instead."""
    episodes = group.episodes
    if len(episodes) == len(group.rollouts):
        return split
    least = None if group.media else min_saved_tokens
    sizes = [build_trie([row.token_ids for row in episode.rows], least).num_tokens for episode in episodes]
    _check_episodes(group, sizes, max_tokens)
    ends = list(accumulate((len(episode.rows) for episode in episodes), initial=0))
    bins = pack_sizes(sizes, max_tokens)
    return SplitGroup(
        split.group, tuple(tuple(r for i in found for r in range(ends[i], ends[i + 1])) for found in bins)
    )


def _check_episodes(group: RolloutGroup, sizes: Sequence[int], max_tokens: int) -> None:
    for episode, size in zip(group.episodes, sizes, strict=True):
        if size > max_tokens and len(episode.rows) > 1:
            raise ValueError(
                f"max_tokens_per_micro_batch allows {max_tokens} tokens, but the {len(episode.rows)} rows of episode "
                f"{episode.last.episode!r} of group {group.group_id} have {size}, and the loss needs them in one "
                "micro-batch, because its loss_agg_mode, policy_loss or importance_sampling works on whole rollouts. "
                "Raise max_tokens_per_micro_batch, or use loss_agg_mode='token-mean' with a per-token policy_loss and "
                "importance_sampling."
            )


def _prompt_and_trie(group: RolloutGroup, min_saved_tokens: int | None) -> tuple[int, Trie]:
    """Number of tokens of the prompt, and the trie of the rollouts."""
    # After images or videos a branch cannot run by itself, so only the prompt is shared.
    least = None if group.media else min_saved_tokens
    return len(group.prompt_ids), build_trie([rollout.token_ids for rollout in group.rollouts], least)


def largest(shapes: Sequence[Shape]) -> Shape:
    """The smallest shape that has room for each of the shapes."""
    columns = zip_longest(*(shape.splits for shape in shapes), fillvalue=())
    return Shape(max(shape.rows for shape in shapes), tuple(map(_largest_split, columns)))


def _largest_split(shapes: Sequence[SplitShape]) -> SplitShape:
    """Walk all trees at once: a tree whose next pass is less deep than another's has no such pass here."""
    merged: list[tuple[int, int]] = []
    places = [0] * len(shapes)
    while True:
        heads = [shape[place] if place < len(shape) else (-1, 0) for shape, place in zip(shapes, places, strict=True)]
        depth, count = max(heads)
        if depth < 0:
            return tuple(merged)
        merged.append((depth, count))
        places = [place + (head[0] == depth) for place, head in zip(places, heads, strict=True)]
