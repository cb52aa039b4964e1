"""Running a model for a look at it, and leaving it as it was."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, without gradients; afterwards each submodule is in the mode that it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def examining(model: Any) -> Iterator[None]:
    """Evaluate a transformers model as it is written: no compilation, no autocast, no inference mode.

    Autocast's rounding would look like a difference, and an inference tensor in a buffer (rotary frequencies) could not
    be used in training. Frequencies that depend on the longest call so far are put back.
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
    """Run compiled layers as they are written.

    This holds for the whole process, so a thread that samples beside training changes nothing: it samples from a copy
    of the policy, and a deep copy is not compiled.
    """
    if threading.current_thread() is not threading.main_thread():
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def is_whole(model: nn.Module) -> bool:
    """Whether every parameter is an ordinary tensor with its data: not on meta, sharded or quantized."""
    if any("FullyShardedDataParallel" in type(module).__name__ for module in model.modules()):
        return False
    return all(type(p) is nn.Parameter and not p.is_meta and p.numel() for p in model.parameters())
