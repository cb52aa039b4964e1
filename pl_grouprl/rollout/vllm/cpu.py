"""Everything that differs between vLLM on CPUs and on GPUs.

On CPUs, mainly used in tests, vLLM (0.32) takes shortcuts that rollouts and the comparison of weights must allow for.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from pl_grouprl.utilities.distributed import gather_plain, num_ranks

CACHE_GIB = 1.0
"""Default size of the key and value cache; a share of main memory would be too much."""

REPLACED_FUNCTIONS = (
    "Event",
    "Tensor.pin_memory",
    "Tensor.record_stream",
    "accelerator.empty_cache",
    "accelerator.get_memory_info",
    "accelerator.synchronize",
    "cuda.Event",
    "cuda.Stream",
    "cuda.current_stream",
    "cuda.set_stream",
    "cuda.stream",
    "set_num_threads",
)
"""Functions of torch that vLLM's CPU workers replace, mostly by no-ops."""

_UNIT_VECTORS = 256
"""Unit vectors per call of a layer."""


def runs_on_cpu() -> bool:
    """Whether vLLM runs on CPUs here."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def cpu_arguments() -> dict[str, Any]:
    """Arguments of vLLM's `EngineArgs`; none on GPUs.

    Prompts are not chunked: vLLM cannot undo the random number that it draws after a part of a prompt.
    """
    return {"enable_chunked_prefill": False} if runs_on_cpu() else {}


def refuse_experts(model: nn.Module, device: torch.device) -> None:
    """Refuse a mixture of experts on CPUs: vLLM packs its weights once, and a reload would leave the packed ones stale.

    Raises:
        ValueError: With the remedy.
    """
    if device.type == "cpu" and any(hasattr(layer, "moe_config") for layer in model.modules()):
        raise ValueError(
            f"{type(model).__name__} is a mixture of experts, whose weights vLLM cannot renew on CPUs; sample "
            "with HFRolloutEngine, or on a GPU."
        )


def is_packed(layer: nn.Module) -> bool:
    """Whether a layer of vLLM computes with a packed copy of its weight."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return hasattr(layer, "cpu_linear") and type(layer) is not VocabParallelEmbedding  # it looks up rows instead


def packed_columns(layer: Any) -> Iterator[tuple[int, Tensor]]:
    """The matrix that a packed layer multiplies with, exactly: the layer is applied to the unit vectors.

    Yields:
        Index of the first column, and some columns.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    if isinstance(layer, ParallelLMHead):
        width = layer.embedding_dim
    else:
        width = getattr(layer, "input_size_per_partition", layer.input_size)
    for first in range(0, width, _UNIT_VECTORS):
        count = min(_UNIT_VECTORS, width - first)
        vectors = torch.zeros(count, width, dtype=layer.weight.dtype, device=layer.weight.device)
        vectors[torch.arange(count), torch.arange(first, first + count)] = 1
        yield first, layer.quant_method.apply(layer, vectors, None).T


@contextmanager
def unique_shared_memory(device: torch.device) -> Iterator[None]:
    """While an engine is built on CPUs, give its ranks' shared memory a name that is unique to this run.

    vLLM uses the same name in all runs that launch their ranks externally, so a second run on a machine would fail.
    """
    if device.type != "cpu" or num_ranks() == 1:
        yield
        return
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    usual = _CPUSHMDistributed.make_group_name
    run = gather_plain(uuid.uuid4().hex)[0]

    def group_name(communicator: Any) -> str:
        return f"{run}-{usual(communicator).replace('/', '')}"

    with patch.object(_CPUSHMDistributed, "make_group_name", staticmethod(group_name)):
        yield
