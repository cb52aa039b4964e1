"""Checksums of the weights loaded in vLLM's layers, and the checkpoint weights that each consists of.

A layer may hold several weights in one tensor, a shard of them, or, on CPUs, only a packed copy (see `cpu`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from pl_grouprl.rollout.vllm.cpu import is_packed, packed_columns
from pl_grouprl.sync.checksum import add, checksum
from pl_grouprl.sync.compare import LoadedWeight

_EXPERT = re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$")


def loaded_checksums(
    model: nn.Module, names: Sequence[str], dtype: torch.dtype, *, tied: bool
) -> Iterator[LoadedWeight]:
    """Compute checksums of all weights of a vLLM model.

    Args:
        model: The model of one worker.
        names: Names of the checkpoint's weights.
        dtype: Dtype in which they were sent; the model may keep some in a wider one.
        tied: Whether its heads use the weights of its embeddings.

    Yields:
        For each weight, the model's name, the checkpoint names in it, the checksum, and how workers share it.
    """
    weights = {
        f"{prefix}.{name}".lstrip("."): (m, p) for prefix, m in model.named_modules() for name, p in _direct_weights(m)
    }
    parts = _parts(model, names, weights.keys())
    for name, (module, weight) in weights.items():
        if tied and isinstance(module, ParallelLMHead) and not parts[name]:
            embedding = next(other for other, (m, _) in weights.items() if type(m) is VocabParallelEmbedding)
            parts[name] = parts[embedding]
        if not parts[name] and not isinstance(weight, nn.Parameter):
            continue  # not from the checkpoint
        value = _LayerWeight(module, name.rpartition(".")[2], weight, dtype)
        yield LoadedWeight(name, parts[name], value.checksum(), "sum" if value.is_shard else "copy")


def _direct_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set and buffer.is_floating_point():
            yield name, buffer


def _parts(model: Any, names: Sequence[str], targets: Any) -> dict[str, list[str]]:
    """Names of the checkpoint weights in each target."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    packed = {part: whole for whole, parts in getattr(model, "packed_modules_mapping", {}).items() for part in parts}
    parts: dict[str, list[str]] = {target: [] for target in targets}
    for name in names:
        mapped = name if mapper is None else mapper.map_name(name)
        if mapped is None:
            continue
        for candidate in _candidates(mapped, packed):
            if candidate in parts:
                parts[candidate].append(name)
                break
    return parts


def _candidates(name: str, packed: dict[str, str]) -> Iterator[str]:
    """Possible names of a weight in a vLLM model."""
    yield name
    path = name.split(".")
    for place, piece in enumerate(path):
        if piece in packed:
            yield ".".join([*path[:place], packed[piece], *path[place + 1 :]])
    if (match := _EXPERT.search(name)) is not None:
        fused = "w2_weight" if match[1] in ("down_proj", "w2") else "w13_weight"
        for inner in (".experts.", ".experts.routed_experts."):
            yield name[: match.start()] + inner + fused


class _LayerWeight:
    """A weight of a layer, as the layer applies it on this worker."""

    def __init__(self, module: Any, name: str, weight: Tensor, dtype: torch.dtype) -> None:
        self.module, self.name, self.weight, self.dtype = module, name, weight, dtype

    @property
    def is_shard(self) -> bool:
        """Whether this worker has a shard of the weight; otherwise all workers have the same."""
        if getattr(self.module, "tp_size", 1) == 1:
            return False
        if isinstance(self.module, RowParallelLinear):
            return self.name != "bias"
        if isinstance(self.module, ColumnParallelLinear | VocabParallelEmbedding):
            return True
        return self.name in ("w13_weight", "w2_weight")

    @property
    def first_column(self) -> int:
        """Index of this worker's first column."""
        if not self.is_shard:
            return 0
        if isinstance(self.module, RowParallelLinear):
            return self.module.tp_rank * self.module.input_size_per_partition
        return self.module.tp_rank * self.weight.shape[-1] if self.name == "w2_weight" else 0

    def checksum(self) -> int:
        """Checksum of this worker's part of the weight, without what other workers count."""
        return add(*(checksum(part, self.first_column + first) for first, part in self._columns()))

    def _columns(self) -> Iterator[tuple[int, Tensor]]:
        """The weight in one piece, or block by block of columns, each with the index of its first column."""
        if self.name != "weight" or not is_packed(self.module):
            yield 0, self._counted(self.weight.to(self.dtype))
            return
        for first, columns in packed_columns(self.module):
            yield first, self._counted(columns.to(self.dtype))

    def _counted(self, rows: Tensor) -> Tensor:
        """Leave out keys and values that an earlier worker also has."""
        module = self.module
        if not isinstance(module, QKVParallelLinear) or module.tp_rank % module.num_kv_head_replicas == 0:
            return rows
        return rows[: module.num_heads * module.head_size]
