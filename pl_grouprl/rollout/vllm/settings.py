"""What is passed to vLLM's constructor, on CPUs and GPUs."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch

from pl_grouprl.models.adapters import base_of
from pl_grouprl.utilities.distributed import gather_plain, num_ranks, own_rank

# What differs between vLLM (0.32) on CPUs, mainly used in tests, and on GPUs.

CACHE_GIB = 1.0
"""Default size of the key and value cache on CPUs; a share of main memory would be too much."""

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


def runs_on_cpu() -> bool:
    """Whether vLLM runs on CPUs here."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


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


# Arguments of vLLM that this package sets, in the trainer's process and in a server.

FOLDER_VARIABLE = "PL_GROUPRL_BUCKETS"
"""Environment variable with a server's folder for buckets, which trainers on the same machine write to."""

ADAPTER_FOLDER = "adapter"
"""Name of the adapter's folder in that folder."""

DECIDED_ALWAYS = {
    "data_parallel_size": "the number of engines or servers",
    "disable_log_stats": "the trainer, which logs",
    "enable_prefix_caching": "the group, whose rollouts share their prompt",
    "generation_config": "the module's sampling options",
    "logprobs_mode": "the loss, which needs log-probabilities at the sampling temperature",
    "quantization": "the comparison of weights, which does not support it",
    "runner": "the policy",
    "skip_tokenizer_init": "the policy's tokenizer, which stays in the trainer",
    "speculative_config": "the loss, which needs log-probabilities that draft tokens lack",
    "weight_transfer_config": "the transfer of weights",
    "worker_extension_cls": "the transfer of weights",
}
"""Arguments that users cannot set, and what decides each."""

DECIDED_BY_SERVER = {name: decides for name, decides in DECIDED_ALWAYS.items() if name != "skip_tokenizer_init"} | {
    **dict.fromkeys(("spec_method", "spec_model", "spec_tokens"), DECIDED_ALWAYS["speculative_config"]),
    "api_key": "--token, which guards every route",
    "config": "the command line, which is checked",
    **{name: f"--{name}, written out" for name in ("model", "host", "port", "token", "transfer")},
    "weights_folder": "--weights-folder, written out",
    "uds": "--host and --port",
    **dict.fromkeys(("lora_dtype", "fully_sharded_loras"), "the comparison of adapters"),
}
"""The same for a server, which may have a tokenizer for other clients."""

DECIDED_IN_PROCESS = DECIDED_ALWAYS | {
    "model": "the policy",
    "dtype": "the engine's dtype",
    "load_format": "the trainer, which sends the weights",
    "tokenizer": "the policy's tokenizer, which stays in the trainer",
    "model_impl": "the trainer, whose models vLLM's Transformers backend would change",
    "enable_sleep_mode": "sleep_level",
    "enable_chunked_prefill": "the device",
    "kv_cache_memory_bytes": "kv_cache_gib",
    "distributed_executor_backend": "tensor_parallel_size",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "tensor_parallel_size alone",
    "data_parallel_size": "the ranks of the Trainer",
    "hf_overrides": "the policy's config",
    "mm_processor_cache_gb": "the trainer, which processes images itself",
    **dict.fromkeys(
        [
            *("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype", "lora_target_modules"),
            *("fully_sharded_loras", "default_mm_loras", "enable_tower_connector_lora"),
            *("enable_mixed_moe_lora_format", "enable_moe_shared_loras"),
        ],
        "the engine's adapter",
    ),
}
"""The same for a vLLM in the trainer's process."""


def common_arguments(*, transfer: str = "pl_grouprl") -> dict[str, Any]:
    """Arguments that rollouts and the comparison of weights require, as plain values.

    Args:
        transfer: Name of vLLM's weight transfer.
    """
    on_cpu = {"enable_chunked_prefill": False}  # vLLM cannot undo the random number drawn after a part of a prompt
    return {
        "runner": "generate",
        "generation_config": "vllm",  # only the trainer's sampling options
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "weight_transfer_config": {"backend": transfer},
        "worker_extension_cls": "pl_grouprl.rollout.vllm.worker.WeightReceiver",
        "disable_log_stats": True,
        **(on_cpu if runs_on_cpu() else {}),
    }


def trainer_device(model: Any) -> torch.device:
    """Device of a policy, whose weights may be offloaded to main memory."""
    device = next(model.parameters()).device
    if device.type != "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


# The folder from which vLLM builds a model: the config only. All weights come from the trainer.

SamplerDtype = Literal["auto", "float32", "bfloat16", "float16"]


def write_model_folder(model: Any, folder: Path) -> None:
    """Write what vLLM needs to build a policy, without its weights.

    Args:
        model: A transformers model; its weights may be shards, and it may have an adapter.
        folder: An existing folder.
    """
    model = base_of(model)
    config = copy.deepcopy(model.config)
    config.architectures = [_class_name(model)]
    config.save_pretrained(folder)


def check_native(model: Any) -> None:
    """Check that vLLM does not run a model by its Transformers backend, which changes the trainer's classes.

    Raises:
        ValueError: If it would.
    """
    from vllm.model_executor.models import ModelRegistry

    name = _class_name(base_of(model))
    registered = ModelRegistry.models.get(name)
    if registered is None or ".transformers" in getattr(registered, "module_name", ""):
        raise ValueError(
            f"vLLM has no implementation of {name}, and its Transformers backend would change the "
            "trainer's classes; sample with VLLMServerRolloutEngine, in another process, or with HFRolloutEngine."
        )


def check_lora(model: Any) -> None:
    """Check that vLLM's implementation of a model takes adapters.

    Raises:
        ValueError: If it does not, or there is none.
    """
    from vllm.model_executor.models import ModelRegistry, supports_lora

    check_native(model)
    name = _class_name(base_of(model))
    if not supports_lora(ModelRegistry.models[name].load_model_cls()):
        raise ValueError(f"vLLM's {name} takes no adapter.")


def _class_name(model: Any) -> str:
    """Name of a model's class before sharding strategies replaced it."""
    return next(kind.__name__ for kind in type(model).__mro__ if not kind.__module__.startswith("torch."))


# Groups of adjacent ranks that share an engine.
#
# With `tensor_parallel_size=1` each rank has its own engine and can sample at any time. With t > 1, ranks 0 to t-1
# share one engine, ranks t to 2t-1 the next, as in vLLM: each layer is split over t ranks, so they sample the same
# prompts at the same time.


def engine_arguments(tensor_parallel_size: int) -> dict[str, Any]:
    """Arguments of vLLM's `EngineArgs` for the ranks.

    Raises:
        ValueError: If the number of ranks per engine does not divide the number of ranks.
    """
    if num_ranks() % tensor_parallel_size:
        raise ValueError(
            f"tensor_parallel_size is {tensor_parallel_size}, but the trainer has {num_ranks()} ranks; set it to a "
            "divisor of the number of ranks."
        )
    return {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": tensor_parallel_size}


def engine_environment(device: torch.device) -> dict[str, str]:
    """Environment variables of vLLM for this rank.

    Args:
        device: The trainer's device on this rank. vLLM uses the GPU with its index.
    """
    return {"RANK": str(own_rank()), "LOCAL_RANK": str(device.index or 0), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def engine_group(tensor_parallel_size: int) -> Any:
    """The process group, on CPUs, of the ranks that share this rank's engine; None if it has its own.

    It exists once the engine is built.
    """
    if tensor_parallel_size == 1:
        return None
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().cpu_group


def gather_from(group: Any, value: Any) -> list[Any]:
    """Gather a value from every rank of an engine, in rank order. Collective within the group.

    Args:
        group: From `engine_group`.
        value: Numbers, strings, tensors, and lists and dictionaries of them.
    """
    return [value] if group is None else gather_plain(value, group=group)


def share_requests(requests: Sequence[Any], group: Any) -> tuple[list[Any], slice]:
    """Combine the requests of all ranks of an engine. Collective within the group.

    Args:
        requests: This rank's requests, as `gather_from` takes them. May be empty.
        group: From `engine_group`.

    Returns:
        The requests of all ranks of the engine, in rank order, which every rank samples; and the slice of this rank's.
    """
    shares = gather_from(group, list(requests))
    rank = 0 if group is None else torch.distributed.get_rank(group)
    start = sum(map(len, shares[:rank]))
    return [request for share in shares for request in share], slice(start, start + len(requests))
