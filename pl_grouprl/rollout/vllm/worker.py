"""Runs inside vLLM's workers: loads weights, and computes checksums of those loaded.

Only vLLM imports this, as its `worker_extension_cls`. Loading is vLLM's layerwise reload, in the phases of its
weight-transfer interface (`start_weight_update`, `update_weights`, `finish_weight_update`; vLLM 0.32), after which
`refresh_stale_weights` updates what a reload leaves stale.
"""

from __future__ import annotations

import base64
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, load_file
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

from pl_grouprl.rollout.vllm.arguments import FOLDER_VARIABLE
from pl_grouprl.rollout.vllm.cpu import refuse_experts
from pl_grouprl.rollout.vllm.loaded_weights import loaded_checksums
from pl_grouprl.rollout.vllm.lora_layers import adapter_checksums, without_lora

if TYPE_CHECKING:
    from pl_grouprl.sync.compare import LoadedWeight

BACKEND = "pl_grouprl"
"""Name of the transfer in vLLM's `WeightTransferConfig`."""

_INSTANCE = secrets.token_hex(8)
"""Id of this process."""


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """Empty: nothing has to be set up."""


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """One bucket of weights in checkpoint format.

    Attributes:
        weights: Name and value of each, in the trainer's process.
        path: A safetensors file with them, for a worker in another process on the trainer's machine.
        safetensors: The contents of such a file, base64, for a worker elsewhere.
        owner: Who sends it: the `owner` of `begin_update`.
    """

    weights: list[tuple[str, Tensor]] | None = None
    path: str | None = None
    safetensors: str | None = None
    owner: str | None = None


class BucketTransfer(WeightTransferEngine[NoInitInfo, BucketInfo]):
    """Loads buckets that are passed by reference, as files, or in the message.

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
            ValueError: If there are experts on a CPU.
        """
        refuse_experts(self.model, self.device)
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
        elif update_info.safetensors is not None:
            content = base64.b64decode(update_info.safetensors)
            weights = [(name, weight.to(self.device)) for name, weight in load(content).items()]
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
    model_runner: Any
    model_config: Any
    vllm_config: Any
    weight_transfer_engine: Any
    _weight_update_active: bool

    def describe(self) -> dict[str, Any]:
        """Information about this worker for trainers that use a server."""
        return {
            "instance": _INSTANCE,
            "model_type": self.model_config.hf_config.model_type,
            "vocab_size": self.model_config.get_vocab_size(),
            "max_model_len": self.model_config.max_model_len,
            "dtype": str(self.model_config.dtype).removeprefix("torch."),
            "logprobs_mode": self.model_config.logprobs_mode,
            "backend": self.vllm_config.weight_transfer_config.backend,
            "folder": os.environ.get(FOLDER_VARIABLE),
        }

    def begin_update(self, owner: str) -> None:
        """Prepare for an update by a trainer; an unfinished one is abandoned, and its files are removed.

        Args:
            owner: The trainer. Buckets of others are refused.
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
            for head, embedding in _tied_heads(model, self._tied):
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

    def adapter_checksums(self, number: int, names: list[str]) -> list[LoadedWeight]:
        """Checksums of the LoRA adapter loaded in this worker; see `lora_layers.adapter_checksums`."""
        return list(adapter_checksums(self.model_runner.get_model(), number, names))

    @property
    def _tied(self) -> bool:
        return bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))


def _tied_heads(model: nn.Module, tied: bool) -> list[tuple[Any, Any]]:
    """Heads without their own weights, and the embeddings whose weights they use."""
    modules = list(model.modules()) if tied else []
    embeddings = [module for module in modules if type(module) is VocabParallelEmbedding]
    return [
        (head, next(e for e in embeddings if e.embedding_dim == head.embedding_dim))
        for head in modules
        if isinstance(head, ParallelLMHead)
    ]
