"""Runs inside vLLM's workers: loads weights, and computes checksums of the loaded weights.

Only vLLM imports this, as its `worker_extension_cls`. Loading is vLLM's layerwise reload, in the phases of its
weight-transfer interface (`start_weight_update`, `update_weights`, `finish_weight_update`; vLLM 0.32), after which
`refresh_stale_weights` updates what a reload leaves stale.
"""

from __future__ import annotations

import base64
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

from pl_grouprl.distributed.checksum import LoadedWeight, add, checksum
from pl_grouprl.rollout.vllm.settings import ADAPTER_FOLDER, FOLDER_VARIABLE

BACKEND = "pl_grouprl"
"""Name of the transfer in vLLM's `WeightTransferConfig`."""

_INSTANCE = secrets.token_hex(8)
"""Id of this process."""

_EXPERT = re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$")

_UNIT_VECTORS = 256
"""Unit vectors per call of a layer."""


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """Empty: nothing has to be set up."""


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """One bucket of weights in checkpoint format.

    Attributes:
        weights: Name and value of each, in the trainer's process.
        path: A safetensors file with them, for a worker in another process.
        owner: Who sends it: the `owner` of `begin_update`.
    """

    weights: list[tuple[str, Tensor]] | None = None
    path: str | None = None
    owner: str | None = None


class BucketTransfer(WeightTransferEngine[NoInitInfo, BucketInfo]):
    """Loads buckets that are passed by reference or as files.

    Attributes:
        owner: Who may send them; None in the trainer's process.
    """

    init_info_cls = NoInitInfo
    update_info_cls = BucketInfo
    owner: str | None = None

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        """Prepare the layers for a reload.

        Raises:
            ValueError: If there are experts on a CPU: vLLM packs their weights once, so a reload would leave the packed
                ones stale.
        """
        if self.device.type == "cpu" and any(hasattr(layer, "moe_config") for layer in self.model.modules()):
            raise ValueError(
                f"{type(self.model).__name__} is a mixture of experts, whose weights vLLM cannot renew on CPUs; sample "
                "with HFRolloutEngine, or on a GPU."
            )
        with without_lora(self.model):
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a bucket; a layer uses its weights once all have arrived."""
        self.receive_weights(self.parse_update_info(update_info))
        torch.accelerator.synchronize()

    def receive_weights(self, update_info: BucketInfo) -> None:
        """Load a bucket.

        Raises:
            RuntimeError: If another trainer has begun an update.
        """
        if update_info.owner != self.owner:
            raise RuntimeError("another trainer has begun an update of this sampler's weights")
        weights = update_info.weights
        if update_info.path is not None:
            weights = list(load_file(update_info.path, device=str(self.device)).items())
        assert weights is not None
        with without_lora(self.model):
            self.model.load_weights(iter(weights))

    def finish_weight_update(self) -> None:
        """Finish the reload, so the layers can run again."""
        with without_lora(self.model):
            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing to close."""


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, BucketTransfer)


class WeightReceiver:
    """Additional methods of vLLM's workers (`worker_extension_cls`), for `collective_rpc`."""

    # Attributes of the worker.
    rank: int
    device: torch.device
    model_runner: Any
    model_config: Any
    vllm_config: Any
    weight_transfer_engine: Any
    _weight_update_active: bool

    def describe(self) -> dict[str, Any]:
        """Information about this worker for trainers that use a server."""
        lora = self.vllm_config.lora_config
        return {
            "instance": _INSTANCE,
            "device": self.device.type,
            "model_type": self.model_config.hf_config.model_type,
            "vocab_size": self.model_config.get_vocab_size(),
            "max_model_len": self.model_config.max_model_len,
            "dtype": str(self.model_config.dtype).removeprefix("torch."),
            "logprobs_mode": self.model_config.logprobs_mode,
            "backend": self.vllm_config.weight_transfer_config.backend,
            "folder": os.environ.get(FOLDER_VARIABLE),
            "max_lora_rank": lora and lora.max_lora_rank,
        }

    def begin_update(self, owner: str) -> None:
        """Prepare for an update by a trainer; an unfinished one is abandoned, and its files are removed.

        Args:
            owner: The trainer. Buckets of others are rejected.
        """
        self.abandon_weights()
        self.weight_transfer_engine.owner = owner
        if folder := os.environ.get(FOLDER_VARIABLE):
            for left in Path(folder).glob("*.safetensors"):
                left.unlink(missing_ok=True)

    def refresh_stale_weights(self) -> None:
        """Update what a reload leaves stale: heads tied to embeddings, and caches of encoded images."""
        model = self.model_runner.get_model()
        with without_lora(model):
            modules = list(model.modules()) if self._tied else []
            embeddings = [module for module in modules if type(module) is VocabParallelEmbedding]
            for head in modules:
                if isinstance(head, ParallelLMHead):
                    embedding = next(each for each in embeddings if each.embedding_dim == head.embedding_dim)
                    head.weight = embedding.weight
                    # On CPUs the head computes with a packed copy of its weight.
                    head.quant_method.process_weights_after_loading(head)
        for name in ("reset_encoder_cache", "reset_mm_cache"):  # images encoded by the old weights
            getattr(self.model_runner, name, lambda: None)()

    def abandon_weights(self) -> None:
        """Abandon an unfinished update, so that another can begin. What was loaded stays."""
        for layer in self.model_runner.get_model().modules():
            info = get_layerwise_info(layer)
            if info.can_load():  # otherwise its weights would count for the next update
                _place_kernel_tensors(layer, info)
                info.reset()
        self._weight_update_active = False

    def weight_checksums(self, names: list[str]) -> list[LoadedWeight]:
        """Checksums of the weights loaded in this worker.

        Args:
            names: Names of all weights that were sent.
        """
        model = self.model_runner.get_model()
        with without_lora(model):
            return list(loaded_checksums(model, names, self.model_config.dtype, tied=self._tied))

    def receive_adapter(self, owner: str, file: str, contents: str, is_start: bool) -> None:
        """Write a part of a file of an adapter, from which vLLM then loads it.

        Args:
            owner: Who sends it: the `owner` of `begin_update`.
            file: Name of the file.
            contents: The part, base64.
            is_start: Whether it is the first part of its file.

        Raises:
            RuntimeError: If another trainer has begun an update.
        """
        if owner != self.weight_transfer_engine.owner:
            raise RuntimeError("another trainer has begun an update of this sampler's weights")
        if self.rank == 0:
            folder = Path(os.environ[FOLDER_VARIABLE], ADAPTER_FOLDER)
            folder.mkdir(exist_ok=True)
            with Path(folder, Path(file).name).open("wb" if is_start else "ab") as written:
                written.write(base64.b64decode(contents))

    def adapter_checksums(self, names: list[str], number: int | None = None) -> list[LoadedWeight]:
        """Checksums of the LoRA adapter loaded in this worker, by default the newest; see the function of that name."""
        if number is None:
            number = max(self.model_runner.lora_manager.list_adapters(), default=0)
        return list(adapter_checksums(self.model_runner.get_model(), number, names))

    @property
    def _tied(self) -> bool:
        return bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))


# Checksums of the weights loaded in vLLM's layers, and the checkpoint weights that each consists of.
#
# A layer may hold several weights in one tensor, a shard of them, or, on CPUs, only a packed copy.


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
    weights: dict[str, tuple[nn.Module, Tensor]] = {}
    for prefix, module in model.named_modules():
        found = list(module.named_parameters(recurse=False))
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and buffer.is_floating_point():
                found.append((name, buffer))  # type: ignore[arg-type]
        weights.update({f"{prefix}.{name}".lstrip("."): (module, weight) for name, weight in found})
    parts = _parts(model, names, weights.keys())
    for name, (module, weight) in weights.items():
        if tied and isinstance(module, ParallelLMHead) and not parts[name]:
            embedding = next(other for other, (m, _) in weights.items() if type(m) is VocabParallelEmbedding)
            parts[name] = parts[embedding]
        if not parts[name] and not isinstance(weight, nn.Parameter):
            continue  # not from the checkpoint
        value, is_shard = _part_of_worker(module, name.rpartition(".")[2], weight, dtype)
        yield LoadedWeight(name, parts[name], value, "sum" if is_shard else "copy")


def _parts(model: Any, names: Sequence[str], targets: Any) -> dict[str, list[str]]:
    """Names of the checkpoint weights in each target."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    packed = {part: whole for whole, parts in getattr(model, "packed_modules_mapping", {}).items() for part in parts}
    parts: dict[str, list[str]] = {target: [] for target in targets}
    for name in names:
        mapped = name if mapper is None else mapper.map_name(name)
        candidates = () if mapped is None else _candidates(mapped, packed)
        target = next((candidate for candidate in candidates if candidate in parts), None)
        if target is not None:
            parts[target].append(name)
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


def _part_of_worker(module: Any, name: str, weight: Tensor, dtype: torch.dtype) -> tuple[int, bool]:
    """Checksum of this worker's part of a layer's weight, as the layer applies it, and whether it is a shard.

    Otherwise, all workers have the same.
    """
    is_row_parallel = isinstance(module, RowParallelLinear)
    if getattr(module, "tp_size", 1) == 1:
        is_shard = False
    elif is_row_parallel:
        is_shard = name != "bias"
    else:
        is_column_parallel = isinstance(module, ColumnParallelLinear | VocabParallelEmbedding)
        is_shard = is_column_parallel or name in ("w13_weight", "w2_weight")
    first_column = 0
    if is_shard and is_row_parallel:
        first_column = module.tp_rank * module.input_size_per_partition
    elif is_shard and name == "w2_weight":
        first_column = module.tp_rank * weight.shape[-1]
    # On CPUs, layers compute with a packed copy of their weight; embeddings look up its rows instead.
    is_packed = name == "weight" and hasattr(module, "cpu_linear") and type(module) is not VocabParallelEmbedding
    total = 0
    for first, columns in _packed_columns(module) if is_packed else [(0, weight)]:
        rows = columns.to(dtype)
        if isinstance(module, QKVParallelLinear) and module.tp_rank % module.num_kv_head_replicas:
            rows = rows[: module.num_heads * module.head_size]  # an earlier worker counts these keys and values
        total = add(total, checksum(rows, first_column + first))
    return total, is_shard


def _packed_columns(layer: Any) -> Iterator[tuple[int, Tensor]]:
    """The matrix that a packed layer multiplies with, exactly: the layer is applied to the unit vectors.

    Yields:
        Index of the first column, and some columns.
    """
    if isinstance(layer, ParallelLMHead):
        width = layer.embedding_dim
    else:
        width = getattr(layer, "input_size_per_partition", layer.input_size)
    for first in range(0, width, _UNIT_VECTORS):
        count = min(_UNIT_VECTORS, width - first)
        vectors = torch.zeros(count, width, dtype=layer.weight.dtype, device=layer.weight.device)
        vectors[torch.arange(count), torch.arange(first, first + count)] = 1
        yield first, layer.quant_method.apply(layer, vectors, None).T


# LoRA layers: unwrapped while the base is loaded, and checksums of their adapter.


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
        if not hasattr(layer, "n_slices"):  # embeddings and heads, to which no adapter is sent
            continue
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
                    yield _adapter_part(layer.base_layer, label, [name] if name else [], held, is_a, place > 0)


def _adapter_part(base: Any, label: str, parts: list[str], held: Tensor, is_a: bool, is_further: bool) -> LoadedWeight:
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
