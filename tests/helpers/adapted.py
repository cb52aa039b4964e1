"""Policies with a LoRA adapter, and engines that are sent it apart from its base."""

from __future__ import annotations

from typing import Any

import peft
import torch
from helpers.engines import new_policy
from helpers.rollouts import PROMPTS, reference_logprobs
from torch import Tensor

from pl_grouprl.distributed.weight_stream import adapter_config, adapter_weights, base_weights
from pl_grouprl.models.adapters import merged_copy
from pl_grouprl.rollout.engine import AdapterWeights
from pl_grouprl.types import SamplingConfig

POLICIES = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2 tied": ("qwen2_tied", {}),
    "qwen3": ("qwen3", {}),
}


def with_adapter(base: Any, **options: Any) -> Any:
    """A base with an adapter that is not zero."""
    config = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", **options}
    model = peft.get_peft_model(base, peft.LoraConfig(**config)).eval()
    renew(model, 0)
    return model


def adapted(policy: str = "qwen3", dtype: torch.dtype | None = None, **options: Any) -> Any:
    """A policy with an adapter that is not zero."""
    name, overrides = POLICIES[policy]
    base, _ = new_policy(name, **overrides)
    return with_adapter(base if dtype is None else base.to(dtype), **options)


@torch.no_grad()
def renew(model: Any, seed: int, scale: float = 0.3) -> None:
    """Give a policy another adapter, of numbers with standard deviation `scale`."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))


def weights_of(model: Any) -> AdapterWeights:
    return AdapterWeights(adapter_config(model), adapter_weights(model, model.named_parameters()))


_versions: dict[int, int] = {}


def sync(engine: Any, model: Any, base: bool = False) -> dict[str, float]:
    """Send the adapter, and its base if asked for, as a version larger than any before."""
    version = _versions[id(engine)] = max(_versions.get(id(engine), 0), engine.version or 0) + 1
    weights = base_weights(model, model.named_parameters()) if base else iter(())
    return engine.update_weights(weights, version=version, adapter=weights_of(model))


def adapter_bytes(model: Any) -> int:
    return sum(weight.nbytes for name, weight in model.named_parameters() if "lora_" in name)


def assert_like_merged(engine: Any, model: Any, prompts: list[list[int]] = PROMPTS) -> list[Tensor]:
    """The log-probabilities of what the engine samples are those of the merged policy."""
    sampling, merged = SamplingConfig(max_new_tokens=8), merged_copy(model).eval()
    found = []
    groups = engine.generate(prompts, sampling, num_generations=1, seed=0)
    for prompt, (rollout,) in zip(prompts, groups, strict=True):
        found.append(torch.tensor(rollout.logprobs))
        torch.testing.assert_close(found[-1], reference_logprobs(merged, prompt, rollout, sampling), atol=1e-4, rtol=0)
    return found
