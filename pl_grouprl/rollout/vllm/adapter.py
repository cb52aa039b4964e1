"""A policy's LoRA adapter for vLLM: checks, start arguments, and the folder that vLLM reads."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from safetensors.torch import save
from torch import Tensor, nn

from pl_grouprl.attention import find_decoder
from pl_grouprl.distributed.checksum import checksum
from pl_grouprl.distributed.weight_stream import PEFT_PREFIX, adapter_config
from pl_grouprl.models.adapters import adapter_layers, base_of, has_adapters
from pl_grouprl.rollout.engine import AdapterWeights

AdapterForm = Literal["merged", "separate"]

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Maximum ranks that vLLM 0.32 accepts at start."""

_ANY_VALUE = {
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    # Which layers have one: visible in the weights' names.
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    # Initialization: if it changed the base, the changed base is sent.
    *("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    # No effect on sampling.
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "fan_in_fan_out", "megatron_config", "megatron_core", "qalora_group_size", "runtime_config"),
    "ensure_weight_tying",
}
"""Options of PEFT's `LoraConfig` that may have any value."""

INSTEAD = "; pass adapter='merged' to the rollout engine"
"""End of an error that says why an adapter cannot be separate."""

ADAPTER_PREFIX = "policy-"
"""Start of the names of adapters."""


def adapter_name(version: int) -> str:
    """Name under which vLLM serves the adapter of a version of the policy."""
    return f"{ADAPTER_PREFIX}{version}"


def choose_form(model: Any, check: Callable[[Mapping[str, Any]], None]) -> AdapterForm:
    """Form in which `adapter='auto'` sends a policy's adapter: separate if vLLM can apply it, else merged.

    Logs why an adapter is merged.

    Args:
        model: A transformers model, with or without PEFT layers; its weights may be shards.
        check: Given the result of `lora_arguments`, raises a ValueError if the engine cannot serve the adapter.
    """
    if not has_adapters(model):
        return "merged"
    try:
        check(lora_arguments(model, adapter_config(model)))
    except ValueError as error:
        rank_zero_info(f"vLLM gets the adapter merged into its base: {str(error).partition(INSTEAD)[0].rstrip('.')}.")
        return "merged"
    return "separate"


def lora_arguments(model: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of vLLM's `EngineArgs` for an adapter: only layers that have one become LoRA layers.

    Args:
        model: A transformers model with PEFT layers; its weights may be shards.
        config: Contents of the adapter's `adapter_config.json`.

    Raises:
        ValueError: If vLLM would not apply the adapter as the trainer does.
    """
    for name, value in config.items():
        if value and name not in _ANY_VALUE and (name, value) not in (("peft_type", "LORA"), ("bias", "none")):
            raise ValueError(f"the policy's adapter has {name}={value!r}, which vLLM's LoRA does not have{INSTEAD}.")
    max_rank = max([config["r"], *(config["rank_pattern"] or {}).values()])
    if max_rank > _RANKS[-1]:
        raise ValueError(f"the policy's adapter has rank {max_rank}, and vLLM serves at most {_RANKS[-1]}{INSTEAD}.")
    base = base_of(model)
    layers, in_decoder = set(adapter_layers(base)), set(find_decoder(base).modules())
    targets = set()
    for name, layer in base.named_modules():
        if layer not in layers or not any(active in getattr(layer, "r", ()) for active in layer.active_adapters):
            continue
        base_layer = layer.get_base_layer()
        kind = type(base_layer).__name__
        if layer not in in_decoder or not (isinstance(base_layer, nn.Linear) or kind == "Conv1D"):
            raise ValueError(
                f"the policy has an adapter on {name}, a {kind}, and vLLM's are for linear layers of the decoder"
                f"{INSTEAD}, or omit that layer (target_modules)."
            )
        (active,) = layer.active_adapters
        expected = _scaling(config, layer.r[active], layer.lora_alpha[active])
        if layer.scaling[active] != expected:
            raise ValueError(
                f"the policy's adapter on {name} is scaled by {layer.scaling[active]}, but its config says {expected}"
                f"{INSTEAD}."
            )
        targets.add(name.rpartition(".")[2])
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in _RANKS if rank >= max_rank),
        "lora_dtype": "auto",  # that of the weights
        "lora_target_modules": sorted(targets),
    }


def adapter_tensors(adapter: AdapterWeights, dtype: torch.dtype, checksums: dict[str, int]) -> dict[str, Tensor]:
    """Read an adapter's weights in the sampler's dtype.

    Args:
        adapter: The adapter; its weights are consumed.
        dtype: The sampler's dtype.
        checksums: Receives the checksum of each weight as vLLM stores it: B multiplied by alpha / r.

    Returns:
        Contents of its `adapter_model.safetensors`, in main memory.
    """
    weights, config = {}, adapter.config
    for name, weight in adapter.weights:
        weights[name] = weight = weight.detach().to("cpu", dtype, copy=True).contiguous()
        if ".lora_B." in name:
            layer = name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0]
            rank = _in_layer(layer, config["rank_pattern"], config["r"])
            weight = weight * _scaling(config, rank, _in_layer(layer, config["alpha_pattern"], config["lora_alpha"]))
        checksums[name] = checksum(weight)
    return weights


def peft_files(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Name and contents of the files of an adapter in PEFT's format."""
    written = {**config, "init_lora_weights": True}  # its actual base was sent, so the initialization does not matter
    return {"adapter_config.json": json.dumps(written).encode(), "adapter_model.safetensors": save(dict(weights))}


@contextmanager
def adapter_folder(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Iterator[str]:
    """Temporary private folder in PEFT's format, in memory if possible."""
    memory = Path("/dev/shm")  # noqa: S108 (the folder in it has a unique name)
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        for name, contents in peft_files(config, weights).items():
            Path(folder, name).write_bytes(contents)
        yield folder


def _in_layer(layer: str, patterns: Mapping[str, Any] | None, usual: Any) -> Any:
    """An option of a layer, as PEFT looks it up."""
    from peft.utils.other import get_pattern_key

    patterns = patterns or {}
    return patterns.get(get_pattern_key(list(patterns), layer), usual)


def _scaling(config: Mapping[str, Any], rank: int, alpha: float) -> float:
    return alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
