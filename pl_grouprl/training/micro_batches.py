"""Packs the rollouts of an update into micro-batches within a token budget.

Every rank runs the same kinds of micro-batches in the same order. One is a row of whole groups, or a slice of one large
group that continues its prompt or a branch. Sharded strategies gather weights and reduce gradients in each, so ranks
with fewer micro-batches run dummies.

Legend: B rollouts, E episodes, N response tokens of all rollouts, concatenated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, zip_longest
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from pl_grouprl.attention.backends.choice import get_backend
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
from pl_grouprl.types import Prompt, Rollout, RolloutGroup
from pl_grouprl.utilities.distributed import gather_plain, raise_on_all_ranks
from pl_grouprl.utilities.modes import naming_memory
from pl_grouprl.utilities.options import check_options
from pl_grouprl.utilities.progress import tick

Selection = tuple[list[RolloutGroup], dict[str, Tensor], Sequence[int]]
"""What `RolloutBuffer.select` returns: groups, per-token quantities, and the rollouts' indices in the buffer."""


@dataclass(frozen=True)
class SharingOptions:
    """How what rollouts have in common is encoded once, in training and scoring.

    Attributes:
        mode: `shared` encodes once what the rollouts of a group have in common: the prompt, and common beginnings of
            rollouts where that saves enough (see `pl_grouprl.packing.build_trie`). `repeated` encodes it once per
            rollout.
        across_groups: Also encode once what the prompts of a row have in common at their beginning, such as a system
            prompt. Only for text.
        backend: Attention over shared prefixes; see `pl_grouprl.attention.shared_prefix`.
        verify: Compare the shared with the repeated prefix once before the first step; a mismatch is an error.
        sequence_parallel_size: Ranks that share the tokens of each row in the updates (Ulysses, arXiv:2309.14509), so
            that a row may be that many times as long. It must divide the number of ranks.

    Raises:
        ValueError: If an option is out of range or unknown, or the others rule out `across_groups`.
    """

    mode: Sharing = "shared"
    across_groups: bool = False
    backend: str = "auto"
    verify: bool = True
    sequence_parallel_size: int = 1

    def __post_init__(self) -> None:
        mode, ranks, min_saved = self.mode, self.sequence_parallel_size, self.min_saved_tokens  # or an unknown backend
        check_options(
            {
                "sharing.mode": (mode, mode in ("shared", "repeated"), "'shared' (prompts encoded once) or 'repeated'"),
                "sharing.sequence_parallel_size": (ranks, ranks >= 1, "at least 1"),
            }
        )
        if self.across_groups and (mode == "repeated" or min_saved is None):
            raise ValueError(
                "sharing.across_groups=True needs mode 'shared' and an attention backend that runs forests of any "
                "depth; set sharing.backend to 'auto', 'cascade' or 'flex'."
            )

    @property
    def min_saved_tokens(self) -> int | None:
        """What rollouts must save to share a segment; None if the backend runs prompts with rollouts alone."""
        return get_backend(self.backend, "sharing.backend").min_saved_tokens


_SHARING = SharingOptions()


@dataclass(frozen=True)
class RowOptions:
    """How rollouts are laid out.

    Attributes:
        sharing: `shared` or `repeated`.
        max_tokens: Maximum tokens of a micro-batch on one rank; no limit if None.
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


class MicroBatcher:
    """Plans micro-batches, with the same number and kinds on every rank.

    Args:
        run: The run.
        sharing: What is encoded once, and by how many ranks together.
        max_tokens: Maximum tokens of a micro-batch on one rank; no limit if None.
        choose_max_tokens: Returns the limit where `max_tokens` sets none; called at the first pass of a run.

    Attributes:
        cache: The last packed row.

    Raises:
        ValueError: If `max_tokens` is less than 1.
    """

    def __init__(
        self,
        run: Run,
        sharing: SharingOptions = _SHARING,
        max_tokens: int | None = None,
        *,
        choose_max_tokens: Callable[[], int | None] = lambda: None,
    ) -> None:
        fits = max_tokens is None or max_tokens >= 1
        check_options({"max_tokens_per_micro_batch": (max_tokens, fits, "at least 1, or None")})
        self.sharing, self.max_tokens = sharing, max_tokens
        self.cache = PackedRowCache()
        self._run = run
        self._choose_max_tokens = choose_max_tokens
        self._chosen: list[int | None] = []  # one entry once it was chosen
        self._sequence_group: Any = None

    def check(self, world_size: int, prompts: Sequence[Prompt] | None, max_new_tokens: int) -> None:
        """Check options against ranks and prompts, before anything is loaded.

        Args:
            world_size: Number of ranks.
            prompts: Prompts of the training data; None outside training.
            max_new_tokens: The longest completion, tool results included.

        Raises:
            ValueError: Names the options.
        """
        sharing, ranks = self.sharing, self.sharing.sequence_parallel_size
        check_sequence_parallel_size(ranks, world_size)
        if ranks > 1 and sharing.mode != "shared":
            raise ValueError(
                f"sharing.sequence_parallel_size is {ranks} with sharing.mode={sharing.mode!r}; padded rows are not "
                "divided among ranks. Use 'shared'."
            )
        if prompts is None:
            return
        if sharing.across_groups and any(isinstance(prompt, MediaPrompt) or prompt.media for prompt in prompts):
            raise ValueError(
                "sharing.across_groups is True, but prompts of the training data have images or videos, whose tokens "
                "do not tell them apart; set it to False."
            )
        if self.max_tokens is None:
            return
        limit = self.max_tokens * ranks
        longest = {
            "a prompt of the training data has": max((len(prompt.token_ids) for prompt in prompts), default=0),
            "a rollout may have (sampling.max_new_tokens)": max_new_tokens,
        }
        together = sum(longest.values())
        if sharing.mode == "repeated":
            longest = {"a prompt with its rollout may have": together}
        for what, tokens in longest.items():
            if tokens > limit:
                raise ValueError(
                    f"max_tokens_per_micro_batch is {self.max_tokens} with sharing.sequence_parallel_size="
                    f"{ranks}, {limit} tokens together, but {what} {tokens}; raise one of them, "
                    "or lower sampling.max_new_tokens or max_prompt_length of PromptDataModule."
                )
        if together > limit:
            rank_zero_warn(
                f"max_tokens_per_micro_batch is {self.max_tokens} tokens (not rollouts), and a prompt with one rollout "
                f"may have {together}: rollouts are trained in slices, which is slow. Raise it as far as memory "
                "allows; the result is the same."
            )

    def form_sequence_groups(self, models: Iterable[Any]) -> None:
        """Form the groups of ranks that split rows; raises for models whose attention cannot be divided."""
        self._chosen.clear()
        if (ranks := self.sharing.sequence_parallel_size) > 1:
            for model in models:
                check_sequence_parallel(model, ranks)
            mesh = sequence_mesh(ranks, self._run.device.type)
            self._sequence_group = mesh.get_group("sequence")

    def for_update(
        self, buffer: RolloutBuffer, members: Sequence[int], *, whole_episodes: bool = True
    ) -> MicroBatchSchedule:
        """Micro-batches of some groups of a buffer.

        Args:
            buffer: The rollouts.
            members: Indices of the groups.
            whole_episodes: Whether the loss needs all rows of an episode in one micro-batch.
        """
        sharing = self.sharing
        options = RowOptions(
            sharing.mode,
            self._budget(buffer),
            self._run.device,
            self._sequence_group,
            sharing.sequence_parallel_size,
            sharing.across_groups,
            sharing.min_saved_tokens,
            whole_episodes,
        )
        return MicroBatchSchedule(buffer, members, options, self.cache)

    def for_scoring(self, buffer: RolloutBuffer) -> MicroBatchSchedule:
        """Micro-batches of all groups of a buffer.

        Scoring keeps no activations, so each rank scores alone, with the token budget of its whole sequence group.
        """
        budget, sharing = self._budget(buffer), self.sharing
        options = RowOptions(
            sharing.mode,
            None if budget is None else budget * sharing.sequence_parallel_size,
            self._run.device,
            share_across_groups=sharing.across_groups,
            min_saved_tokens=sharing.min_saved_tokens,
        )
        return MicroBatchSchedule(buffer, range(len(buffer.groups)), options, self.cache)

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

    def naming_memory(self, what: str = "") -> contextlib.AbstractContextManager[None]:
        """Make an out-of-memory error name the option that bounds a micro-batch.

        Args:
            what: Text before "a pass" in the error.
        """
        return naming_memory(
            f"{what}a pass of max_tokens_per_micro_batch={self.max_tokens} tokens (None: "
            f"{self._chosen[0] if any(self._chosen) else 'all groups of a mini-batch at once'})",
            "lower it, which changes no result, or raise sharing.sequence_parallel_size",
        )


class PackedRowCache:
    """Caches the last packed row, so scoring and updating the same rollouts share it and its attention plan."""

    def __init__(self) -> None:
        self._key: Any = None
        self._records: list[Any] = []
        self._scoring: ScoringBatch | None = None

    def get(self, groups: list[RolloutGroup], options: RowOptions, lay_out: Callable[[], ScoringBatch]) -> ScoringBatch:
        """Return the cached row if it has the same tokens and options; otherwise pack and cache a new one."""
        contents = [  # what a row of text depends on; copied, because the lists may be changed in place later
            (
                tuple(group.prompt_ids),
                group.group_id,
                [(tuple(r.token_ids), r.loss_mask and tuple(r.loss_mask)) for r in group.rollouts],
            )
            for group in groups
        ]
        # Compared by identity, and held so that no other takes the place of one in memory.
        parts: list[Any] = [part for group in groups for part in (group, *group.rollouts)]
        records = [part.routed_experts for part in parts]
        key = options, contents, [*map(id, records)]
        if self._scoring is None or self._key != key:
            self.clear()  # free the old row first
            self._key, self._records, self._scoring = key, records, lay_out()
        return self._scoring

    def clear(self) -> None:
        """Drop the cached row."""
        self._key, self._records, self._scoring = None, [], None


class MicroBatchSchedule:
    """The micro-batches of some groups of a buffer, with the same number and kinds on every rank.

    Args:
        buffer: This rank's rollouts.
        indices: Which of its groups to use.
        options: How they are laid out.
        cache: Keeps the last packed row.

    Attributes:
        number: Number of micro-batches, including the prompts and branches of split groups.

    Raises:
        ValueError: If a single rollout or prompt, or an episode that must stay whole, exceeds the token budget. Other
            ranks then raise a RuntimeError.
    """

    def __init__(
        self, buffer: RolloutBuffer, indices: Sequence[int], options: RowOptions, cache: PackedRowCache | None = None
    ) -> None:
        self._buffer, self._options = buffer, options
        self._cache = PackedRowCache() if cache is None else cache
        self._plan = raise_on_all_ranks(partial(plan_micro_batches, buffer.groups, indices, options), options.device)
        own = len(self._plan.rows), tuple(split.shape for split in self._plan.splits)
        # Always run at least one row: it reaches every parameter.
        self._shape = largest([Shape(1), *(Shape(*shape) for shape in gather_plain(own, options.device))])
        self.number = options.sequence_ranks * self._shape.number

    def __iter__(self) -> Iterator[MicroBatch | PrefixPass]:
        """Yield the passes of split groups, then the rows.

        A prompt or branch comes after the branches and slices that continue it, since its backward needs their
        gradients. Its forward runs with the first of those slices.
        """
        groups, dummy = self._buffer.groups, _dummy(self._buffer)
        for split, shape in zip_longest(self._plan.splits, self._shape.splits):  # dummies are last
            number = 0 if split is None else split.group

            def select(rollouts: Sequence[int], number: int = number) -> Selection:
                return self._buffer.select([(number, rollouts)])

            for passes in self._of_sequence_group(passes_of(groups[number], split, shape, select, dummy)):
                yield from self._bottom_up([Pass(*one) for one in passes])
        for parts in [()] * (self._shape.rows - len(self._plan.rows)) + [*self._plan.rows]:  # real rows are last
            for selection in self._of_sequence_group(self._buffer.select(parts) if parts else dummy):
                yield self._micro_batch(selection)

    def _bottom_up(self, passes: Sequence[Pass]) -> Iterator[MicroBatch | PrefixPass]:
        """Yield the slices that continue a prompt or branch, then its own pass, once all branches below it are done."""
        path: list[tuple[PrefixPass, list[Selection]]] = []
        for one in (*passes, None):
            while len(path) > (0 if one is None else one.depth):
                prefix, slices = path.pop()
                for selection in slices:
                    yield self._micro_batch(selection, prefix)
                yield prefix
            if one is not None:
                if one.prompt is None:
                    prefix = path[-1][0].branch(one.token_ids, one.routed_experts)
                else:
                    prefix = PrefixPass(one.prompt, self._options.device, self._options.sequence_group)
                path.append((prefix, one.slices))

    def _of_sequence_group(self, own: Any) -> list[Any]:
        """What this rank helps to run: that of each rank of its sequence group in turn, or only its own without one."""
        group = self._options.sequence_group
        if group is None:
            return [own]
        return [_from_plain(state) for state in gather_plain(_to_plain(own), self._options.device, group)]

    def _micro_batch(self, selection: Selection, prefix: PrefixPass | None = None) -> MicroBatch:
        """Lay out a micro-batch. Rows of text are cached, unless a sequence group runs them together."""
        tick()
        groups, tokens, numbers = selection
        options = self._options
        pack_row = partial(lay_out, groups, options, prefix)
        is_cached = prefix is None and options.sequence_group is None and not any(group.has_media for group in groups)
        is_cached = is_cached and not torch.is_inference_mode_enabled()  # inference tensors cannot be trained on
        scoring = self._cache.get(groups, options, pack_row) if is_cached else pack_row()
        return MicroBatch(scoring, move_together(tokens, options.device), groups, tuple(numbers), options)


def _to_plain(value: Any) -> Any:
    """Lists with groups as dictionaries, to be sent to another rank."""
    if isinstance(value, RolloutGroup):
        return {"group": to_state(value)}
    return [*map(_to_plain, value)] if isinstance(value, list | tuple) else value


def _from_plain(value: Any) -> Any:
    if isinstance(value, dict) and isinstance(value.get("group"), dict):
        return from_state(value["group"])
    return [*map(_from_plain, value)] if isinstance(value, list) else value


def _dummy(buffer: RolloutBuffer) -> Selection:
    """A group of a token or two that trains nothing, for ranks with no work left; keeps the prompt's images, if any."""
    like = buffer.groups[0]
    prompt = like.prompt_ids if like.media else like.prompt_ids[:1]
    rollouts = [Rollout(like.prompt_ids[-1:], logprobs=[0.0])]
    group = replace(like, prompt_ids=prompt, rollouts=rollouts, routed_experts=None)
    return [group], dummy_tokens(buffer.values), ()


def dummy_tokens(like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Per-token quantities of the dummy group: nothing is trained or rewarded.

    Args:
        like: Quantities whose names and dtypes are copied.
    """
    return {name: torch.zeros(1, *values.shape[1:], dtype=values.dtype) for name, values in like.items()}


# The plan of a step: which rollouts each micro-batch holds, and what kinds of micro-batches all ranks run.


class MicroBatchPlan(NamedTuple):
    """The micro-batches of one step on this rank.

    Attributes:
        rows: The contents of each row: indices of groups, each with the indices of its selected rollouts.
        splits: Groups larger than the budget.
    """

    rows: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]
    splits: tuple[SplitGroup, ...] = ()


class Shape(NamedTuple):
    """Number of passes of each kind in a plan, which all ranks must agree on.

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


def _num_passes(split: SplitShape) -> int:
    return sum(1 + count for _, count in split)


def largest(shapes: Sequence[Shape]) -> Shape:
    """The smallest shape that has room for each of the shapes."""

    def merge(splits: Sequence[SplitShape]) -> SplitShape:
        # Walks all trees at once: one whose next pass is less deep than another's has no such pass here.
        merged: list[tuple[int, int]] = []
        places = [0] * len(splits)
        while True:
            heads = [split[at] if at < len(split) else (-1, 0) for split, at in zip(splits, places, strict=True)]
            depth, count = max(heads)
            if depth < 0:
                return tuple(merged)
            merged.append((depth, count))
            places = [place + (head[0] == depth) for place, head in zip(places, heads, strict=True)]

    columns = zip_longest(*(shape.splits for shape in shapes), fillvalue=())
    return Shape(max(shape.rows for shape in shapes), tuple(map(merge, columns)))


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
    if not indices:
        return MicroBatchPlan(())
    everything = tuple((i, tuple(range(len(groups[i].rollouts)))) for i in indices)
    if options.max_tokens is None:
        return MicroBatchPlan((everything,))
    max_tokens = options.max_tokens * options.sequence_ranks  # of a row, on all ranks that split it
    planned = [groups[i] for i in indices]
    if options.sharing == "repeated":
        sizes = [(len(group.prompt_ids), [len(r.token_ids) for r in group.rollouts]) for group in planned]
        together = [group.rows_per_episode for group in planned] if options.whole_episodes else None
        for group in planned if options.whole_episodes else ():
            padded = [
                len(episode.rows) * (len(group.prompt_ids) + max(len(row.token_ids) for row in episode.rows))
                for episode in group.episodes
            ]
            _check_episodes(group, padded, max_tokens)
        rows = plan_repeated_rows(sizes, max_tokens, together)
        return MicroBatchPlan(tuple(tuple((indices[group], rollouts) for group, rollouts in row) for row in rows))

    def trie(group: RolloutGroup, rollouts: Sequence[Rollout]) -> Trie:
        # After images or videos a branch cannot run by itself, so only the prompt is shared.
        least = None if group.has_media else options.min_saved_tokens
        return build_trie([rollout.token_ids for rollout in rollouts], least)

    plan = plan_rows([(len(group.prompt_ids), trie(group, group.rollouts)) for group in planned], max_tokens)
    splits = []
    for split in plan.splits:
        split = replace(split, group=indices[split.group])
        group = groups[split.group]
        if options.whole_episodes and len(group.episodes) < len(group.rollouts):
            sizes_E = [trie(group, episode.rows).num_tokens for episode in group.episodes]
            _check_episodes(group, sizes_E, max_tokens)
            ends = list(accumulate((len(episode.rows) for episode in group.episodes), initial=0))
            slices = [
                tuple(row for i in found for row in range(ends[i], ends[i + 1]))
                for found in pack_sizes(sizes_E, max_tokens)
            ]
            split = SplitGroup(split.group, tuple(slices))
        splits.append(split)
    # Largest first on every rank, so that few dummies fill the differences.
    return MicroBatchPlan(
        tuple(tuple(everything[group] for group in row) for row in plan.rows),
        tuple(sorted(splits, key=lambda split: -_num_passes(split.shape))),
    )


def _check_episodes(group: RolloutGroup, sizes: Sequence[int], max_tokens: int) -> None:
    for episode, size in zip(group.episodes, sizes, strict=True):
        if size > max_tokens and len(episode.rows) > 1:
            raise ValueError(
                f"max_tokens_per_micro_batch allows {max_tokens} tokens, but the {len(episode.rows)} rows of episode "
                f"{episode.last.episode!r} of group {group.group_id} have {size}, and the loss needs them in one "
                "micro-batch; raise it, or use loss_agg_mode='token-mean' with a per-token policy_loss and "
                "importance_sampling.mode."
            )


class Pass(NamedTuple):
    """A prompt or branch to run, with the slices that continue it.

    Attributes:
        depth: 0 for a prompt, otherwise as in `packing.Branch`.
        prompt: A group with the prompt, without rollouts; None for a branch.
        token_ids: Tokens of the branch; one token for a dummy. Not used for a prompt.
        slices: Rollouts that continue it, slice by slice.
        routed_experts: The experts of the branch's tokens; None without a record.
    """

    depth: int
    prompt: RolloutGroup | None
    token_ids: list[int]
    slices: list[Selection]
    routed_experts: Tensor | None = None


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
        split: How it is split; if None, all passes are dummies.
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
        tokens, record = group.prompt_ids[-1:], None
        if isinstance(part, Branch):
            path = group.rollouts[part.rollout].token_ids[: part.stop]
            tokens = path[part.start :]
            for rollout in group.rollouts:  # the first may end there, and so have no record of its last token
                if rollout.routed_experts is not None and rollout.token_ids[: part.stop] == path:
                    other = rollout.routed_experts[part.start : part.stop]
                    record = other if record is None else torch.where(record < 0, other, record)
        selected = [dummy] * (count - len(slices)) + [select(indices) for indices in slices]
        passes.append(Pass(depth, None if depth else prompt, tokens, selected, record))
    return passes
