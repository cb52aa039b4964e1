"""vLLM's vision-language models where there is no torchvision, and tiny ones whose heads its CPU attention knows."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from helpers import tiny_vision
from torch import Tensor

from pl_grouprl.media.inputs import placeholder_ids
from pl_grouprl.types import Media, Rollout

_NAMES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")


def import_vllm_models() -> None:
    """Import them once: they import torchvision, through image processors of transformers that no test here runs."""
    from transformers.utils import is_torchvision_available

    if is_torchvision_available():
        return
    modules = {name: types.ModuleType(name) for name in _NAMES}
    for module in modules.values():
        module.__path__ = []
    modules["torchvision.transforms.v2"].functional = MagicMock()  # type: ignore[attr-defined]
    sys.modules.update(modules)
    for name in ("qwen2_5_vl", "qwen3_vl", "gemma3_mm"):
        importlib.import_module(f"vllm.model_executor.models.{name}")
    for name in modules:
        del sys.modules[name]


def tiny_model(family: str, *, tied: bool = False) -> Any:
    """As `tiny_vision_model`, with heads of 32 numbers in the language model; `tied`: the head has the embeddings."""
    text: dict[str, Any] = {"head_dim": 32}
    vision = tiny_vision._VISION[family]
    if family == "gemma3":
        text["query_pre_attn_scalar"] = 32
    else:
        text["rope_parameters"] = {**tiny_vision._FAMILY_TEXT[family]["rope_parameters"], "mrope_section": [4, 6, 6]}
    if family == "qwen2_5_vl":  # its heads share the hidden size
        text["hidden_size"] = 64
        vision = {**vision, "out_hidden_size": 64}
    with patch.dict(tiny_vision._VISION, {family: vision}):
        model = tiny_vision.tiny_vision_model(family, **text)
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    return model


def fresh_logprobs(model: Any, prompt: list[int], media: Media, rollout: Rollout) -> Tensor:
    """Of one forward over prompt and completion, without the tokens that are never sampled."""
    inputs = dict(media)
    for name, value in media.items():
        if name.endswith("token_type_ids"):
            inputs[name] = torch.cat([value, torch.zeros(len(rollout.token_ids), dtype=value.dtype)])[None]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + rollout.token_ids]), **inputs).logits[0, len(prompt) - 1 : -1]
    logits[:, list(placeholder_ids(model).values())] = -torch.inf
    return logits.log_softmax(-1).gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
