"""Checks the arguments passed to a model with an explicit layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pl_grouprl.packing import SharedPrefixLayout
from pl_grouprl.utilities import internals


def check_packed_row(kwargs: dict[str, Any], layout: SharedPrefixLayout) -> None:
    """Refuse arguments that contradict an explicit layout.

    Raises:
        ValueError: If input or positions do not match the packed row, a mask hides tokens, or a cache is requested.
    """
    tokens = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
    rows = tokens.shape if kwargs.get("input_ids") is not None else tokens.shape[:-1]
    length = layout.num_queries
    if tuple(rows) not in ((length,), (1, length)):
        raise ValueError(
            f"prefix_layout has {length} tokens, but the model was given input of shape {list(rows)}; "
            f"pass one packed row, of shape [1, {length}]."
        )
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if positions is not None and not (
        positions.shape[-1] == length and (positions.dim() == 3 or positions.numel() == length)
    ):
        raise ValueError(
            f"position_ids has shape {list(positions.shape)} for a prefix_layout of {length} tokens; pass "
            "prefix_layout.position_ids, or leave it out."
        )
    if positions is not None and positions.dim() < 3:
        _check_positions(positions.flatten(), layout)
    if mask is not None and not (isinstance(mask, Tensor) and bool((mask == 1).all())):
        raise ValueError(
            "attention_mask hides tokens of a packed row, where prefix_layout alone decides what is seen; leave it out."
        )
    if internals.holds_cache(kwargs) or kwargs.get("use_cache"):
        raise ValueError("a packed row with prefix_layout runs without a cache; pass use_cache=False.")


def _check_positions(positions_T: Tensor, layout: SharedPrefixLayout) -> None:
    """Accept the layout's positions plus a constant per tree, as for callers that count from 1.

    Synchronizes with the device, unless they are the layout's own tensor, as from `pack`.
    """
    own_T = layout.positions_on(positions_T.device)[layout.num_prefilled :]
    if positions_T.is_set_to(own_T):
        return
    offsets_T = positions_T - own_T
    roots = layout.memo("roots", lambda: _first_tokens_of_roots(layout)).to(positions_T.device)[layout.num_prefilled :]
    if not torch.equal(offsets_T, offsets_T[roots]):
        raise ValueError(
            "position_ids do not continue from a prefix to its suffixes; pass prefix_layout.position_ids, or "
            "leave them out."
        )


def _first_tokens_of_roots(layout: SharedPrefixLayout) -> Tensor:
    """The first token of each token's tree, shape [T]."""
    first: list[int] = []
    for segment in layout.segments:
        first.append(segment.start if segment.parent is None else first[segment.parent])
    return layout.per_token(first)


def media_arguments(kwargs: dict[str, Any]) -> list[str]:
    """Names of arguments with images or videos."""
    return [name for name in kwargs if ("pixel" in name or "grid" in name) and kwargs[name] is not None]


def row_of_positions(positions: Tensor) -> Tensor:
    """Reshape [T] or [1, T] to [1, T]; keeps the [kinds, 1, T] of images (time, height, width)."""
    return positions if positions.dim() == 3 else positions.reshape(1, -1)
