"""One attention function for transformers: ours if a packed row's layout arrives, otherwise the model's own.

The layout arrives with the marker in place of the layer's mask (see `masks`), not as a global, because activation
checkpointing must find it when it runs a layer again in the backward pass. Most layers also pass on the keyword
`prefix_layout`, which stateful layers and compiled graphs read.

Legend: B rows, T packed tokens, S query tokens, H query heads, K key/value heads, D head size of keys, V of values, N
selected tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from pl_grouprl.attention.backends.choice import ORACLE, get_backend
from pl_grouprl.attention.backends.interface import AttentionRule, Backend
from pl_grouprl.attention.call import LayoutCall
from pl_grouprl.attention.masks import (
    DENSE,
    LayerOptions,
    forest_of_marker,
    from_marker,
    has_shape_of_marker,
    is_marker,
    marked_layer,
    mask_function,
    own_mask,
    read_layer_options,
)
from pl_grouprl.packing import SharedPrefixLayout


def register(backend_name: str, wrapped: str) -> str:
    """Register our attention and mask functions on top of the implementation `wrapped`.

    Returns:
        The name to set as a config's attention implementation.
    """
    backend = get_backend(backend_name)

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        prefix_layout: LayoutCall | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        call, compiling = prefix_layout, torch.compiler.is_compiling()
        if call is not None and not isinstance(call, LayoutCall):
            raise RuntimeError(
                "prefix_layout reached a decoder that is not patched; run it inside `with shared_prefix(model):`."
            )
        if call is not None and call.dense:
            read_layer_options(module, query, {name: value for name, value in kwargs.items() if name != "indices"})
            tokens = call.layout.num_tokens
            if attention_mask is None or attention_mask.shape[-2:] != (tokens, tokens) or key.shape[2] != tokens:
                raise own_mask(type(module).__name__)
            if not compiling:
                call.note(module, DENSE, wrapped)
            return attend_by_mask(module, wrapped, query, key, value, attention_mask, **kwargs)
        if call is None and not (has_shape_of_marker if compiling else is_marker)(attention_mask):
            return attend_by_mask(module, wrapped, query, key, value, attention_mask, **kwargs)
        options = read_layer_options(module, query, kwargs)
        # Cast as autocast does for PyTorch's attention; without autocast, to the dtype of the query.
        autocast = torch.is_autocast_enabled(query.device.type)
        dtype = torch.get_autocast_dtype(query.device.type) if autocast else query.dtype
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if not compiling:
            return _attend_packed(backend, module, query, key, value, attention_mask, options), None
        if call is None or call.states is not None:
            return _attend_uncompiled(backend, module, query, key, value, attention_mask, options), None
        if call.shards is not None or scales_by_row(module) or not backend.in_compiled_layers:
            raise NotImplementedError(
                f"{type(module).__name__} scales queries by their index in the row, uses sequence_parallel_size, or "
                f"attention backend {backend.name!r} does not run inside compiled layers; omit kernels='compile'."
            )
        if attention_mask is None:
            raise own_mask("a compiled layer")
        scale, softcap, sinks_H, window = options
        return _packed_attention(query, key, value, sinks_H, attention_mask, backend.name, scale, softcap, window)[
            0
        ], None

    return register_over(wrapped, f"shared_prefix_{backend_name}", attention, mask_function)


def register_over(
    wrapped: str,
    name: str,
    attention: Callable[..., tuple[Tensor, Tensor | None]],
    wrap_mask: Callable[[Callable[..., Any] | None], Callable[..., Any]],
) -> str:
    """Register an attention function with transformers, on top of the implementation that it falls back on.

    Args:
        wrapped: Name of the implementation.
        name: Beginning of the name to register.
        attention: The attention function.
        wrap_mask: Takes the mask function of `wrapped`, or None, and returns the one to register.

    Returns:
        The name to set as a config's attention implementation.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    name = f"{name}_over_{wrapped}"
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, wrap_mask(dict(ALL_MASK_ATTENTION_FUNCTIONS).get(wrapped)))
    return _Over(name, wrapped)


class _Over(str):
    """The name of an implementation on top of another; a pickled config has the other's, which every process knows."""

    wrapped: str

    def __new__(cls, name: str, wrapped: str) -> _Over:
        own = super().__new__(cls, name)
        own.wrapped = wrapped
        return own

    def __deepcopy__(self, memo: dict[int, Any]) -> _Over:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.wrapped,)


def _attend_packed(
    backend: Backend,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    options: LayerOptions,
) -> Tensor:
    marked = marked_layer(attention_mask)
    if marked is None:
        raise own_mask(type(module).__name__)
    call = marked.call
    if call.shards is not None:
        query, key, value = call.shards.to_heads(query, key, value)
        options = options._replace(sinks_H=call.shards.own_heads(options.sinks_H))
    saving: AbstractContextManager[Any] = nullcontext()
    if call.states is not None:  # for this rank's heads
        joined = call.states.join(module, call.layout, key, value)
        key, value, saving = joined.key, joined.value, joined.saved_by_parts()
    rule = options.rule(marked.rule, call.layout)
    kind, rule = rule.kind, rule.simplified(call.layout)
    if scales_by_row(module):
        query = rescale_by_column(module, query, call.layout, call.columns_T)
    backend = ORACLE if call.only not in (None, kind) else backend.resolve(query, key, value, call.layout, rule)
    call.note(module, kind, backend.name)
    with saving:
        attended = backend(query, key, value, call.layout, rule)
    return attended if call.shards is None else call.shards.to_tokens(attended)


_attend_uncompiled = torch.compiler.disable(_attend_packed, reason="looks up the call, and records states, in Python")


def attend_by_mask(
    module: nn.Module,
    wrapped: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run a layer under the implementation that ours wraps.

    Layers that select tokens write the selection into the mask for `eager` and `sdpa`, which they know by name. Other
    implementations, such as ours, get it as `indices`.

    Args:
        module: The attention layer.
        wrapped: Name of the implementation.
        query: Shape [B, H, S, D].
        key: Shape [B, K, T, D].
        value: Shape [B, K, T, V].
        mask: The layer's mask, shape [B, 1 or H, S, T], bool, or added to the scores.
        indices: Tokens that each query selected, shape [B, S, N].
        kwargs: Further keywords of the layer.
    """
    if indices is not None and mask is not None and wrapped in ("eager", "sdpa"):
        selected = torch.zeros(*indices.shape[:2], mask.shape[-1], dtype=torch.bool, device=mask.device)
        selected = selected.scatter(-1, indices.long(), True)[:, None]
        mask = mask & selected if mask.dtype == torch.bool else mask.masked_fill(~selected, torch.finfo(mask.dtype).min)
    elif indices is not None:
        kwargs["indices"] = indices
    return own_implementation(module, wrapped)(module, query, key, value, mask, **kwargs)


def own_implementation(module: nn.Module, name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function that a layer runs under transformers' implementation `name`.

    Raises:
        RuntimeError: If there is none.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if name in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[name]
    # "eager" is not registered: each modeling file defines its function, except some files of subclasses.
    for cls in type(module).__mro__:
        if (function := getattr(sys.modules[cls.__module__], "eager_attention_forward", None)) is not None:
            return function
    raise RuntimeError(f"{type(module).__name__} has no attn_implementation {name!r}; load the model with 'sdpa'.")


def scales_by_row(module: nn.Module) -> bool:
    """Whether an attention layer scales its queries by their index in the row."""
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)


def rescale_by_column(
    module: nn.Module, query: Tensor, layout: SharedPrefixLayout, columns_T: Tensor | None = None
) -> Tensor:
    """Replace each query's factor for its index in the packed row with the one for its column.

    Llama 4's layers without rotary embedding scale queries by the column in the row, padding included: by
    1 + attn_scale * log(1 + floor((column + 1) / floor_scale)) (arXiv:2501.19399, as transformers computes it from the
    token's index in the row). In a packed row the index is not the token's column in a separate row.

    Args:
        module: The attention layer.
        query: Queries scaled by index, shape [1, H, S, D]; the result has the same shape.
        layout: Layout of the packed row.
        columns_T: Columns of the tokens in the caller's rows; by default each sequence begins in column 0.
    """

    def factor(columns: Tensor) -> Tensor:
        steps = torch.floor((columns.float() + 1) / module.floor_scale)  # type: ignore[operator]
        return 1 + module.attn_scale * torch.log1p(steps)  # type: ignore[operator]

    columns = layout.positions_on(query.device)[layout.num_prefilled :] if columns_T is None else columns_T
    ratio_T = factor(columns) / factor(torch.arange(len(columns), device=query.device))
    return query * ratio_T[:, None].to(query.dtype)


# Shared-prefix attention as one operator, so a compiled decoder layer stays one graph for all layouts. torch.compile
# must not see the layout, or it would guard on it and recompile for each new one. So the operator takes tensors only,
# and reads the layout from the marker.

_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? sinks"
_OPTIONS = "Tensor marker, str backend, float scale, float? softcap, int? window"


_layout = lru_cache(maxsize=16)(SharedPrefixLayout)
"""One layout, with its cached plans, for all layers of a call."""


def _read_marker(
    marker: Tensor, name: str, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, options: Sequence[Any]
) -> tuple[Backend, SharedPrefixLayout, AttentionRule]:
    mask = from_marker(marker)
    if mask is None:
        raise own_mask("a compiled layer")
    layout, (scale, softcap, window) = _layout(*forest_of_marker(marker)), options
    rule = LayerOptions(scale, softcap, sinks, window).rule(mask, layout).simplified(layout)
    return get_backend(name).resolve(query, key, value, layout, rule, compiled=True), layout, rule


@torch.library.custom_op(
    "pl_grouprl::packed_attention", mutates_args=(), schema=f"({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)"
)
def _packed_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, marker: Tensor, name: str, *options: Any
) -> tuple[Tensor, Tensor]:
    """The output [1, T, H, V] and, for backends with an explicit gradient, the log-sum-exp [H, T]."""
    backend, layout, rule = _read_marker(marker, name, query, key, value, sinks, options)
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
    grad: Tensor, out: Tensor, lse: Tensor, *inputs: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and sinks (empty if there are none)."""
    query, key, value, sinks, marker, name, *options = inputs
    backend, layout, rule = _read_marker(marker, name, query, key, value, sinks, options)
    if backend.explicit is not None:
        *grads, for_sinks = backend.explicit.backward(grad, out, lse, query, key, value, layout, rule)
        return grads[0], grads[1], grads[2], query.new_empty(0) if for_sinks is None else for_sinks
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    leaf = None if sinks is None else sinks.detach().requires_grad_()
    with torch.enable_grad():
        again = backend(leaves[0], leaves[1], leaves[2], layout, replace(rule, sinks_H=leaf))
    found = torch.autograd.grad(again, leaves if leaf is None else [*leaves, leaf], grad)
    return found[0], found[1], found[2], query.new_empty(0) if leaf is None else found[3]


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
