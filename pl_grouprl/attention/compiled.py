"""Shared-prefix attention as one operator, so a compiled decoder layer stays one graph for all layouts.

torch.compile must not see the layout, or it would guard on it and recompile for each new one. So the operator takes
tensors only, and reads the layout from the marker, a tensor passed in place of the mask.

Legend: T packed tokens, H query heads, K key/value heads, D head size of keys, V head size of values.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pl_grouprl.attention.backends.backend import Backend
from pl_grouprl.attention.backends.choice import get_backend
from pl_grouprl.attention.backends.rule import AttentionRule
from pl_grouprl.attention.layer_options import OWN_MASK, LayerOptions
from pl_grouprl.attention.mask import forest_of_marker, from_marker
from pl_grouprl.packing import SharedPrefixLayout

_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? sinks"
_OPTIONS = "Tensor marker, str backend, float scale, float? softcap, int? window"


def attend_compiled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    marker: Tensor,
    backend: str,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
    window: int | None,
) -> Tensor:
    """Compute attention over a packed row inside a graph.

    Args:
        query: Shape [1, H, T, D].
        key: Shape [1, K, T, D].
        value: Shape [1, K, T, V].
        marker: The layer's mask argument.
        backend: Name of the backend.
        scale: See `LayerOptions`, also for the remaining arguments.
        softcap: See `LayerOptions`.
        sinks_H: See `LayerOptions`.
        window: See `LayerOptions`.

    Returns:
        Shape [1, T, H, V].
    """
    out, _ = _packed_attention(query, key, value, sinks_H, marker, backend, scale, softcap, window)
    return out


@lru_cache(maxsize=16)
def _layout(lengths: tuple[int, ...], parents: tuple[int | None, ...]) -> SharedPrefixLayout:
    """One layout, with its cached plans, for all layers of a call."""
    return SharedPrefixLayout(lengths, parents)


def _read(
    marker: Tensor, scale: float, softcap: float | None, sinks: Tensor | None, window: int | None
) -> tuple[SharedPrefixLayout, AttentionRule]:
    mask = from_marker(marker)
    if mask is None:
        raise NotImplementedError(f"a compiled layer {OWN_MASK}")
    layout = _layout(*forest_of_marker(marker))
    return layout, LayerOptions(scale, softcap, sinks, window).rule(mask, layout).simplified(layout)


@torch.library.custom_op(
    "pl_grouprl::packed_attention", mutates_args=(), schema=f"({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)"
)
def _packed_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, marker: Tensor, name: str, *options: Any
) -> tuple[Tensor, Tensor]:
    """The output [1, T, H, V] and, for backends with an explicit gradient, the log-sum-exp [H, T]."""
    scale, softcap, window = options
    layout, rule = _read(marker, scale, softcap, sinks, window)
    backend = get_backend(name).resolve(query, key, value, layout, rule, compiled=True)
    if backend.explicit is not None:
        backend.check(query, key, value, layout, rule)
        return backend.explicit.forward(query, key, value, layout, rule)
    out = backend(query, key, value, layout, rule).contiguous()
    wide = torch.promote_types(query.dtype, torch.float32)
    return out, query.new_empty(query.shape[1], query.shape[2], dtype=wide)  # never read


@_packed_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
    wide = torch.promote_types(query.dtype, torch.float32)
    return out, query.new_empty(query.shape[1], query.shape[2], dtype=wide)


@torch.library.custom_op(
    "pl_grouprl::packed_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor out, Tensor lse, {_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _packed_attention_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    marker: Tensor,
    name: str,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and sinks (empty if there are none)."""
    scale, softcap, window = options
    layout, rule = _read(marker, scale, softcap, sinks, window)
    backend = get_backend(name).resolve(query, key, value, layout, rule, compiled=True)
    if backend.explicit is None:
        return _recompute_gradients(grad, query, key, value, sinks, backend, layout, rule)
    *grads, for_sinks = backend.explicit.backward(grad, out, lse, query, key, value, layout, rule)
    return grads[0], grads[1], grads[2], query.new_empty(0) if for_sinks is None else for_sinks


def _recompute_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    backend: Backend,
    layout: SharedPrefixLayout,
    rule: AttentionRule,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in (query, key, value, sinks)]
    query, key, value, sinks = leaves  # type: ignore[assignment]
    with torch.enable_grad():
        out = backend(query, key, value, layout, replace(rule, sinks_H=sinks))
    grads = torch.autograd.grad(out, [leaf for leaf in leaves if leaf is not None], grad)
    return grads[0], grads[1], grads[2], grads[3] if sinks is not None else query.new_empty(0)


@_packed_attention_backward.register_fake
def _(grad: Tensor, out: Tensor, lse: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    query, key, value, sinks = inputs[:4]
    empty = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (query, key, value)]
    return (*empty, query.new_empty(0) if sinks is None else torch.empty_like(sinks))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, sinks, marker, *ctx.options = inputs
    ctx.save_for_backward(*output, query, key, value, sinks, marker)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *saved, marker = ctx.saved_tensors
    grads = _packed_attention_backward(grad.contiguous(), *saved, marker, *ctx.options)
    sinks = None if saved[-1] is None else grads[3]
    return (*grads[:3], sinks, None, *[None] * len(ctx.options))


_packed_attention.register_autograd(_differentiate, setup_context=_save)
