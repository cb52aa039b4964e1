"""Turns rollout groups into decoder inputs and scoring indices, with prompts shared or repeated per rollout.

Legend: B rollouts, T packed tokens, L longest sequence, N response tokens of all rollouts, concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pl_grouprl.packing.forest import Forest, SharedTokens, lay_out_forest
from pl_grouprl.packing.layout import SharedPrefixLayout
from pl_grouprl.packing.media import join_media
from pl_grouprl.packing.repeat import repeat_rows
from pl_grouprl.packing.transfer import move_together
from pl_grouprl.packing.trie import MIN_SAVED_TOKENS
from pl_grouprl.types import Rollout, RolloutGroup

Sharing = Literal["shared", "repeated"]
"""`shared` encodes each prompt once; `repeated` is the usual padded batch with the prompt in every row."""

_TEXT_INPUTS = ("input_ids", "position_ids", "attention_mask", "prefix_layout")


@dataclass(frozen=True)
class ScoringBatch:
    """Groups of rollouts as one decoder call, with the N response tokens to score.

    Attributes:
        model_inputs: Keyword arguments of the decoder: `input_ids` and `position_ids` of shape [1, T] and the
            `prefix_layout`, or `input_ids` and `attention_mask` of shape [B, L]. If any prompt has images or videos,
            also the media of all prompts: once per group, or once per rollout if prompts are repeated; per-token
            media tensors have the shape of `input_ids`.
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
    """Lay groups out for one decoder call, in the caller's order.

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
        ValueError: If there are no rollouts, `sharing` is unknown, or media do not match their prompt or each other.
    """
    groups = [group for group in groups if group.rollouts]
    if not groups:
        raise ValueError("groups has no rollouts; pass at least one RolloutGroup with a rollout.")
    if sharing not in ("shared", "repeated"):
        raise ValueError(f"sharing is {sharing!r}; pass 'shared' (each prompt encoded once) or 'repeated'.")
    if sharing == "repeated":
        share_across_groups, min_saved_tokens = False, None
    forest = lay_out_forest(
        groups, share_across_groups=share_across_groups, min_saved_tokens=min_saved_tokens, path=path
    )
    return _batch(groups, forest, sharing, device)


def _batch(
    groups: Sequence[RolloutGroup], forest: Forest, sharing: Sharing, device: torch.device | str
) -> ScoringBatch:
    """The tensors of laid-out groups, moved to a device together."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    layout = forest.layout
    row, predict_index_N, final_index_B = _encode(forest, sharing)
    indices = {
        "predict_index_N": predict_index_N,
        "targets_N": _int64([rollout.token_ids for rollout in rollouts]),
        "rollout_index_N": torch.arange(len(rollouts)).repeat_interleave(torch.tensor(lengths, dtype=torch.long)),
        "loss_mask_N": loss_mask(rollouts),
        "final_index_B": final_index_B,
    }
    shared_tokens = forest.shared_tokens
    shared_indices = {} if shared_tokens is None else shared_tokens._asdict()
    moved = move_together(indices | row | shared_indices, device)
    model_inputs: dict[str, Any] = {name: moved[name] for name in row}
    model_inputs |= {name: value.to(device) for name, value in join_media(groups, layout, sharing).items()}
    if sharing == "shared":
        layout.keep_positions(model_inputs["position_ids"][0])
        model_inputs["prefix_layout"] = layout
    return ScoringBatch(
        model_inputs,
        **{name: moved[name] for name in indices},
        rollout_lengths=tuple(lengths),
        layout=layout,
        sharing=sharing,
        shared_tokens=SharedTokens(**{name: moved[name] for name in shared_indices}) if shared_indices else None,
    )


def _encode(forest: Forest, sharing: Sharing) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The decoder's text inputs, `predict_index_N` and `final_index_B`."""
    layout = forest.layout
    tokens = _int64(forest.token_ids)[None]
    if sharing == "shared":
        row = {"input_ids": tokens, "position_ids": layout.position_ids[None]}
        return row, forest.predict_index_N, forest.final_index_B
    return repeat_rows(layout, tokens), *_indices_in_padded_rows(layout)


def _indices_in_padded_rows(layout: SharedPrefixLayout) -> tuple[Tensor, Tensor]:
    """`predict_index_N` and `final_index_B` for the flattened rows, [B * L]."""
    width = max(layout.repeated_lengths)
    last = [row * width + length - 1 for row, length in enumerate(layout.repeated_lengths)]
    lengths = [layout.segments[leaf].length for leaf in layout.leaves]
    return _int64([range(end - length, end) for end, length in zip(last, lengths, strict=True)]), torch.tensor(last)


def loss_mask(rollouts: Sequence[Rollout]) -> Tensor:
    """Which response tokens the model wrote, and a loss may train, bool, shape [N]."""
    if all(rollout.loss_mask is None for rollout in rollouts):
        return torch.ones(sum(len(rollout.token_ids) for rollout in rollouts), dtype=torch.bool)
    masks = [[True] * len(r.token_ids) if r.loss_mask is None else r.loss_mask for r in rollouts]
    return _int64(masks).bool()


def _int64(parts: Sequence[Sequence[int]]) -> Tensor:
    """Concatenate lists of integers, using NumPy, which reads lists three times as fast as `torch.tensor`."""
    return torch.from_numpy(np.fromiter(chain.from_iterable(parts), np.int64, sum(map(len, parts))))
