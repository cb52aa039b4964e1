"""The oracle: attention over a packed row with a dense mask. Simple and slow; all backends are tested against it.

Legend: T packed tokens, S of them that run, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pl_grouprl.attention.backends.backend import Backend
from pl_grouprl.attention.backends.rule import AttentionRule, visibility_function
from pl_grouprl.packing import SharedPrefixLayout


def dense_mask(layout: SharedPrefixLayout, rule: AttentionRule, device: torch.device) -> Tensor:
    """Which token (row) sees which (column), shape [S, T], bool."""
    tokens = torch.arange(layout.num_tokens, device=device)
    return visibility_function(layout, rule, device)(tokens[layout.num_prefilled :, None], tokens[None, :])


def attend(query: Tensor, key: Tensor, value: Tensor, layout: SharedPrefixLayout, rule: AttentionRule) -> Tensor:
    """Softmax attention under the layout's dense mask, in float32 or wider.

    Args:
        query: Shape [1, H, S, D].
        key: Shape [1, K, T, D].
        value: Shape [1, K, T, V].
        layout: The forest of the row.
        rule: How the layer attends.

    Returns:
        Shape [1, S, H, V], in the dtype of `query`.
    """
    mask = layout.memo(("dense_mask", query.device, rule.visibility), lambda: dense_mask(layout, rule, query.device))
    wide = torch.promote_types(query.dtype, torch.float32)
    heads_per_key = query.shape[1] // key.shape[1]
    key = key.to(wide).repeat_interleave(heads_per_key, dim=1)
    value = value.to(wide).repeat_interleave(heads_per_key, dim=1)
    scores_HST = (query.to(wide) @ key.transpose(2, 3)) * rule.scale
    if rule.softcap is not None:
        scores_HST = rule.softcap * (scores_HST / rule.softcap).tanh()
    scores_HST = scores_HST.masked_fill(~mask, float("-inf"))
    if rule.sinks_H is not None:
        sinks = rule.sinks_H.to(wide)[None, :, None, None].expand(*scores_HST.shape[:3], 1)
        scores_HST = torch.cat([scores_HST, sinks], dim=-1)
    weights_HST = scores_HST.softmax(dim=-1)[..., : key.shape[2]]
    return (weights_HST @ value).transpose(1, 2).to(query.dtype)


REFERENCE = Backend("reference", attend, preference=lambda query, key, value, rule: 0)
