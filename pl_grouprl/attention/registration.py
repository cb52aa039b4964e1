"""One attention function for transformers: ours where a layout arrives, the model's own where none does.

The layout travels as a keyword argument of the decoder (`prefix_layout`), never by a global: activation checkpointing
runs a layer again in the backward pass and must find it there.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pl_grouprl.attention.backend import Backend
from pl_grouprl.attention.choice import choose, get_backend
from pl_grouprl.attention.mask import MaskRule, from_marker, mask_function
from pl_grouprl.attention.rule import AttentionRule
from pl_grouprl.packing import SharedPrefixLayout

_WITHOUT_EFFECT = {
    *("position_ids", "cache_position", "position_embeddings", "output_attentions", "output_hidden_states"),
    *("use_cache", "past_key_values", "return_dict", "is_causal", "output_router_logits", "logits_to_keep"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "deterministic", "num_items_in_batch"),
}
"""Keywords that reach attention functions without changing what is computed over a whole row."""


@dataclass
class LayoutCall:
    """A layout on its way through one forward of a decoder.

    Attributes:
        layout: The forest of the packed row.
        reached: Identities of the modules that mixed tokens by it: attention, and layers with a state.
        ran: Of each of those that are attention the kind of layer and the backend.
        only: The kind of layer that the chosen backend runs, all others run the `reference`; None runs it everywhere.
    """

    layout: SharedPrefixLayout
    reached: set[int] = field(default_factory=set)
    ran: dict[int, tuple[str, str]] = field(default_factory=dict)
    only: str | None = None
    _rules: dict[tuple[int, ...], tuple[Tensor, MaskRule | None]] = field(default_factory=dict, repr=False)

    def mask_rule(self, mask: Any) -> MaskRule | None:
        """What a layer's mask says; None if it is not ours. Read once for all layers that have the same tensor."""
        if not isinstance(mask, Tensor):
            return None
        key = (mask.data_ptr(), *mask.shape)
        if key not in self._rules:
            self._rules[key] = (mask, from_marker(mask))  # kept, so that the address stays taken
        return self._rules[key][1]

    def kinds(self) -> dict[str, tuple[str, int]]:
        """What ran each kind of layer, and how many of them there are."""
        labels = [self.ran.get(module, ("with a state", "segment by segment")) for module in self.reached]
        counts = Counter(labels)
        return {kind: (backend, counts[kind, backend]) for kind, backend in sorted(counts)}


def register(backend_name: str, wrapped: str) -> str:
    """Register our attention function over the implementation `wrapped`, with a mask function of ours.

    Returns:
        The name to set as a config's attention implementation.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    name = f"shared_prefix_{backend_name}_over_{wrapped}"
    AttentionInterface.register(name, _attention_function(get_backend(backend_name), wrapped))
    AttentionMaskInterface.register(name, mask_function(dict(ALL_MASK_ATTENTION_FUNCTIONS).get(wrapped)))
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
                    f"{type(module).__name__} was not given prefix_layout: the layers around it do not hand it on; "
                    "train this model with sharing='repeated'."
                )
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
    **kwargs: Any,
) -> Tensor:
    if not isinstance(call, LayoutCall):
        raise RuntimeError(
            "prefix_layout reached the attention of a decoder that is not patched; run the model inside "
            "`with shared_prefix(model):`."
        )
    rule = _rule_of_layer(module, query, call, attention_mask, kwargs)
    kind, rule = rule.kind, rule.narrowed(call.layout)
    call.reached.add(id(module))
    query, key, value = _same_dtype(query, key, value)
    if call.only not in (None, kind):
        backend = get_backend("reference")
    elif backend.name == "auto":
        backend = choose(query, key, value, rule)
    call.ran[id(module)] = (kind, backend.name)
    return backend(query, key, value, call.layout, rule)


def _rule_of_layer(
    module: nn.Module, query: Tensor, call: LayoutCall, attention_mask: Tensor | None, kwargs: dict[str, Any]
) -> AttentionRule:
    """Turn what a layer hands to its attention function into a rule; what is not understood is refused."""
    name, kwargs = type(module).__name__, {key: value for key, value in kwargs.items() if value is not None}
    mask = call.mask_rule(attention_mask)
    if mask is None:
        raise NotImplementedError(
            f"{name} has a mask or bias of its own, which shared-prefix attention does not apply; train this model "
            "with sharing='repeated'."
        )
    if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
        raise NotImplementedError(
            f"{name} is not causal, so what a prefix becomes depends on what follows it; train this model with "
            "sharing='repeated'."
        )
    dropout = kwargs.pop("dropout", 0.0)
    if dropout:
        raise ValueError(
            f"{name} has attention dropout {dropout}, which cannot be the same for a shared and a repeated prefix; "
            "set the config's attention dropout to 0 or call model.eval()."
        )
    rule = AttentionRule(
        scale=kwargs.pop("scaling", query.shape[-1] ** -0.5),
        window=mask.window,
        chunk=mask.chunk,
        softcap=kwargs.pop("softcap", None),
        sinks_H=kwargs.pop("s_aux", None),
        blocks=mask.blocks,
        window_bounds_blocks=mask.window_bounds_blocks,
    )
    window = kwargs.pop("sliding_window", None)
    if window is not None and window != mask.window and max(call.layout.repeated_lengths) > window:
        raise NotImplementedError(
            f"{name} passes sliding_window={window} with a mask whose window is {mask.window}, so that its attention "
            "implementations differ among themselves; train this model with sharing='repeated'."
        )
    unknown = sorted(key for key in kwargs if key not in _WITHOUT_EFFECT)
    if unknown:
        raise NotImplementedError(
            f"{name} passes {', '.join(unknown)}, which shared-prefix attention does not apply; train this model "
            "with sharing='repeated'."
        )
    return rule


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
