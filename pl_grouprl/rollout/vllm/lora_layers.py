"""LoRA layers inside vLLM's workers: taken off while the base is loaded, and what they hold of an adapter."""

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
    """Put the layers that vLLM has wrapped for LoRA back in their places, with the names that checkpoints know.

    Args:
        model: With or without LoRA layers.
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
    """Checksums of the adapter that the LoRA layers compute with.

    Args:
        model: On one worker.
        number: Of the adapter.
        names: Of the adapter's weights, as PEFT saves them.

    Yields:
        A and B, multiplied by alpha / r, of each layer's parts that the adapter has, and of those that hold anything
        besides; none if that adapter is not in the layers.

    Raises:
        ValueError: If vLLM keeps a layer in other parts than the adapter.
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
        for place, own in enumerate(layers):
            for is_a, stacks in ((True, layer.lora_a_stacked), (False, layer.lora_b_stacked)):
                held, name = stacks[place][slot, 0], sent.get((own, is_a))
                if name is not None or held.any():
                    label = f"{own}.lora_{'A' if is_a else 'B'}"
                    yield _loaded(layer.base_layer, label, [name] if name else [], held, is_a, place > 0)


def _loaded(base: Any, label: str, parts: list[str], held: Tensor, is_a: bool, is_further: bool) -> LoadedWeight:
    """What this worker counts of one weight: it may have some of the rows of B, or of the columns of A."""
    shared = getattr(base, "tp_size", 1) > 1
    first = 0
    if is_a:
        shared = shared and isinstance(base, RowParallelLinear)
        first = base.tp_rank * base.input_size_per_partition if shared else 0
    else:
        shared = shared and isinstance(base, ColumnParallelLinear)
        if isinstance(base, QKVParallelLinear) and base.tp_rank % base.num_kv_head_replicas:
            # An earlier worker has counted these keys and values.
            held = torch.zeros_like(held) if is_further else held[: base.num_heads * base.head_size]
    return LoadedWeight(label, parts, checksum(held, first), "sum" if shared else "copy")
