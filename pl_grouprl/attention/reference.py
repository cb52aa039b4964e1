"""The oracle: attention over a packed row with a dense mask. Simple and slow; every other backend is compared with it.

Legend: T packed tokens, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pl_grouprl.attention.backend import Backend
from pl_grouprl.packing import SharedPrefixLayout


def dense_mask(layout: SharedPrefixLayout, device: torch.device) -> Tensor:
    """Which token (row) sees which (column), shape [T, T], bool."""
    tokens = torch.arange(layout.num_tokens, device=device)
    return layout.visible(tokens[:, None], tokens[None, :], device)


def attend(query: Tensor, key: Tensor, value: Tensor, layout: SharedPrefixLayout, scale: float) -> Tensor:
    """Softmax attention under the layout's dense mask, in float32 or wider.

    Args:
        query: Shape [1, H, T, D].
        key: Shape [1, K, T, D].
        value: Shape [1, K, T, D].
        layout: The forest of the row.
        scale: Factor of the scores.

    Returns:
        Shape [1, T, H, D], in the dtype of `query`.
    """
    mask = layout.memo(("dense_mask", query.device), lambda: dense_mask(layout, query.device))
    wide = torch.promote_types(query.dtype, torch.float32)
    heads_per_key = query.shape[1] // key.shape[1]
    key = key.to(wide).repeat_interleave(heads_per_key, dim=1)
    value = value.to(wide).repeat_interleave(heads_per_key, dim=1)
    scores_HTT = (query.to(wide) @ key.transpose(2, 3)) * scale
    weights_HTT = scores_HTT.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    return (weights_HTT @ value).transpose(1, 2).to(query.dtype)


REFERENCE = Backend("reference", attend, value_size_may_differ=True)
