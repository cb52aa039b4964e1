"""Turns rollout groups into decoder inputs and scoring indices, with prompts shared or repeated per rollout.

Legend: B rollouts, T packed tokens, L longest sequence, N response tokens of all rollouts, concatenated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from pl_grouprl.packing.layout import SharedPrefixLayout, repeat_rows, repeat_values
from pl_grouprl.packing.trie import MIN_SAVED_TOKENS, Forest, SharedTokens, lay_out_forest
from pl_grouprl.types import Media, Rollout, RolloutGroup, is_per_token

Sharing = Literal["shared", "repeated"]
"""`shared` encodes each prompt once; `repeated` is the usual padded batch with the prompt in every row."""

_TEXT_INPUTS = ("input_ids", "position_ids", "attention_mask", "prefix_layout")


@dataclass(frozen=True)
class ScoringBatch:
    """Groups of rollouts as one decoder call, with the N response tokens to score.

    Attributes:
        model_inputs: Keyword arguments of the decoder: `input_ids` and `position_ids` of shape [1, T] and the
            `prefix_layout`, or `input_ids` and `attention_mask` of shape [B, L]. With images or videos also the media
            of all prompts (once per group, or once per rollout if prompts are repeated) and rollouts, in the order of
            their tokens; per-token media tensors have the shape of `input_ids`.
        predict_index_N: Index in the flattened hidden states that predicts each response token, int64.
        targets_N: The response tokens, int64.
        rollout_index_N: The rollout of each response token, counted over all groups in order, int64.
        loss_mask_N: Which response tokens are trained, bool.
        final_index_B: Index in the flattened hidden states of each rollout's last token, int64; for an empty rollout,
            of its prompt's last token.
        rollout_lengths: Response tokens of each of the B rollouts.
        layout: The forest of the groups, whichever way they are encoded.
        sharing: The encoding.
        shared_tokens: Which response tokens share a token of the row; None if no two do.
        sequence_group: Process group whose ranks run this row together, each with the same batch; None if this rank
            runs it alone. See `attention.sequence_parallel`.
        prefix: For a slice of a group, the pass over the prompt or branch that it continues (`models.PrefixPass`); None
            if the batch includes its prompts.
        routed_experts: For router replay, the experts of each token that runs, int16, shape [T, mixtures, experts per
            token] (or [B * L, ...]); -1 where there is no record, and None if there is none at all.
    """

    model_inputs: dict[str, Any]
    predict_index_N: Tensor
    targets_N: Tensor
    rollout_index_N: Tensor
    loss_mask_N: Tensor
    final_index_B: Tensor
    rollout_lengths: tuple[int, ...]
    layout: SharedPrefixLayout
    sharing: Sharing
    shared_tokens: SharedTokens | None = None
    sequence_group: Any = None
    prefix: Any = None
    routed_experts: Tensor | None = None

    @property
    def media(self) -> dict[str, Tensor]:
        """The images and videos in `model_inputs`; empty for text."""
        return {name: value for name, value in self.model_inputs.items() if name not in _TEXT_INPUTS}

    @property
    def num_rollouts(self) -> int:
        """B."""
        return len(self.rollout_lengths)

    @property
    def num_tokens_run(self) -> int:
        """Tokens that the decoder runs on, including padding."""
        return self.model_inputs["input_ids"].numel()

    @property
    def num_prefix_tokens_run(self) -> int:
        """Prompt and branch tokens that the first slice of a split group runs; 0 later, and for other batches.

        Reading it marks them as counted, so read it once per batch.
        """
        return 0 if self.prefix is None else self.prefix.count_once()

    @property
    def num_tokens_repeated(self) -> int:
        """Tokens of the same rollouts if each repeats its whole prompt, without padding."""
        return sum(self.layout.repeated_lengths)

    @property
    def padding_fraction(self) -> float:
        """Fraction of the encoded tokens that is padding; 0 if prefixes are shared."""
        kept = self.layout.num_queries if self.sharing == "shared" else self.num_tokens_repeated
        return 1 - kept / max(self.num_tokens_run, 1)


def pack(
    groups: Sequence[RolloutGroup],
    sharing: Sharing = "shared",
    *,
    share_across_groups: bool = False,
    min_saved_tokens: int | None = MIN_SAVED_TOKENS,
    path: Sequence[int] = (),
    device: torch.device | str = "cpu",
) -> ScoringBatch:
    """Lay groups out for one decoder call, in the caller's order; on CUDA all prompts of text come before all rollouts.

    With `shared`, each prompt is encoded once, and so are tokens that rollouts of a group share after it, such as
    earlier turns of branched episodes, or equal rollouts.

    Args:
        groups: Prompts with their rollouts, of any number and length. Groups without rollouts are skipped.
        sharing: One packed row with shared tokens once, or a right-padded row per rollout.
        share_across_groups: Also share common prefixes of the prompts of different groups, such as a system prompt.
            Only for text.
        min_saved_tokens: Minimum number of tokens that a shared segment after the prompt must save, see `build_trie`;
            None shares only prompts.
        path: Response tokens to lay out as one segment after the prompt. Every rollout begins with them, or is a prefix
            of them.
        device: Device of the tensors.

    Raises:
        ValueError: If there are no rollouts, `sharing` is unknown, or media cannot be shared or do not match their
            prompt.
    """
    groups = [group for group in groups if group.rollouts]
    if not groups:
        raise ValueError("groups has no rollouts; pass at least one RolloutGroup with a rollout.")
    if sharing not in ("shared", "repeated"):
        raise ValueError(f"sharing is {sharing!r}; pass 'shared' (each prompt encoded once) or 'repeated'.")
    if sharing == "repeated":
        share_across_groups, min_saved_tokens = False, None
    forest = lay_out_forest(
        groups,
        share_across_groups=share_across_groups,
        min_saved_tokens=min_saved_tokens,
        path=path,
        prompts_first=torch.device(device).type == "cuda" and not any(group.has_media for group in groups),
    )
    layout = forest.layout
    tokens = _int64(forest.token_ids)[None]
    if sharing == "shared":
        row = {"input_ids": tokens, "position_ids": layout.position_ids[None]}
        predict_index_N, final_index_B = forest.predict_index_N, forest.final_index_B
    else:
        row = repeat_rows(layout, tokens)
        width = row["input_ids"].shape[1]
        last = [number * width + length - 1 for number, length in enumerate(layout.repeated_lengths)]
        sizes = [layout.segments[leaf].length for leaf in layout.leaves]
        predict_index_N = _int64([range(end - size, end) for end, size in zip(last, sizes, strict=True)])
        final_index_B = torch.tensor(last)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    indices = {
        "predict_index_N": predict_index_N,
        "targets_N": _int64([rollout.token_ids for rollout in rollouts]),
        "rollout_index_N": torch.arange(len(rollouts)).repeat_interleave(torch.tensor(lengths, dtype=torch.long)),
        "loss_mask_N": loss_mask(rollouts),
        "final_index_B": final_index_B,
    }
    if (routed_experts := _routed_experts(groups, forest, sharing)) is not None:
        indices["routed_experts"] = routed_experts
    shared_tokens = forest.shared_tokens
    shared_indices = {} if shared_tokens is None else shared_tokens._asdict()
    moved = move_together(indices | row | shared_indices, device)
    model_inputs: dict[str, Any] = {name: moved[name] for name in row}
    model_inputs |= {name: value.to(device) for name, value in join_media(groups, forest, sharing).items()}
    if sharing == "shared":
        positions_T = model_inputs["position_ids"][0]  # also for `positions_on`
        layout.memo(("position_ids", positions_T.device), lambda: positions_T)
        model_inputs["prefix_layout"] = layout
    return ScoringBatch(
        model_inputs,
        **{name: moved[name] for name in indices},
        rollout_lengths=tuple(lengths),
        layout=layout,
        sharing=sharing,
        shared_tokens=SharedTokens(**{name: moved[name] for name in shared_indices}) if shared_indices else None,
    )


def concat_media(parts: Sequence[tuple[Media, int]]) -> Media:
    """Join the media of runs of tokens that follow each other.

    Args:
        parts: Media and number of tokens of each run.

    Returns:
        A tensor per name: images, videos or patches, concatenated; or, for per-token tensors, the runs along the last
        axis, 0 in runs without.
    """
    joined: Media = {}
    for name in dict.fromkeys(name for media, _ in parts for name in media):
        values = [media[name] for media, _ in parts if name in media]
        if is_per_token(name):
            *rows, _ = values[0].shape
            values = [media[name] if name in media else values[0].new_zeros(*rows, count) for media, count in parts]
        joined[name] = torch.cat(values, dim=-1 if is_per_token(name) else 0)
    return joined


def join_media(groups: Sequence[RolloutGroup], forest: Forest, sharing: Sharing) -> dict[str, Tensor]:
    """Join the images and videos of all groups, in the order of their tokens in the batch.

    Args:
        groups: Prompts with at least one rollout each, with or without media.
        forest: These groups, laid out.
        sharing: `shared` takes each prompt's media once, `repeated` once per rollout.

    Returns:
        As `concat_media`, but per-token tensors are the packed row [1, T] or padded rows [B, L]. Empty without media.

    Raises:
        ValueError: If a per-token tensor has the wrong length.
    """
    segments = forest.layout.segments
    parts: list[tuple[Media, int]] = [({}, segment.length) for segment in segments]
    for number, (prompt, ends) in forest.ends.items():
        media = [groups[number].media, *(rollout.media for rollout in groups[number].rollouts)]
        for place, own in zip((prompt, *ends), media, strict=True):
            parts[place] = own, (length := segments[place].length)
            for name, value in own.items():
                if is_per_token(name) and value.shape != (length,):
                    what = f"media[{name!r}] of group {groups[number].group_id!r} has shape {list(value.shape)}"
                    kind = "prompt" if place == prompt else "rollout"
                    raise ValueError(f"{what} for a {kind} of {length} tokens; pass one entry per token.")
    packed = concat_media(parts)
    if sharing == "shared":
        return {name: value[None] if is_per_token(name) else value for name, value in packed.items()}
    pairs = ((segments[leaf].parent, leaf) for leaf in forest.layout.leaves)
    rows = concat_media([parts[place] for pair in pairs for place in pair if place is not None])
    return {n: repeat_values(forest.layout, packed[n]) if is_per_token(n) else value for n, value in rows.items()}


def _routed_experts(groups: Sequence[RolloutGroup], forest: Forest, sharing: Sharing) -> Tensor | None:
    """The experts of each token of a row, or of padded rows; a token that rollouts share has the first one's."""
    layout, rollouts = forest.layout, [rollout for group in groups for rollout in group.rollouts]
    parts: list[Any] = [*rollouts, *groups]
    known = next((part.routed_experts for part in parts if part.routed_experts is not None), None)
    if known is None:
        return None
    row = known.new_full((layout.num_tokens, *known.shape[1:]), -1)
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    # Each response token is where the next one is predicted.
    places = [
        torch.cat([predict[1:], final[None]]) if len(predict) else predict
        for predict, final in zip(forest.predict_index_N.split(lengths), forest.final_index_B, strict=True)
    ]
    places += [layout.path(index) for index in (forest.ends[number][0] for number in range(len(groups)))]
    for part, index_T in reversed(list(zip(parts, places, strict=True))):
        if (record := part.routed_experts) is not None:
            row[index_T] = torch.where(record < 0, row[index_T], record)
    if sharing == "shared":
        return row
    padded = repeat_values(layout, torch.arange(1, len(row) + 1)).flatten()  # 0 at padding
    return torch.cat([row.new_full((1, *row.shape[1:]), -1), row])[padded]


def loss_mask(rollouts: Sequence[Rollout]) -> Tensor:
    """Which response tokens the model wrote, and a loss may train, bool, shape [N]."""
    if all(rollout.loss_mask is None for rollout in rollouts):
        return torch.ones(sum(len(rollout.token_ids) for rollout in rollouts), dtype=torch.bool)
    masks = [[True] * len(r.token_ids) if r.loss_mask is None else r.loss_mask for r in rollouts]
    return _int64(masks).bool()


def _int64(parts: Sequence[Sequence[int]]) -> Tensor:
    """Concatenate lists of integers, using NumPy, which reads lists three times as fast as `torch.tensor`."""
    return torch.from_numpy(np.fromiter(chain.from_iterable(parts), np.int64, sum(map(len, parts))))


# Slices of a group, which continue a prompt or branch that ran in an earlier call. Legend: P tokens of the path (the
# prompt and the branches above the slice), K response tokens of it, S tokens of the slice after it, D hidden size.


def pack_slice(
    group: RolloutGroup,
    rollout_indices: Sequence[int],
    prefix: Any,
    device: torch.device | str = "cpu",
    *,
    min_saved_tokens: int | None = MIN_SAVED_TOKENS,
) -> ScoringBatch:
    """Lay out some rollouts of a group for a decoder call that continues `prefix`.

    Args:
        group: The group; its prompt is not read.
        rollout_indices: The rollouts to lay out, in this order. Each begins with `prefix.path_ids`, or is a prefix of
            them.
        prefix: The `models.PrefixPass` over the prompt or branch that they continue: its `num_tokens` (P), its
            `path_ids` (the K response tokens), and its own `batch`.
        device: Device of the batch's tensors.
        min_saved_tokens: As in `pack`.

    Returns:
        A batch whose indices refer to hidden states [1 + K + S, D]: of the prompt's last token, of the K tokens, and of
        the slice's S tokens. If no token is left to run, one unused token runs, so every slice calls the decoder.
    """
    # Packing after a one-token stand-in for the prompt gives exactly these indices.
    path, num_prefilled = prefix.path_ids, prefix.num_tokens
    rollouts = [group.rollouts[index] for index in rollout_indices]
    stand_in = RolloutGroup([0], rollouts, 0 if group.group_id is None else group.group_id)
    batch = pack([stand_in], path=path, min_saved_tokens=min_saved_tokens, device=device)
    num_merged = 2 if path else 1  # the stand-in and the path become one prefilled segment
    segments = batch.layout.segments[num_merged:]
    lengths = [num_prefilled, *(segment.length for segment in segments)]
    parents = [None, *(segment.parent - num_merged + 1 for segment in segments if segment.parent is not None)]
    tokens, record = batch.model_inputs["input_ids"][:, 1 + len(path) :], batch.routed_experts
    record = None if record is None else record[1 + len(path) :]
    if not tokens.numel():
        tokens, lengths, record = tokens.new_zeros(1, 1), [*lengths[:-1], 1], None
    layout = SharedPrefixLayout(lengths, parents, [stand_in.group_id] * len(lengths), num_prefilled=num_prefilled)
    return _continuing(prefix, replace(batch, routed_experts=record), tokens, layout)


def pack_branch(
    token_ids: Sequence[int], prefix: Any, device: torch.device | str = "cpu", routed_experts: Tensor | None = None
) -> ScoringBatch:
    """Lay out a run of shared tokens for a decoder call that continues `prefix`, as a prompt that has no rollouts.

    Args:
        token_ids: Its tokens.
        prefix: The `models.PrefixPass` over the prompt or branch that it continues.
        device: Device of the batch's tensors.
        routed_experts: Their experts; see `Rollout.routed_experts`.
    """
    batch = pack([RolloutGroup(list(token_ids), [Rollout([])], routed_experts=routed_experts)], device=device)
    layout = SharedPrefixLayout([prefix.num_tokens, len(token_ids), 0], [None, 0, 1], num_prefilled=prefix.num_tokens)
    return _continuing(prefix, batch, batch.model_inputs["input_ids"], layout)


def _continuing(prefix: Any, batch: ScoringBatch, tokens: Tensor, layout: SharedPrefixLayout) -> ScoringBatch:
    inputs = {
        "input_ids": tokens,
        "position_ids": layout.position_ids[None, layout.num_prefilled :].to(tokens.device),
        "prefix_layout": layout,
    }
    inputs |= {name: torch.zeros_like(tokens) for name in prefix.batch.media if is_per_token(name)}
    count = tokens.shape[1]
    inputs |= {name: value[:, -count:] if is_per_token(name) else value for name, value in batch.media.items()}
    return replace(batch, model_inputs=inputs, layout=layout, prefix=prefix, sequence_group=prefix.batch.sequence_group)


class TruncatedGroups(NamedTuple):
    """Groups with truncated rollouts, and the original indices of their M tokens.

    Attributes:
        groups: The same prompts with the first tokens of each rollout.
        kept_index_M: Index of each kept token among the original N, int64, ascending: `tensor_N[kept_index_M]` selects
            the truncated groups' part of any tensor of shape [N].
    """

    groups: list[RolloutGroup]
    kept_index_M: Tensor


def truncate_rollouts(groups: Sequence[RolloutGroup], lengths_B: Sequence[int] | Tensor) -> TruncatedGroups:
    """Keep the first tokens of each rollout, for a decoder call that only needs results up to there.

    A causal decoder's result does not depend on later tokens, so those do not have to run: GROUP PPO trains its critic
    at the starts of token groups only. The value V[t] is read where token t is predicted, so for values up to token s
    of a rollout keep s + 1 tokens (one more than strictly needed, to keep the packed indices of `pack`). A rollout with
    images stays whole.

    Args:
        groups: Prompts with their rollouts; unchanged. Only tokens, loss masks, experts and media are copied.
        lengths_B: Number of tokens to keep of each rollout, over all groups in order.

    Raises:
        ValueError: If there is not one length per rollout, or one is negative or longer than its rollout.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    short: list[Rollout] = []
    kept: list[int] = []
    start = 0
    for number, (rollout, given) in enumerate(zip(rollouts, lengths_B, strict=True)):
        length, tokens, mask, record = int(given), rollout.token_ids, rollout.loss_mask, rollout.routed_experts
        if not 0 <= length <= len(tokens):
            raise ValueError(f"lengths_B[{number}] is {length}; pass 0 to the rollout's {len(tokens)} tokens.")
        length = len(tokens) if rollout.media else length
        short.append(
            Rollout(
                tokens[:length],
                loss_mask=None if mask is None else mask[:length],
                routed_experts=None if record is None else record[:length],
                media=rollout.media,
            )
        )
        kept += range(start, start + length)
        start += len(tokens)
    remaining = iter(short)
    truncated = [
        RolloutGroup(
            group.prompt_ids,
            [next(remaining) for _ in group.rollouts],
            group.group_id,
            media=group.media,
            routed_experts=group.routed_experts,
        )
        for group in groups
    ]
    return TruncatedGroups(truncated, torch.tensor(kept, dtype=torch.long))


_Name = TypeVar("_Name")


def move_together(tensors: Mapping[_Name, Tensor], device: torch.device | str) -> dict[_Name, Tensor]:
    """Move CPU tensors to a device as one block of bytes.

    For CUDA the block is in pinned memory, so the copy is asynchronous; copies from pageable memory would synchronize
    for each tensor.

    Args:
        tensors: Tensors by name, of any dtypes and shapes.
        device: Target device; for the CPU the tensors are returned unchanged.

    Returns:
        The tensors by name, in the same order. Those moved together share a storage.
    """
    device = torch.device(device)
    return dict(tensors) if device.type == "cpu" or not tensors else _move_as_block(tensors, device)


def _move_as_block(tensors: Mapping[_Name, Tensor], device: torch.device) -> dict[_Name, Tensor]:
    # Widest dtypes first, so each tensor stays aligned.
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    # An expanded tensor of one element is contiguous, but its stride may be 0, which `view` does not take.
    flat = [tensors[name].contiguous().as_strided((tensors[name].numel(),), (1,)) for name in order]
    block = torch.cat([tensor.view(torch.uint8) for tensor in flat])
    if device.type == "cuda":
        block = block.pin_memory()
    pieces = block.to(device, non_blocking=True).split([tensor.nbytes for tensor in flat])
    moved = {
        name: piece.view(tensors[name].dtype).view(tensors[name].shape)
        for name, piece in zip(order, pieces, strict=True)
    }
    return {name: moved[name] for name in tensors}
