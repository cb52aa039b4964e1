"""Contexts that run a model for a check and leave it unchanged."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, without gradients; restores each submodule's mode.

    Sets attributes instead of calling `eval()`: layers may override `train(mode)` to do more, such as merging an
    adapter into the weights, which setting the attribute back would not undo.
    """
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def examining(model: Any) -> Iterator[None]:
    """Evaluate a transformers model without compilation, autocast or inference mode.

    Autocast's rounding would look like a difference, and an inference tensor in a buffer (rotary frequencies) could not
    be used in training. Restores rotary frequencies that depend on the longest input so far.
    """
    rotary = [
        (module, dict(module.__dict__), dict(module._buffers))
        for module in model.modules()
        if hasattr(module, "rope_type")
    ]
    autocast = torch.autocast(model.device.type, enabled=False)
    try:
        with torch.inference_mode(False), evaluating(model), autocast, uncompiled():
            yield
    finally:
        for module, attributes, buffers in rotary:
            module.__dict__.update(attributes)
            module._buffers.update(buffers)


def uncompiled() -> AbstractContextManager[Any]:
    """Run compiled layers uncompiled.

    This affects the whole process, which is safe: sampling threads use deep copies of the policy, which are not
    compiled. Does nothing on other threads.
    """
    if threading.current_thread() is not threading.main_thread():
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def is_whole(model: nn.Module) -> bool:
    """Whether every parameter is an ordinary or 4-bit tensor with data: not on meta, sharded or otherwise quantized."""
    if any("FullyShardedDataParallel" in type(module).__name__ for module in model.modules()):
        return False
    plain = (type(p) is nn.Parameter or hasattr(p, "quant_state") for p in model.parameters())
    return all(plain) and all(not p.is_meta and p.numel() for p in model.parameters())
