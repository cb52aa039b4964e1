"""LoRA layers inside vLLM's workers: unwrapped while the base is loaded, and checksums of their adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear

from pl_grouprl.sync.checksum import checksum
from pl_grouprl.sync.compare import LoadedWeight


@contextmanager
def without_lora(model: nn.Module) -> Iterator[None]:
    """Context in which layers that vLLM wrapped for LoRA are unwrapped, with their checkpoint names.

    Args:
        model: A model with or without LoRA layers.
    """
    wrapped = [
        (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], module)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, BaseLayerWithLoRA)
    ]
    for parent, name, layer in wrapped:
        setattr(parent, name, layer.base_layer)
    try:
        yield
    finally:
        for parent, name, layer in wrapped:
            setattr(parent, name, layer)


def adapter_checksums(model: Any, number: int, names: Sequence[str]) -> Iterator[LoadedWeight]:
    """Checksums of the adapter loaded in the LoRA layers.

    Args:
        model: The model of one worker.
        number: Number of the adapter.
        names: Names of the adapter's weights, as saved by PEFT.

    Yields:
        A and B, multiplied by alpha / r, of each layer's parts in the adapter, and of unexpected nonzero parts; none
        if that adapter is not loaded.

    Raises:
        ValueError: If vLLM splits a layer differently from the adapter.
    """
    manager = model.lora_manager
    if number not in manager.lora_index_to_id:
        return
    slot = manager.lora_index_to_id.index(number)
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    mapper = None if mapper is None else mapper.get_rename_mapper()
    sent = {parse_fine_tuned_lora_name(name, mapper): name for name in names}
    for module, layer in manager.modules.items():
        layers = manager.packed_modules.get(module, [module])
        if len(layers) != layer.n_slices:
            raise ValueError(
                f"vLLM keeps the adapter of {module} in {layer.n_slices} parts, but the policy in {len(layers)}, so "
                "they cannot be compared; pass adapter='merged' to the rollout engine."
            )
        for place, name_of_layer in enumerate(layers):
            for is_a, stacks in ((True, layer.lora_a_stacked), (False, layer.lora_b_stacked)):
                held, name = stacks[place][slot, 0], sent.get((name_of_layer, is_a))
                if name is not None or held.any():
                    label = f"{name_of_layer}.lora_{'A' if is_a else 'B'}"
                    yield _loaded(layer.base_layer, label, [name] if name else [], held, is_a, place > 0)


def _loaded(base: Any, label: str, parts: list[str], held: Tensor, is_a: bool, is_further: bool) -> LoadedWeight:
    """This worker's part of one weight: all of it, or some of B's rows or A's columns."""
    shared = getattr(base, "tp_size", 1) > 1
    first = 0
    if is_a:
        shared = shared and isinstance(base, RowParallelLinear)
        first = base.tp_rank * base.input_size_per_partition if shared else 0
    else:
        shared = shared and isinstance(base, ColumnParallelLinear)
        if isinstance(base, QKVParallelLinear) and base.tp_rank % base.num_kv_head_replicas:
            # An earlier worker counts these keys and values.
            held = torch.zeros_like(held) if is_further else held[: base.num_heads * base.head_size]
    return LoadedWeight(label, parts, checksum(held, first), "sum" if shared else "copy")
