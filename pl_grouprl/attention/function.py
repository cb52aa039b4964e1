"""One attention function for transformers: ours if a packed row's layout arrives, otherwise the model's own."""

from __future__ import annotations

import sys
from collections.abc import Callable
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
    OWN_MASK,
    LayerOptions,
    check_dense,
    forest_of_marker,
    from_marker,
    has_shape_of_marker,
    is_marker,
    marked_layer,
    mask_function,
    only_selected,
    read_layer_options,
)
from pl_grouprl.packing import SharedPrefixLayout

# Corrects Llama 4's query scale: layers without rotary embedding scale by the column in the row, padding included.
#
# The factor is 1 + attn_scale * log(1 + floor((column + 1) / floor_scale)) (arXiv:2501.19399, as transformers
# computes it
# from the token's index in the row). In a packed row the index is not the column that the token would have in a
# separate
# row, so the factor is replaced.


def scales_by_row(module: nn.Module) -> bool:
    """Whether an attention layer scales its queries by their index in the row."""
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)


def rescale_by_column(
    module: nn.Module, query: Tensor, layout: SharedPrefixLayout, columns_T: Tensor | None = None
) -> Tensor:
    """Replace each query's factor for its index in the packed row with the one for its column.

    Args:
        module: The attention layer.
        query: Queries scaled by index, shape [1, H, S, D]; the result has the same shape.
        layout: Layout of the packed row.
        columns_T: Columns of the tokens in the caller's rows; by default each sequence begins in column 0.
    """
    columns = layout.positions_on(query.device)[layout.num_prefilled :] if columns_T is None else columns_T
    rows = torch.arange(len(columns), device=query.device)
    ratio_T = _factor(module, columns) / _factor(module, rows)
    return query * ratio_T[:, None].to(query.dtype)


def _factor(module: nn.Module, columns: Tensor) -> Tensor:
    steps = torch.floor((columns.float() + 1) / module.floor_scale)  # type: ignore[operator]
    return 1 + module.attn_scale * torch.log1p(steps)  # type: ignore[operator]


# Shared-prefix attention as one operator, so a compiled decoder layer stays one graph for all layouts.
#
# torch.compile must not see the layout, or it would guard on it and recompile for each new one. So the operator takes
# tensors only, and reads the layout from the marker, a tensor passed in place of the mask.
#
# Legend: T packed tokens, H query heads, K key/value heads, D head size of keys, V head size of values.

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


# One attention function for transformers: ours if a packed row's layout arrives, otherwise the model's.
#
# The layout arrives with the marker in place of the layer's mask (`mask`), not as a global, because activation
# checkpointing must find it when it runs a layer again in the backward pass. Most layers also pass on the keyword
# `prefix_layout`, which stateful layers and compiled graphs read.


def register(backend_name: str, wrapped: str) -> str:
    """Register our attention and mask functions on top of the implementation `wrapped`.

    Returns:
        The name to set as a config's attention implementation.
    """
    attention = _attention_function(get_backend(backend_name), wrapped)
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


def _attention_function(backend: Backend, wrapped: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        prefix_layout: LayoutCall | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        call = _of_patched_decoder(prefix_layout)
        compiling = torch.compiler.is_compiling()
        if call is not None and call.dense:
            check_dense(module, query, key, attention_mask, call, kwargs)
            if not compiling:
                call.note(module, DENSE, wrapped)
            return attend_by_mask(module, wrapped, query, key, value, attention_mask, **kwargs)
        if call is None and not (has_shape_of_marker if compiling else is_marker)(attention_mask):
            return attend_by_mask(module, wrapped, query, key, value, attention_mask, **kwargs)
        options = read_layer_options(module, query, kwargs)
        query, key, value = _same_dtype(query, key, value)
        if not compiling:
            return _attend_packed(backend, module, query, key, value, attention_mask, options), None
        if call is None or call.states is not None:
            return _attend_uncompiled(backend, module, query, key, value, attention_mask, options), None
        _check_compiled(backend, module, call)
        return attend_compiled(query, key, value, _checked(attention_mask), backend.name, *options), None

    return attention


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
        mask: The layer's mask.
        indices: Tokens that each query selected, shape [B, S, N].
        kwargs: Further keywords of the layer.
    """
    if indices is not None and mask is not None and wrapped in ("eager", "sdpa"):
        mask = only_selected(indices, mask)
    elif indices is not None:
        kwargs["indices"] = indices
    return own_implementation(module, wrapped)(module, query, key, value, mask, **kwargs)


def _of_patched_decoder(prefix_layout: Any) -> LayoutCall | None:
    if prefix_layout is None or isinstance(prefix_layout, LayoutCall):
        return prefix_layout
    raise RuntimeError(
        "prefix_layout reached the attention of a decoder that is not patched; run the model inside "
        "`with shared_prefix(model):`."
    )


def _check_compiled(backend: Backend, module: nn.Module, call: LayoutCall) -> None:
    """Refuse what cannot run inside a graph."""
    if call.shards is not None:
        raise NotImplementedError("compiled layers do not run with sequence_parallel_size; leave out compile_layers.")
    if scales_by_row(module):
        raise NotImplementedError(
            f"{type(module).__name__} scales queries by their index in the row, which can only be corrected "
            "outside graphs; do not compile this model's layers."
        )
    if not backend.in_compiled_layers:
        raise NotImplementedError(
            f"attention backend {backend.name!r} does not run inside compiled layers; use backend 'cascade', "
            "or leave the layers uncompiled."
        )


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
        raise NotImplementedError(f"{type(module).__name__} {OWN_MASK}")
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


def _checked(attention_mask: Tensor | None) -> Tensor:
    if attention_mask is None:
        raise NotImplementedError(f"a compiled layer {OWN_MASK}")
    return attention_mask


def _same_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast does for PyTorch's attention; without autocast, to the dtype of the query."""
    device_type = tensors[0].device.type
    autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if autocast else tensors[0].dtype
    return tuple(tensor.to(dtype) for tensor in tensors)


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
    raise RuntimeError(
        f"{type(module).__name__} runs under attn_implementation={name!r}, which is neither registered with "
        "transformers nor a function eager_attention_forward in the files of its classes; load the model with "
        "attn_implementation='sdpa'."
    )
