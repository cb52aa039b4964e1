"""Packs the rollouts of an update into micro-batches within a token budget, the same on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, zip_longest
from typing import Any, NamedTuple, TypeVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from pl_grouprl.attention.sequence_parallel import check_sequence_parallel, check_sequence_parallel_size, sequence_mesh
from pl_grouprl.media.rows import MediaPrompt
from pl_grouprl.models.score import PrefixPass
from pl_grouprl.packing import (
    Branch,
    ScoringBatch,
    Sharing,
    SplitGroup,
    SplitShape,
    Trie,
    build_trie,
    pack,
    plan_repeated_rows,
    plan_rows,
)
from pl_grouprl.packing.batch import move_together, pack_slice
from pl_grouprl.packing.plan import pack_sizes
from pl_grouprl.packing.trie import MIN_SAVED_TOKENS
from pl_grouprl.training.buffer import RolloutBuffer, from_state, to_state
from pl_grouprl.training.run import Run
from pl_grouprl.types import EpisodeRows, Prompt, Rollout, RolloutGroup
from pl_grouprl.utilities.distributed import gather_plain, raise_on_all_ranks
from pl_grouprl.utilities.modes import naming_memory
from pl_grouprl.utilities.options import check_options
from pl_grouprl.utilities.progress import tick

# The passes of a group larger than a micro-batch, padded with dummies so that every rank runs the same kinds.

Selection = tuple[list[RolloutGroup], dict[str, Tensor], tuple[int, ...]]
"""What `RolloutBuffer.select` returns."""


class Pass(NamedTuple):
    """A prompt or branch to run, with the slices that continue it.

    Attributes:
        depth: 0 for a prompt, otherwise as in `packing.Branch`.
        prompt: A group with the prompt, without rollouts; None for a branch.
        token_ids: Tokens of the branch; one token for a dummy. Not used for a prompt.
        slices: Rollouts that continue it, slice by slice.
    """

    depth: int
    prompt: RolloutGroup | None
    token_ids: list[int]
    slices: list[Selection]


def passes_of(
    group: RolloutGroup,
    split: SplitGroup | None,
    shape: SplitShape,
    select: Callable[[Sequence[int]], Selection],
    dummy: Selection,
) -> list[Pass]:
    """The passes of a group: its prompt, then its branches, depth-first.

    Args:
        group: The group.
        split: How it is split; None returns only dummies.
        shape: Which passes to return. Dummies fill up: before the slices, and after the branches.
        select: Selects rollouts of the group by their indices.
        dummy: A selection of one rollout of one token.
    """
    prompt = replace(group if split else dummy[0][0], rollouts=[])
    own: list[tuple[int, SplitGroup | Branch]] = []
    if split is not None:
        own = [*((branch.depth, branch) for branch in reversed(split.branches)), (0, split)]
    passes = []
    for depth, count in shape:
        # The shape has room for the whole tree, so its passes are those that are as deep as the next of the tree.
        part = own.pop()[1] if own and own[-1][0] == depth else None
        slices = () if part is None else part.slices
        tokens: list[int] = group.prompt_ids[-1:]
        if isinstance(part, Branch):
            tokens = group.rollouts[part.rollout].token_ids[part.start : part.stop]
        selected = [dummy] * (count - len(slices)) + [select(indices) for indices in slices]
        passes.append(Pass(depth, None if depth else prompt, tokens, selected))
    return passes


def passes_to_state(passes: Sequence[Pass]) -> list[dict[str, Any]]:
    """Plain containers and tensors, to be sent to another rank."""
    return [
        {
            "depth": one.depth,
            "prompt": None if one.prompt is None else to_state(one.prompt),
            "token_ids": one.token_ids,
            "slices": [selection_to_state(selection) for selection in one.slices],
        }
        for one in passes
    ]


def passes_from_state(state: Sequence[dict[str, Any]]) -> list[Pass]:
    """The passes that `passes_to_state` was given."""
    return [
        Pass(
            one["depth"],
            None if one["prompt"] is None else from_state(one["prompt"]),
            one["token_ids"],
            [selection_from_state(selection) for selection in one["slices"]],
        )
        for one in state
    ]


def selection_to_state(selection: Selection) -> Any:
    """Plain containers and tensors, to be sent to another rank."""
    groups, tokens, numbers = selection
    return [to_state(group) for group in groups], tokens, numbers


def selection_from_state(state: Any) -> Selection:
    """The selection that `selection_to_state` was given."""
    groups, tokens, numbers = state
    return [from_state(group) for group in groups], tokens, numbers


# One forward and backward of an update: rollouts laid out for the decoder, with their per-token quantities.
#
# Legend: B rollouts, E episodes, N response tokens of all rollouts, concatenated.


@dataclass(frozen=True)
class RowOptions:
    """How rollouts are laid out.

    Attributes:
        sharing: `shared` or `repeated`.
        max_tokens: Most tokens of a micro-batch on one rank; None is no limit.
        device: Device of the tensors.
        sequence_group: The ranks that split the tokens of each row; None if every rank runs its own rows.
        sequence_ranks: Number of those ranks.
        share_across_groups: Whether prompts share their beginning; see `packing.pack`.
        min_saved_tokens: What rollouts must save to share a segment; see `packing.build_trie`.
        whole_episodes: Whether all rows of an episode must be in one micro-batch. Not compared, because
            the layout of a row does not depend on it.
    """

    sharing: Sharing
    max_tokens: int | None
    device: torch.device
    sequence_group: Any = None
    sequence_ranks: int = 1
    share_across_groups: bool = False
    min_saved_tokens: int | None = MIN_SAVED_TOKENS
    whole_episodes: bool = field(default=False, compare=False)

    @property
    def tokens_per_row(self) -> int | None:
        """Most tokens of a row, on all ranks that split it; None is no limit."""
        return None if self.max_tokens is None else self.max_tokens * self.sequence_ranks


@dataclass(frozen=True)
class MicroBatch:
    """Whole groups, or a slice of one, laid out for one decoder call, with their per-token quantities on the axis N.

    Attributes:
        scoring: The decoder call.
        tokens: The buffer's per-token quantities, by name, on the module's device.
        groups: The groups, reduced to their rollouts in this micro-batch.
        rollout_numbers: Index of each rollout in its rank's buffer, shape [B]; empty for a dummy. In an update of a
            loss that is not overridden, in what is left of the buffer without idle rollouts.
        options: How it was laid out; None if it will not be laid out again.
    """

    scoring: ScoringBatch
    tokens: dict[str, Tensor]
    groups: Sequence[RolloutGroup]
    rollout_numbers: tuple[int, ...] = ()
    options: RowOptions | None = None

    @property
    def weight(self) -> float:
        """This rank's share: 1 / s if s ranks compute the micro-batch together."""
        return 1.0 if self.options is None else 1 / self.options.sequence_ranks

    @property
    def mask_N(self) -> Tensor:
        """Which tokens are trained."""
        return self.tokens["loss_mask"]

    @property
    def rollouts(self) -> dict[str, Any]:
        """Each token's rollout and the number of rollouts: keyword arguments of the losses.

        The rows of an episode in this micro-batch are one rollout.
        """
        index_N, num_rollouts = self.scoring.rollout_index_N, self.scoring.num_rollouts
        sizes = torch.tensor([rows for group in self.groups for rows in group.rows_per_episode])
        if len(sizes) < num_rollouts:
            index_E = torch.arange(len(sizes)).repeat_interleave(sizes)
            index_N, num_rollouts = index_E.to(index_N.device)[index_N], len(sizes)
        return {"rollout_index_N": index_N, "num_rollouts": num_rollouts}

    def repack(self, groups: Sequence[RolloutGroup]) -> ScoringBatch:
        """Lay out truncated groups the same way."""
        assert self.options is not None
        return lay_out(groups, self.options, self.scoring.prefix)


def lay_out(groups: Sequence[RolloutGroup], options: RowOptions, prefix: PrefixPass | None = None) -> ScoringBatch:
    """Lay out groups, or the rollouts of one group that continue what has already run.

    Args:
        groups: The groups to score.
        options: How.
        prefix: For a slice of a group's rollouts, the pass through its prompt or a branch.
    """
    least = options.min_saved_tokens
    if prefix is not None:
        (group,) = groups
        return pack_slice(group, range(len(group.rollouts)), prefix, options.device, min_saved_tokens=least)
    across = options.share_across_groups
    batch = pack(groups, options.sharing, share_across_groups=across, min_saved_tokens=least, device=options.device)
    return replace(batch, sequence_group=options.sequence_group)


def dummy_group(like: RolloutGroup) -> RolloutGroup:
    """A dummy group of a token or two for ranks with no work left; keeps the prompt's images, if any."""
    prompt = like.prompt_ids if like.media else like.prompt_ids[:1]
    return replace(like, prompt_ids=prompt, rollouts=[Rollout(like.prompt_ids[-1:], logprobs=[0.0])])


def dummy_tokens(like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Per-token quantities of the dummy group: nothing is trained or rewarded.

    Args:
        like: Quantities whose names and dtypes are copied.
    """
    return {name: torch.zeros(1, *values.shape[1:], dtype=values.dtype) for name, values in like.items()}


# Plans the micro-batches of an optimizer step: the same kinds in the same order on every rank.
#
# A micro-batch is a row of whole groups, or a slice of one large group that continues its prompt or a branch. Sharded
# strategies gather weights and reduce gradients in each, so ranks with fewer micro-batches run dummies.

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


# Packs the rollouts of an update, or of a scoring pass, into micro-batches within a token budget.


class MicroBatcher:
    """Plans micro-batches, with the same number and kinds on every rank.

    Args:
        run: The run.
        sharing: `shared` encodes the prompt of a group once, `repeated` once per rollout.
        max_tokens: Most tokens of a micro-batch on one rank; None is no limit.
        sequence_parallel_size: Ranks that share the tokens of each row in updates.
        share_across_groups: Encode the common beginning of prompts once.
        min_saved_tokens: As in `packing.pack`; None if the attention backend runs prompts with rollouts alone.
        whole_episodes: Returns whether updates need all rows of an episode in one micro-batch.
        choose_max_tokens: Returns the limit where `max_tokens` sets none; called at the first pass of a run.

    Raises:
        ValueError: If a number is less than 1, options exclude each other, or padded rows would have to be divided.
    """

    def __init__(
        self,
        run: Run,
        sharing: Sharing = "shared",
        max_tokens: int | None = None,
        sequence_parallel_size: int = 1,
        *,
        share_across_groups: bool = False,
        min_saved_tokens: int | None = MIN_SAVED_TOKENS,
        whole_episodes: Callable[[], bool] = lambda: True,
        choose_max_tokens: Callable[[], int | None] = lambda: None,
    ) -> None:
        counts = {
            "sequence_parallel_size": sequence_parallel_size,
            "max_tokens_per_micro_batch": 1 if max_tokens is None else max_tokens,
        }
        check_options({name: (count, count >= 1, "at least 1") for name, count in counts.items()})
        self._run = run
        self.sharing: Sharing = sharing
        self.max_tokens = max_tokens
        self.sequence_parallel_size = sequence_parallel_size
        if share_across_groups and (sharing == "repeated" or min_saved_tokens is None):
            raise ValueError(
                "share_across_groups=True needs sharing='shared' and an attention backend that runs forests of any "
                "depth; use attention_backend='auto', 'cascade' or 'flex'."
            )
        self.share_across_groups = share_across_groups
        self._min_saved_tokens, self._whole_episodes = min_saved_tokens, whole_episodes
        self._choose_max_tokens = choose_max_tokens
        self._chosen: list[int | None] = []  # one entry once it was chosen
        self.cache = PackedRowCache()
        self._sequence_group: Any = None

    def check(self, world_size: int, prompts: Sequence[Prompt] | None, max_new_tokens: int) -> None:
        """Refuse options that cannot work, before anything is loaded.

        Args:
            world_size: Number of ranks.
            prompts: Prompts of the training data; None outside training.
            max_new_tokens: The longest completion, tool results included.

        Raises:
            ValueError: Names the options.
        """
        check_sequence_parallel_size(self.sequence_parallel_size, world_size)
        if self.sequence_parallel_size > 1 and self.sharing != "shared":
            raise ValueError(
                f"sequence_parallel_size is {self.sequence_parallel_size} with sharing={self.sharing!r}; padded rows "
                "are not divided among ranks. Use sharing='shared'."
            )
        has_media = any(isinstance(prompt, MediaPrompt) or prompt.media for prompt in prompts or ())
        if self.share_across_groups and has_media:
            raise ValueError(
                "share_across_groups is True, but prompts of the training data have images or videos, whose tokens do "
                "not tell them apart; set it to False."
            )
        if prompts is not None and self.max_tokens is not None:
            self._check_budget(self.max_tokens, prompts, max_new_tokens)

    def _check_budget(self, max_tokens: int, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
        limit = max_tokens * self.sequence_parallel_size
        longest = {
            "a prompt of the training data has": max((len(prompt.token_ids) for prompt in prompts), default=0),
            "a rollout may have (sampling.max_new_tokens)": max_new_tokens,
        }
        if self.sharing == "repeated":
            longest = {"a prompt with its rollout may have": sum(longest.values())}
        for what, tokens in longest.items():
            if tokens > limit:
                raise ValueError(
                    f"max_tokens_per_micro_batch is {max_tokens} with sequence_parallel_size="
                    f"{self.sequence_parallel_size}, {limit} tokens together, but {what} {tokens}; raise one of them, "
                    "or lower sampling.max_new_tokens or max_prompt_length of PromptDataModule."
                )
        if sum(longest.values()) > limit:
            rank_zero_warn(
                f"max_tokens_per_micro_batch is {max_tokens} tokens (not rollouts), and a prompt with one rollout may "
                f"have {sum(longest.values())}: rollouts are trained in slices, which is slow. Raise it as far as "
                "memory allows; the result is the same."
            )

    def form_sequence_groups(self, models: Iterable[Any]) -> None:
        """Form the groups of ranks that split rows; refuse models whose attention cannot be divided."""
        self._chosen.clear()
        if self.sequence_parallel_size > 1:
            for model in models:
                check_sequence_parallel(model, self.sequence_parallel_size)
            mesh = sequence_mesh(self.sequence_parallel_size, self._run.device.type)
            self._sequence_group = mesh.get_group("sequence")

    def for_update(self, buffer: RolloutBuffer, members: Sequence[int]) -> MicroBatchSchedule:
        """Micro-batches of some groups of a buffer.

        Args:
            buffer: The rollouts.
            members: Indices of the groups.
        """
        budget = self._budget(buffer)
        options = self._options(budget, self._sequence_group, self.sequence_parallel_size)
        options = replace(options, whole_episodes=self._whole_episodes())
        return MicroBatchSchedule(buffer, members, options, self.cache)

    def for_scoring(self, buffer: RolloutBuffer) -> MicroBatchSchedule:
        """Micro-batches of all groups of a buffer.

        Scoring keeps no activations, so each rank scores alone, with the token budget of its whole sequence group.
        """
        budget = self._budget(buffer)
        budget = None if budget is None else budget * self.sequence_parallel_size
        return MicroBatchSchedule(buffer, range(len(buffer.groups)), self._options(budget, None, 1), self.cache)

    def _budget(self, buffer: RolloutBuffer) -> int | None:
        """`max_tokens`, or the chosen limit, raised to a whole prompt with its longest rollout."""
        if self.max_tokens is not None:
            return self.max_tokens
        if not self._chosen:
            self._chosen.append(self._choose_max_tokens())
        if self._chosen[0] is None or any(rows > 1 for group in buffer.groups for rows in group.rows_per_episode):
            return None
        longest = (
            len(group.prompt_ids) + max((len(rollout.token_ids) for rollout in group.rollouts), default=0)
            for group in buffer.groups
        )
        return max(self._chosen[0], *longest)

    def _options(self, budget: int | None, sequence_group: Any, sequence_ranks: int) -> RowOptions:
        return RowOptions(
            self.sharing,
            budget,
            self._run.device,
            sequence_group,
            sequence_ranks,
            self.share_across_groups,
            self._min_saved_tokens,
        )

    def naming_memory(self, what: str = "") -> contextlib.AbstractContextManager[None]:
        """Make an out-of-memory error name the option that bounds a micro-batch.

        Args:
            what: Text before "a pass" in the error.
        """
        return naming_memory(
            f"{what}a pass of max_tokens_per_micro_batch={self.max_tokens} tokens (None: "
            f"{self._chosen[0] if any(self._chosen) else 'all groups of a mini-batch at once'})",
            "lower it, which changes no result, or raise sequence_parallel_size",
        )


# Yields the micro-batches of an update; the caller runs forward and backward before asking for the next.

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
