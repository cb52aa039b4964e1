"""FlexAttention with the layout's mask. On CPU PyTorch gives it no backward, so there it serves scoring only.

Legend: T packed tokens, H query heads.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pl_grouprl.attention.backends.backend import Backend, needs_gradient
from pl_grouprl.attention.backends.rule import AttentionRule, visibility_function
from pl_grouprl.packing import SharedPrefixLayout


@cache
def _flex_attention(device_type: str) -> Any:
    """Compiled on CUDA. On CPU the compiled one lacks most rules, and the plain one is right."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if device_type == "cuda" else flex_attention


def _block_mask(layout: SharedPrefixLayout, rule: AttentionRule, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    sees = visibility_function(layout, rule, device)

    places = torch.arange(layout.given, layout.num_tokens, device=device)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(query, key)

    def visible_behind_given(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(places[query], key)

    rule_of_mask = visible_behind_given if layout.given else visible
    return create_block_mask(rule_of_mask, None, None, layout.num_queries, layout.num_tokens, device=device)


def _soft_cap(softcap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


def _attend(query: Tensor, key: Tensor, value: Tensor, layout: SharedPrefixLayout, rule: AttentionRule) -> Tensor:
    from torch.nn.attention.flex_attention import AuxRequest

    mask = layout.memo(("block_mask", query.device, rule.visibility), lambda: _block_mask(layout, rule, query.device))
    if not needs_gradient(query, key, value):  # the CPU kernel looks at requires_grad even where no graph is recorded
        query, key, value = query.detach(), key.detach(), value.detach()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        out, aux = _flex_attention(query.device.type)(
            query,
            key,
            value,
            score_mod=None if rule.softcap is None else _soft_cap(rule.softcap),
            block_mask=mask,
            scale=rule.scale,
            enable_gqa=query.shape[1] != key.shape[1],
            return_aux=AuxRequest(lse=rule.sinks_H is not None),
        )
    if rule.sinks_H is not None:
        # A sink takes its share of the softmax and adds nothing to the output.
        sinks = rule.sinks_H.to(aux.lse.dtype)[None, :, None]
        out = out * torch.sigmoid(aux.lse - sinks)[..., None].to(out.dtype)
    return out.transpose(1, 2)


def _refusal(query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> str | None:
    gradient = needs_gradient(query, key, value) or (rule.sinks_H is not None and needs_gradient(rule.sinks_H))
    if query.device.type == "cpu" and gradient:
        return "FlexAttention has no backward pass on CPU; use backend 'cascade' for training there."
    return None


FLEX = Backend("flex", _attend, _refusal)
