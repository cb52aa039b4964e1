"""From rollout groups to what the decoder reads and what is scored, with the prompt once or once per rollout.

Legend: B rollouts, T packed tokens, L longest sequence, N response tokens of all rollouts one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pl_grouprl.packing.layout import SharedPrefixLayout
from pl_grouprl.packing.media import join_media
from pl_grouprl.types import RolloutGroup

Sharing = Literal["shared", "repeated"]
"""`shared` encodes each prompt once; `repeated` is the usual padded batch with the prompt in every row."""

_TEXT_INPUTS = ("input_ids", "position_ids", "attention_mask", "prefix_layout")


@dataclass(frozen=True)
class ScoringBatch:
    """Groups of rollouts as one decoder call, with the N response tokens to score.

    Attributes:
        model_inputs: Keyword arguments of the decoder: `input_ids` and `position_ids` of shape [1, T] and the
            `prefix_layout`, or `input_ids` and `attention_mask` of shape [B, L]. Where a prompt has images or videos
            also the media of all prompts: once per group, or once per rollout where prompts are repeated; what has an
            entry per token has the shape of `input_ids`.
        predict_index_N: Where in the flattened hidden states each response token is predicted, int64.
        targets_N: The response tokens, int64.
        rollout_index_N: The rollout of each response token, counted through the groups in order, int64.
        loss_mask_N: Which response tokens are trained, bool.
        final_index_B: Where in the flattened hidden states each rollout ends, int64; where an empty one's prompt does.
        rollout_lengths: Response tokens of each of the B rollouts.
        layout: The forest of the groups, whichever way they are encoded.
        sharing: Which way that is.
        sequence_group: The process group whose ranks run this row together, each of them with the same batch; None
            where this rank runs it alone. See `attention.sequence_parallel`.
        prefix: The pass of the prompt that a slice of rollouts stands behind (`models.PrefixPass`); None where the
            batch has its prompts.
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
    sequence_group: Any = None
    prefix: Any = None

    @property
    def media(self) -> dict[str, Tensor]:
        """Those of the `model_inputs` that are images and videos; empty for text."""
        return {name: value for name, value in self.model_inputs.items() if name not in _TEXT_INPUTS}

    @property
    def num_rollouts(self) -> int:
        """B."""
        return len(self.rollout_lengths)

    @property
    def num_tokens_run(self) -> int:
        """Tokens that go through the decoder, padding included."""
        return self.model_inputs["input_ids"].numel()

    @property
    def num_prefix_tokens_run(self) -> int:
        """Tokens of the prompt that a slice stands behind, to be counted with its first slice; 0 for others."""
        return 0 if self.prefix is None else self.prefix.count_once()

    @property
    def num_tokens_repeated(self) -> int:
        """Tokens of the same sequences with the prompt repeated, without padding."""
        return sum(self.layout.repeated_lengths)

    @property
    def padding_fraction(self) -> float:
        """Share of the encoded tokens that is padding; 0 where prefixes are shared."""
        kept = self.layout.num_queries if self.sharing == "shared" else self.num_tokens_repeated
        return 1 - kept / max(self.num_tokens_run, 1)


def pack(
    groups: Sequence[RolloutGroup], sharing: Sharing = "shared", *, device: torch.device | str = "cpu"
) -> ScoringBatch:
    """Lay groups out for one decoder call. Rollouts keep the caller's order; nothing is sorted.

    Args:
        groups: Prompts with their rollouts, of any number and length. A group without rollouts takes no part.
        sharing: One packed row with each prompt once, or a right-padded row for each rollout.
        device: Where the tensors are put.

    Raises:
        ValueError: If there is no rollout at all, `sharing` is unknown, or media do not fit their prompt or each other.
    """
    groups = [group for group in groups if group.rollouts]
    if not groups:
        raise ValueError("groups holds no rollout; pass at least one RolloutGroup with a rollout.")
    if sharing not in ("shared", "repeated"):
        raise ValueError(f"sharing is {sharing!r}; pass 'shared' (each prompt encoded once) or 'repeated'.")
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    layout = SharedPrefixLayout.from_groups(
        [(len(group.prompt_ids), [len(rollout.token_ids) for rollout in group.rollouts]) for group in groups],
        [number if group.group_id is None else group.group_id for number, group in enumerate(groups)],
    )
    encode = _packed_row if sharing == "shared" else _padded_rows
    model_inputs, predict_index_N, final_index_B = encode(groups, layout)
    model_inputs |= join_media(groups, sharing)
    trained = [bit for r in rollouts for bit in (r.loss_mask if r.loss_mask is not None else [1] * len(r.token_ids))]
    return ScoringBatch(
        model_inputs={name: v.to(device) if isinstance(v, Tensor) else v for name, v in model_inputs.items()},
        predict_index_N=predict_index_N.to(device),
        targets_N=_int64([token for rollout in rollouts for token in rollout.token_ids]).to(device),
        rollout_index_N=torch.arange(len(rollouts)).repeat_interleave(_int64(lengths)).to(device),
        loss_mask_N=torch.tensor(trained, dtype=torch.bool, device=device),
        final_index_B=final_index_B.to(device),
        rollout_lengths=tuple(lengths),
        layout=layout,
        sharing=sharing,
    )


def _packed_row(groups: Sequence[RolloutGroup], layout: SharedPrefixLayout) -> tuple[dict[str, Any], Tensor, Tensor]:
    tokens: list[int] = []
    for group in groups:
        tokens += group.prompt_ids
        for rollout in group.rollouts:
            tokens += rollout.token_ids
    predict: list[int] = []
    final: list[int] = []
    for segment in layout.segments:
        if segment.parent is None:
            continue
        end_of_prompt = layout.segments[segment.parent].stop - 1
        final.append(segment.stop - 1 if segment.length else end_of_prompt)
        if segment.length:
            # The last token of the prompt predicts the first of each rollout; the others are predicted in place.
            predict += [end_of_prompt, *range(segment.start, segment.stop - 1)]
    inputs = {
        "input_ids": _int64(tokens)[None],
        "position_ids": layout.position_ids[None],
        "prefix_layout": layout,
    }
    return inputs, _int64(predict), _int64(final)


def _padded_rows(groups: Sequence[RolloutGroup], layout: SharedPrefixLayout) -> tuple[dict[str, Any], Tensor, Tensor]:
    width = max(layout.repeated_lengths)
    input_ids_BL = torch.zeros(len(layout.repeated_lengths), width, dtype=torch.long)
    attention_mask_BL = torch.zeros_like(input_ids_BL)
    predict: list[int] = []
    final: list[int] = []
    row = 0
    for group in groups:
        prefix_len = len(group.prompt_ids)
        for rollout in group.rollouts:
            sequence = group.prompt_ids + rollout.token_ids
            input_ids_BL[row, : len(sequence)] = _int64(sequence)
            attention_mask_BL[row, : len(sequence)] = 1
            predict += range(row * width + prefix_len - 1, row * width + len(sequence) - 1)
            final.append(row * width + len(sequence) - 1)
            row += 1
    return {"input_ids": input_ids_BL, "attention_mask": attention_mask_BL}, _int64(predict), _int64(final)


def _int64(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.long)
