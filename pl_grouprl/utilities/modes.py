"""Contexts that run a model for a check and leave it unchanged."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from pl_grouprl.utilities.internals import float32_parts


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


@contextmanager
def computing_in(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Run a model on copies of its weights in another dtype.

    The copies are made on entry and freed on exit, so they are always those of the current weights. The parameters
    themselves are put aside unchanged, with whatever refers to them: optimizers, DDP's hooks, an adapter's state.
    Buffers (rotary frequencies), quantized weights, and weights that transformers keeps in float32 stay as they are.

    Args:
        model: A transformers model with whole weights, with or without adapters. Without gradients.
        dtype: Dtype of the copies; None runs the model on its weights.
    """
    wide = float32_parts(model)
    places = [
        (module, attribute, weight)
        for name, module in model.named_modules()
        for attribute, weight in module._parameters.items()
        if weight is not None and weight.is_floating_point() and dtype not in (None, weight.dtype)
        if not any(f".{part}." in f".{name}.{attribute}." for part in wide)
    ]
    copies: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay tied
    try:
        for module, attribute, weight in places:
            if weight not in copies:
                copies[weight] = nn.Parameter(weight.detach().to(dtype), requires_grad=False)
            module._parameters[attribute] = copies[weight]
        yield
    finally:
        for module, attribute, weight in places:
            module._parameters[attribute] = weight


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
