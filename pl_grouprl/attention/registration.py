"""One attention function for transformers: ours where a layout arrives, the model's own where none does.

The layout travels as a keyword argument of the decoder (`prefix_layout`), never by a global: activation checkpointing
runs a layer again in the backward pass and must find it there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pl_grouprl.attention.backend import Backend
from pl_grouprl.attention.choice import get_backend
from pl_grouprl.packing import SharedPrefixLayout

_REFUSED_ARGUMENTS = ("sliding_window", "softcap", "s_aux", "sinks", "position_bias", "head_mask", "alibi")


@dataclass
class LayoutCall:
    """A layout on its way through one forward of a decoder.

    Attributes:
        layout: The forest of the packed row.
        reached: Identities of the attention modules that received it.
    """

    layout: SharedPrefixLayout
    reached: set[int] = field(default_factory=set)


def register(backend_name: str, wrapped: str) -> str:
    """Register our attention function over the implementation `wrapped`, with its mask function.

    Returns:
        The name to set as a config's attention implementation.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    name = f"shared_prefix_{backend_name}_over_{wrapped}"
    AttentionInterface.register(name, _attention_function(get_backend(backend_name), wrapped))
    if wrapped in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[wrapped])
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
            return _own_implementation(module, wrapped)(module, query, key, value, attention_mask, **kwargs)
        return _attend_packed(backend, module, query, key, value, prefix_layout, attention_mask, **kwargs), None

    return attention


@torch.compiler.disable(reason="shared-prefix attention runs kernels outside the graph; the layers around it compile")
def _attend_packed(
    backend: Backend,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: LayoutCall,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> Tensor:
    if not isinstance(call, LayoutCall):
        raise RuntimeError(
            "prefix_layout reached the attention of a decoder that is not patched; run the model inside "
            "`with shared_prefix(model):`."
        )
    _refuse_what_is_not_applied(module, attention_mask, dropout, kwargs)
    call.reached.add(id(module))
    query, key, value = _same_dtype(query, key, value)
    return backend(query, key, value, call.layout, query.shape[-1] ** -0.5 if scaling is None else scaling)


def _refuse_what_is_not_applied(
    module: nn.Module, attention_mask: Tensor | None, dropout: float, kwargs: dict[str, Any]
) -> None:
    if attention_mask is not None and attention_mask.shape[-1] > 1:  # the packed row's own has one column
        raise NotImplementedError(
            f"{type(module).__name__} adds a mask or bias of its own to the scores, which shared-prefix attention does "
            "not apply; train this model with sharing='repeated'."
        )
    if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
        raise NotImplementedError(
            f"{type(module).__name__} is not causal, so what a prefix becomes depends on what follows it; "
            "train this model with sharing='repeated'."
        )
    present = [name for name in _REFUSED_ARGUMENTS if kwargs.get(name) is not None]
    if present:
        raise NotImplementedError(
            f"{type(module).__name__} passes {', '.join(present)}, which shared-prefix attention does not apply; "
            "train this model with sharing='repeated'."
        )
    if dropout:
        raise ValueError(
            f"{type(module).__name__} has attention dropout {dropout}, which cannot be the same for a shared and a "
            "repeated prefix; set the config's attention dropout to 0 or call model.eval()."
        )


def _same_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What autocast does for PyTorch's own attention; without autocast, the dtype of the query."""
    device_type = tensors[0].device.type
    autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if autocast else tensors[0].dtype
    return tuple(tensor.to(dtype) for tensor in tensors)


def _own_implementation(module: nn.Module, wrapped: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if wrapped in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[wrapped]
    # "eager" is not registered: each modelling file has its own function of this name.
    return sys.modules[type(module).__module__].eager_attention_forward
