"""FlexAttention with the layout's mask. On CPU PyTorch gives it no backward, so there it serves scoring only."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from pl_grouprl.attention.backend import Backend, needs_gradient
from pl_grouprl.packing import SharedPrefixLayout


@cache
def _compiled_flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def _block_mask(layout: SharedPrefixLayout, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    starts, stops = layout.subtree_bounds(device)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= starts[key]) & (query < stops[key]) & (key <= query)

    return create_block_mask(visible, None, None, layout.num_tokens, layout.num_tokens, device=device)


def _attend(query: Tensor, key: Tensor, value: Tensor, layout: SharedPrefixLayout, scale: float) -> Tensor:
    mask = layout.memo(("block_mask", query.device), lambda: _block_mask(layout, query.device))
    if not needs_gradient(query, key, value):  # the CPU kernel looks at requires_grad even where no graph is recorded
        query, key, value = query.detach(), key.detach(), value.detach()
    out = _compiled_flex_attention()(
        query, key, value, block_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2)


def _refusal(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    if query.device.type == "cpu" and needs_gradient(query, key, value):
        return "FlexAttention has no backward pass on CPU; use backend 'cascade' for training there."
    return None


FLEX = Backend("flex", _attend, _refusal)
