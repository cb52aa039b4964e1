"""One attention function for transformers: ours if a layout arrives, otherwise the model's.

The layout travels as a keyword argument of the decoder (`prefix_layout`), not a global, because activation
checkpointing must find it when it runs a layer again in the backward pass.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pl_grouprl.attention.backends.backend import Backend
from pl_grouprl.attention.backends.choice import ORACLE, get_backend
from pl_grouprl.attention.compiled import attend_compiled
from pl_grouprl.attention.layer_options import OWN_MASK, LayerOptions, read_layer_options
from pl_grouprl.attention.mask import MaskRule, from_marker, mask_function
from pl_grouprl.attention.prefix_states import PrefixStates
from pl_grouprl.attention.row_scale import rescale_by_column, scales_by_row
from pl_grouprl.attention.row_shards import RowShards
from pl_grouprl.packing import SharedPrefixLayout


@dataclass
class LayoutCall:
    """A layout, passed through one forward of a decoder.

    Attributes:
        layout: The forest of the packed row.
        reached: Identities of the modules that followed it: attention, and stateful layers.
        ran: For each of those, the kind of layer and what ran it.
        only: Kind of the layers that run the chosen backend, while others run the reference; None for all layers.
        shards: How the row is split over ranks; None if this rank has all of it.
        states: States of the given tokens; if no tokens are given, records those of the row's tokens.
        columns_T: Columns of the tokens in the caller's rows, for layers that count them; None uses positions.
    """

    layout: SharedPrefixLayout
    reached: set[int] = field(default_factory=set)
    ran: dict[int, tuple[str, str]] = field(default_factory=dict)
    only: str | None = None
    shards: RowShards | None = None
    states: PrefixStates | None = None
    columns_T: Tensor | None = None
    _rules: dict[tuple[int, ...], tuple[Tensor, MaskRule | None]] = field(default_factory=dict, repr=False)

    def mask_rule(self, mask: Any) -> MaskRule | None:
        """Decode a layer's mask, once per tensor; None if it is not ours."""
        if not isinstance(mask, Tensor):
            return None
        key = (mask.data_ptr(), *mask.shape)
        if key not in self._rules:
            self._rules[key] = (mask, from_marker(mask))  # kept alive, so no other tensor gets its address
        return self._rules[key][1]

    def kinds(self) -> dict[str, tuple[str, int]]:
        """For each kind of layer, what ran it and the number of layers."""
        counts = Counter(self.ran.values())
        return {kind: (backend, counts[kind, backend]) for kind, backend in sorted(counts)}


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
    return name


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
        if prefix_layout is None:
            if from_marker(attention_mask) is not None:
                raise NotImplementedError(
                    f"{type(module).__name__} was not given prefix_layout: the layers around it do not pass it on; "
                    "train this model with sharing='repeated'."
                )
            return own_implementation(module, wrapped)(module, query, key, value, attention_mask, **kwargs)
        if not isinstance(prefix_layout, LayoutCall):
            raise RuntimeError(
                "prefix_layout reached the attention of a decoder that is not patched; run the model inside "
                "`with shared_prefix(model):`."
            )
        options = read_layer_options(module, query, kwargs)
        query, key, value = _same_dtype(query, key, value)
        if torch.compiler.is_compiling():
            if prefix_layout.shards is not None:
                raise NotImplementedError(
                    "compiled layers do not run with sequence_parallel_size; leave out compile_layers."
                )
            if prefix_layout.states is not None:
                return _attend_uncompiled(
                    backend, module, query, key, value, prefix_layout, attention_mask, options
                ), None
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
            return attend_compiled(query, key, value, _checked(attention_mask), backend.name, *options), None
        return _attend_packed(backend, module, query, key, value, prefix_layout, attention_mask, options), None

    return attention


def _attend_packed(
    backend: Backend,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: LayoutCall,
    attention_mask: Tensor | None,
    options: LayerOptions,
) -> Tensor:
    mask = call.mask_rule(attention_mask)
    if mask is None:
        raise NotImplementedError(f"{type(module).__name__} {OWN_MASK}")
    if call.shards is not None:
        query, key, value = call.shards.to_heads(query, key, value)
        options = options._replace(sinks_H=call.shards.own_heads(options.sinks_H))
    saving: AbstractContextManager[Any] = nullcontext()
    if call.states is not None:  # for this rank's heads
        joined = call.states.join(module, call.layout, key, value)
        key, value, saving = joined.key, joined.value, joined.saved_by_parts()
    rule = options.rule(mask, call.layout)
    kind, rule = rule.kind, rule.narrowed(call.layout)
    call.reached.add(id(module))
    if scales_by_row(module):
        query = rescale_by_column(module, query, call.layout, call.columns_T)
    backend = ORACLE if call.only not in (None, kind) else backend.resolve(query, key, value, call.layout, rule)
    call.ran[id(module)] = (kind, backend.name)
    with saving:
        attended = backend(query, key, value, call.layout, rule)
    return attended if call.shards is None else call.shards.to_tokens(attended)


_attend_uncompiled = torch.compiler.disable(_attend_packed, reason="records a prompt's states by module, in Python")


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
