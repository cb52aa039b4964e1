"""Counts what a decoder's layers keep for their backward pass, without weights or a GPU.

The decoder runs on fake tensors, which have shapes and dtypes but no storage, and autograd reports what it saves. Fused
kernels stand in for attention and for the experts of a mixture. They keep inputs, output and log-sum-exp, as kernels on
a GPU do; plain attention on a CPU would keep a score for each pair of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from pl_grouprl.attention import find_decoder
from pl_grouprl.attention.idle_layers import layers_of
from pl_grouprl.utilities import internals

_LENGTHS = (64, 128)
"""The difference between two rows cancels what does not depend on the tokens: copies of weights, mostly."""


@dataclass(frozen=True)
class KeptBytes:
    """Bytes per token that a decoder keeps.

    Attributes:
        total: The whole decoder, without checkpointing.
        largest: The layer that keeps most.
        inputs: The inputs of all layers, which checkpointing keeps.
    """

    total: int
    largest: int
    inputs: int


def count_kept(model: Any, *, autocast: bool) -> KeptBytes:
    """Count what a model's decoder keeps for each token of a row, without its head.

    Args:
        model: A transformers model on the meta device, with or without a head. Its weights are replaced by fake ones;
            discard it afterwards.
        autocast: Whether it runs under bfloat16 autocast.

    Raises:
        TypeError: If the decoder does something that depends on values, which fake tensors do not have.
    """
    decoder = find_decoder(model).train()
    internals.set_attention_implementation(decoder.config, _register())
    try:
        with FakeTensorMode(), _FusedExperts():
            _make_fake(decoder)
            short, long = (_saved(decoder, length, autocast) for length in _LENGTHS)
    except Exception as error:  # whatever an operator raises for fake tensors
        raise TypeError(f"plan cannot count the activations of a {type(decoder).__name__}: {error}") from error
    extra = _LENGTHS[1] - _LENGTHS[0]
    kept = [(after - before) // extra for before, after in zip(short[0], long[0], strict=True)]
    inputs = (sum(long[1]) - sum(short[1])) // extra
    return KeptBytes(sum(kept), max(kept[:-1]), inputs)


def _make_fake(decoder: nn.Module) -> None:
    """Replace weights and buffers by fake ones on the CPU; called inside the mode, which makes them so."""
    for module in decoder.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                fake = torch.empty(weight.shape, dtype=weight.dtype)
                module._parameters[name] = nn.Parameter(fake, requires_grad=weight.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _saved(decoder: Any, length: int, autocast: bool) -> tuple[list[int], list[int]]:
    """Bytes that each layer saves, and then the rest of the decoder; and bytes of each layer's input."""
    layers = layers_of(decoder)
    weights = {tensor.untyped_storage()._cdata for tensor in (*decoder.parameters(), *decoder.buffers())}
    saved, inputs = [0] * (len(layers) + 1), [0] * len(layers)
    seen: dict[int, Any] = {}  # keeps storages alive, so that their addresses are not used again
    in_tuple: dict[int, bool] = {}
    running = len(layers)

    def run(index: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal running
        running, inputs[index] = index, (args[0] if args else kwargs["hidden_states"]).nbytes
        output = forward(*args, **kwargs)
        running, in_tuple[index] = len(layers), isinstance(output, tuple)
        return output

    def pass_on(same: int, *args: Any, **kwargs: Any) -> Any:
        states = args[0] if args else kwargs["hidden_states"]
        return (states,) if in_tuple[same] else states

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights and storage._cdata not in seen:
            seen[storage._cdata] = storage
            saved[running] += storage.nbytes()
        return tensor

    alike = _alike(decoder, layers)
    for index, layer in enumerate(layers):
        is_run = alike[index] == index
        layer.forward = partial(run, index, layer.forward) if is_run else partial(pass_on, alike[index])
    ids = torch.zeros(1, length, dtype=torch.long)
    try:
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            decoder(input_ids=ids, use_cache=False)
    finally:
        for layer in layers:
            del layer.forward
    return [*(saved[index] for index in alike), saved[-1]], [inputs[index] for index in alike]


def _alike(decoder: Any, layers: Sequence[nn.Module]) -> list[int]:
    """For each layer, the layer that is run for it: the second of its kind, as the first makes what all share."""
    kinds = getattr(decoder.config, "layer_types", None) or [None] * len(layers)
    found: dict[Any, list[int]] = {}
    for index, layer in enumerate(layers):
        found.setdefault((repr(layer), kinds[index]), []).append(index)
    alike = list(range(len(layers)))
    for same in found.values():
        for index in same[2:]:
            alike[index] = same[1]
    return alike


class _FusedAttention(torch.autograd.Function):
    """What fused attention keeps: queries, keys and values as the layer passes them, output and log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]
        batch, heads, length, _ = query.shape
        out = query.new_empty(batch, length, heads, value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(batch, heads, length, dtype=torch.float32))
        return out


class _GroupedProduct(torch.autograd.Function):
    """What a grouped product keeps: each input whose partner needs a gradient."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        for_tokens, for_weight = ctx.needs_input_grad
        ctx.save_for_backward(tokens if for_weight else None, weight if for_tokens else None)
        return tokens.new_empty(tokens.shape[0], weight.shape[-1])


class _FusedExperts(TorchFunctionMode):
    """Replaces grouped products, which PyTorch traces for some dtypes only."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in ("grouped_mm", "_grouped_mm"):
            return _GroupedProduct.apply(*args[:2])
        return function(*args, **(kwargs or {}))


def _register() -> str:
    """Register the fused attention with transformers; returns its name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            query, key, value = (states.to(torch.get_autocast_dtype("cpu")) for states in (query, key, value))
        return _FusedAttention.apply(query, key, value), None

    name = "pl_grouprl_counted"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)
    return name
