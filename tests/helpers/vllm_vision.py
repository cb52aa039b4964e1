"""vLLM's vision-language models where there is no torchvision, and tiny ones whose heads its CPU attention knows."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any
from unittest.mock import MagicMock, patch

from helpers import tiny_vision

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


def tiny_model(family: str, seed: int = 0) -> Any:
    """As `tiny_vision_model`, with heads of 32 numbers in the language model."""
    text: dict[str, Any] = {"head_dim": 32}
    if family == "gemma3":
        return tiny_vision.tiny_vision_model(family, seed=seed, **text, query_pre_attn_scalar=32)
    interleaved = {"mrope_interleaved": True} if family == "qwen3_vl" else {}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6], **interleaved}
    if family == "qwen3_vl":
        return tiny_vision.tiny_vision_model(family, seed=seed, **text)
    wide = {**tiny_vision._VISION[family], "out_hidden_size": 64}  # its heads share the hidden size
    with patch.dict(tiny_vision._VISION, {family: wide}):
        return tiny_vision.tiny_vision_model(family, seed=seed, hidden_size=64, **text)
