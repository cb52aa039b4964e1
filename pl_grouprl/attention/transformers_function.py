"""One attention function for transformers: ours if a packed row's layout arrives, otherwise the model's.

The layout arrives with the marker in place of the layer's mask (`mask`), not as a global, because activation
checkpointing must find it when it runs a layer again in the backward pass. Most layers also pass on the keyword
`prefix_layout`, which stateful layers and compiled graphs read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pl_grouprl.attention.backends.backend import Backend
from pl_grouprl.attention.backends.choice import ORACLE, get_backend
from pl_grouprl.attention.compiled import attend_compiled
from pl_grouprl.attention.dense_masks import DENSE, check_dense, only_selected
from pl_grouprl.attention.layer_options import OWN_MASK, LayerOptions, read_layer_options
from pl_grouprl.attention.layout_call import LayoutCall
from pl_grouprl.attention.mask import has_shape_of_marker, is_marker, marked_layer, mask_function
from pl_grouprl.attention.row_scale import rescale_by_column, scales_by_row


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
