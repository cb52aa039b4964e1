"""The folder from which vLLM builds a model: the config only. All weights come from the trainer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal

from pl_grouprl.models.adapter_layers import base_of

SamplerDtype = Literal["auto", "float32", "bfloat16", "float16"]


def write_model_folder(model: Any, folder: Path) -> None:
    """Write what vLLM needs to build a policy, without its weights.

    Args:
        model: A transformers model; its weights may be shards, and it may have an adapter.
        folder: An existing folder.

    Raises:
        ValueError: If its weights are quantized.
    """
    model = base_of(model)
    config = copy.deepcopy(model.config)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"{type(model).__name__} has quantized weights, which cannot be compared with a sampler's; load it "
            "without quantization, or sample with HFRolloutEngine."
        )
    config.architectures = [_class_name(model)]
    config.save_pretrained(folder)


def check_native(model: Any) -> None:
    """Refuse a model that vLLM would run by its Transformers backend, which changes the trainer's classes.

    Raises:
        ValueError: Says what to use instead.
    """
    from vllm.model_executor.models import ModelRegistry

    name = _class_name(base_of(model))
    registered = ModelRegistry.models.get(name)
    if registered is None or ".transformers" in getattr(registered, "module_name", ""):
        raise ValueError(
            f"vLLM has no implementation of {name}, and its Transformers backend would change the "
            "trainer's classes; sample with VLLMServerRolloutEngine, in another process, or with HFRolloutEngine."
        )


def _class_name(model: Any) -> str:
    """Name of a model's class before sharding strategies replaced it."""
    return next(kind.__name__ for kind in type(model).__mro__ if not kind.__module__.startswith("torch."))


def sampler_dtype(model: Any, dtype: SamplerDtype) -> str:
    """The dtype of a policy's weights for a sampler; the policy's for `auto`."""
    if dtype != "auto":
        return dtype
    kinds = [parameter.dtype for parameter in base_of(model).parameters() if parameter.is_floating_point()]
    return str(max(set(kinds), key=kinds.count)).removeprefix("torch.")
