"""Decides which ordinary decoder calls on padded rows share prefixes, and why the others go through untouched.

Legend: B rows, L their padded length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pl_grouprl.attention.dense_masks import DENSE
from pl_grouprl.attention.layer_check import Padding
from pl_grouprl.attention.routers import masks_balancing_loss
from pl_grouprl.attention.row_scale import scales_by_row
from pl_grouprl.attention.rows import SharedRows, share_rows
from pl_grouprl.attention.state.stateful import STATEFUL, has_bias, stateful_mixers
from pl_grouprl.attention.support import has_dynamic_rope, positions_are_relative
from pl_grouprl.utilities import internals

CACHE_IN_USE = "a cache is in use"
"""Why calls during generation go through untouched."""

_KNOWN_ARGUMENTS = {"input_ids", "attention_mask", "position_ids"}


class RowSharing:
    """Packs the rows of a decoder's ordinary calls if the result is the same.

    Args:
        decoder: The decoder.
        min_saved_tokens: Minimum number of tokens that sharing a prefix must save.
        max_depth: Maximum depth of the forest; None for no limit.

    Attributes:
        positions_are_relative: Whether rows whose positions differ by a constant may share a prefix.
        scales_by_row: Whether layers scale queries by their index in the row.
        differing_padding: Padding with which rows are not shared; None shares with any padding.
    """

    def __init__(self, decoder: Any, min_saved_tokens: int, max_depth: int | None) -> None:
        self.min_saved_tokens = min_saved_tokens
        self.positions_are_relative = positions_are_relative(decoder)
        self.differing_padding: Padding | None = None
        self._decoder, self._max_depth = decoder, max_depth
        # OPT's default positions count the tokens of the attention mask, not the columns.
        names = {type(module).__name__ for module in decoder.modules()}
        self._positions_count_mask = "OPTLearnedPositionalEmbedding" in names
        self.scales_by_row = any(scales_by_row(module) for module in decoder.modules())
        self._has_dynamic_rope = has_dynamic_rope(decoder)
        self._padding_reaches_states = any(has_bias(mixer) for mixer in stateful_mixers(decoder))
        self._labels_need_padding = False

    def learn(self, relative: bool, differing_padding: Padding | None) -> None:
        """Store the results of the layer check; see the attributes."""
        self.positions_are_relative = self.positions_are_relative and relative
        self.differing_padding = differing_padding

    def note_labels(self, labels: Any, mask: Any) -> None:
        """Note whether the next call's labels are predicted at padding, which packed rows do not have."""
        self._labels_need_padding = (
            isinstance(labels, Tensor)
            and isinstance(mask, Tensor)
            and mask.shape == labels.shape
            and bool(((labels[:, 1:] != -100) & (mask[:, :-1] == 0)).any())
        )

    def pack(self, kwargs: dict[str, Any], group_ids: Any, layers: dict[str, tuple[str, int]]) -> SharedRows | str:
        """Pack the rows of a call, or return the reason to leave it untouched.

        Args:
            kwargs: Arguments of the call.
            group_ids: One per row; only rows of the same group share. None compares all rows.
            layers: The backend of each kind of layer, as in `SharedPrefix.layers`.
        """
        reason = unsharable(kwargs, self._decoder.config, self._decoder) or self._refusal(
            kwargs.get("attention_mask"), layers
        )
        if reason is not None:
            return reason
        shared = share_rows(
            kwargs["input_ids"], kwargs.get("attention_mask"), self._positions(kwargs), group_ids,
            positions_are_relative=self.positions_are_relative, by_column=self.scales_by_row,
            min_saved_tokens=self.min_saved_tokens, max_depth=self._max_depth,
        )  # fmt: skip
        if shared is None:
            return "no rows of the batch share a prefix"
        if self._has_dynamic_rope and not _same_largest_position(shared, kwargs):
            return "its rotary frequencies depend on the largest position, which is that of padding"
        return shared

    def _refusal(self, mask: Tensor | None, layers: dict[str, tuple[str, int]]) -> str | None:
        """Why rows with this padding cannot be packed for this model."""
        if self._labels_need_padding:
            return "its labels train tokens that padding predicts"
        if _count_columns(layers) and has_holes(mask):
            return "its padding lies between tokens, which windows, chunks and states count"
        if self._padding_reaches_states and pads_left(mask):
            return "its padding on the left reaches the states of its layers through a bias"
        if self._differs_through_padding(mask):
            return f"a trial on a few tokens with {self.differing_padding} differed from the unshared run"
        return None

    def _differs_through_padding(self, mask: Tensor | None) -> bool:
        if self.differing_padding is None:
            return False
        return has_padding(mask) if self.differing_padding == "padding" else pads_left(mask)

    def _positions(self, kwargs: dict[str, Any]) -> Tensor | None:
        """Positions that the decoder would use for the caller's rows; None means columns."""
        positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
        if positions is None and mask is not None and self._positions_count_mask:
            return (mask.cumsum(dim=1) - 1).clamp(min=0)
        return positions


def unsharable(arguments: dict[str, Any], config: Any, decoder: nn.Module | None = None) -> str | None:
    """Why a decoder call must go through untouched, or None if its rows can be packed.

    Args:
        arguments: Arguments of the call, by name.
        config: Config of the decoder.
        decoder: The decoder, if `unpack_router_logits` will process requested router logits.
    """
    input_ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
    tensors = {name for name, value in arguments.items() if isinstance(value, Tensor) and value.dim()}
    tensors -= _KNOWN_ARGUMENTS

    def asked_for(option: str) -> bool:
        return bool(arguments[option] if arguments.get(option) is not None else getattr(config, option, False))

    findings = {
        CACHE_IN_USE: internals.holds_cache(arguments) or bool(arguments.get("use_cache")),
        "embeddings cannot be compared": input_ids is None,
        "input_ids are not of shape [rows, tokens]": input_ids is not None and input_ids.dim() != 2,
        "it has one row": input_ids is not None and len(input_ids) < 2,
        "attention_mask is not of the shape of input_ids":
            mask is not None and getattr(mask, "shape", None) != getattr(input_ids, "shape", None),
        "attention weights are requested": asked_for("output_attentions"),
        "router logits are requested":
            asked_for("output_router_logits") and not _can_return_router_logits(arguments, config, decoder),
        "position_ids are not of shape [rows, tokens]": getattr(arguments.get("position_ids"), "ndim", 2) != 2,
        f"{', '.join(sorted(tensors))} would have to be packed too": bool(tensors),
    }  # fmt: skip
    return next((reason for reason, found in findings.items() if found), None)


def _can_return_router_logits(arguments: dict[str, Any], config: Any, decoder: nn.Module | None) -> bool:
    """Whether router logits can be returned for packed rows: only if the loss ignores padding."""
    by_name = arguments.get("return_dict", getattr(config, "return_dict", True)) is not False
    return decoder is not None and by_name and masks_balancing_loss(decoder)


def has_holes(attention_mask: Tensor | None) -> bool:
    """Whether a row of a padding mask [B, L] has padding between its tokens."""
    if attention_mask is None:
        return False
    kept = attention_mask.bool()
    starts = kept & ~torch.nn.functional.pad(kept, (1, 0))[:, :-1]
    return bool((starts.sum(dim=1) > 1).any())


def has_padding(attention_mask: Tensor | None) -> bool:
    """Whether a row of a padding mask [B, L] has padding."""
    return attention_mask is not None and not bool(attention_mask.all())


def pads_left(attention_mask: Tensor | None) -> bool:
    """Whether a row of a padding mask [B, L] begins with padding."""
    return attention_mask is not None and bool((attention_mask[:, 0] == 0).any())


def _count_columns(layers: dict[str, tuple[str, int]]) -> bool:
    """Whether layers count padding between tokens (windows, chunks, states); True if they are not known yet."""
    return not layers or any(
        "window" in kind or "chunks" in kind or kind == DENSE or ran == STATEFUL for kind, (ran, _) in layers.items()
    )


def _same_largest_position(shared: SharedRows, kwargs: dict[str, Any]) -> bool:
    positions = kwargs.get("position_ids")
    largest = kwargs["input_ids"].shape[1] - 1 if positions is None else int(positions.max())
    return int(shared.position_ids.max()) == largest
