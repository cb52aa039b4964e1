"""The public package of the Prefix Grouper paper (arXiv:2506.05433), which verl uses, as a backend.

It pads groups to one length, copies the prefix's keys and values for each rollout, and only supports prompts with
rollouts.

Legend: T packed tokens, P groups, L tokens of the longest group, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pl_grouprl.attention.backends.backend import Backend
from pl_grouprl.attention.backends.rule import AttentionRule
from pl_grouprl.packing import SharedPrefixLayout


def _groups(layout: SharedPrefixLayout) -> list[list[int]]:
    """Lengths of each root and its children. The package needs a child, so a root alone gets an empty one."""
    groups: list[list[int]] = []
    for segment in layout.segments:
        if segment.parent is None:
            groups.append([segment.length])
        else:
            groups[-1].append(segment.length)
    return [group if len(group) > 1 else [*group, 0] for group in groups]


def _plan(layout: SharedPrefixLayout, device: torch.device) -> tuple[Any, Tensor]:
    from prefix_grouper import PrefixGrouper

    grouper = PrefixGrouper(_groups(layout), device=device, padding_mode="right")
    return grouper, grouper.padding_mask


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float) -> Tensor:
    """Causal attention, aligned lower right, with a padding mask of the keys; returns [batch, length, H, D]."""
    queries, keys = query.shape[2], key.shape[2]
    causal = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    allowed = causal & mask.bool()[:, None, None, :]
    # Let padding rows see themselves, so their unused results and gradients stay finite.
    allowed = allowed | torch.eye(queries, keys, dtype=torch.bool, device=query.device).roll(keys - queries, 1)
    heads_per_key = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(heads_per_key, dim=1) for tensor in (key, value))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, allowed, scale=scale)
    return out.transpose(1, 2)


def _attend(query: Tensor, key: Tensor, value: Tensor, layout: SharedPrefixLayout, rule: AttentionRule) -> Tensor:
    grouper, kept_PL = layout.memo(("prefix_grouper", query.device), lambda: _plan(layout, query.device))
    padded = []
    for tensor in (query, key, value):
        batch = tensor.new_zeros(*kept_PL.shape, tensor.shape[1], tensor.shape[3])
        batch = batch.index_put(kept_PL.nonzero(as_tuple=True), tensor[0].transpose(0, 1))
        padded.append(batch.transpose(1, 2))
    out_PLHD = grouper.forward(_sdpa, *padded, scale=rule.scale)
    return out_PLHD[kept_PL][None]


def _refusal(query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> str | None:
    if rule.features:
        return f"the package does not support {', '.join(rule.features)}; use backend 'auto'."
    if key.shape[-1] != value.shape[-1]:
        return f"keys have head size {key.shape[-1]} and values {value.shape[-1]}; use backend 'auto'."
    return None


PREFIX_GROUPER = Backend("prefix_grouper", _attend, _refusal, max_depth=1, takes_prefilled=False)
