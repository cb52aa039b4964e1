"""Contexts that run a model for a check and leave it unchanged; random state, memory and finite weights."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pl_grouprl.utilities.distributed import gather_plain, local_shard
from pl_grouprl.utilities.internals import float32_parts


def widest_dtype(device: torch.device) -> torch.dtype:
    """The widest floating dtype of a device: float64, or float32 on Apple's GPUs."""
    return torch.float32 if device.type == "mps" else torch.float64


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


# The random state of a process, as plain values for a checkpoint.


def random_state(device: torch.device) -> dict[str, Any]:
    """State of the global generators of Python, NumPy and torch, and of the GPU if the process has one."""
    version, words, gauss = random.getstate()
    name, key, *rest = np.random.get_state(legacy=True)
    state = {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(key).tolist(), *rest],
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore a state; the GPU's only if both the process and the state have one."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, key, *rest = state["numpy"]
    np.random.set_state((name, np.asarray(key, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's global generators of the CPU and of the process's device.

    `torch.manual_seed` checks for every kind of device, which takes a millisecond or two.
    """
    if device.type not in ("cpu", "cuda"):
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


# Out-of-memory errors that name the option to change.


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or the CPU is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    of_cpu = ("can't allocate memory", "not enough memory")  # in PyTorch's plain RuntimeError
    return isinstance(error, RuntimeError) and any(words in str(error) for words in of_cpu)


@contextlib.contextmanager
def naming_memory(where: str, remedy: str) -> Iterator[None]:
    """Add the location, and the option to change, to out-of-memory errors; the innermost context wins.

    Args:
        where: What ran out of memory.
        remedy: What to do.

    Raises:
        RuntimeError: In place of the device's error.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise RuntimeError(f"out of memory in {where}; {remedy}.") from error


# Checks whether weights are finite, with the same answer on every rank.


@torch.no_grad()
def nonfinite_parameters(
    named_parameters: Iterable[tuple[str, Tensor]], device: torch.device | str = "cpu"
) -> list[str]:
    """Name the parameters that contain NaN or inf on any rank. Collective, with the same result on all.

    Each rank scans its weights or shards once; only names are gathered.

    Args:
        named_parameters: A module's `named_parameters()`; under FSDP and ZeRO-3, in their state between steps.
            Integers and tensors on the meta device count as finite.
        device: Device for communication; the rank's GPU under NCCL.
    """
    broken = nonfinite_tensors((name, local_shard(parameter)) for name, parameter in named_parameters)
    return list(dict.fromkeys(name for names in gather_plain(broken, device) for name in names))


@torch.no_grad()
def nonfinite_tensors(named_tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Name the tensors that contain NaN or inf on this rank; see `nonfinite_parameters`."""
    largest: dict[str, Tensor] = {}  # magnitudes, which propagate NaN and inf, and cannot overflow
    for name, tensor in named_tensors:
        if tensor.numel() and not tensor.is_meta and (tensor.is_floating_point() or tensor.is_complex()):
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            lowest, highest = torch.aminmax(real.float() if real.itemsize == 1 else real)  # copies only float8
            largest[name] = torch.maximum(-lowest, highest)
    if not largest:
        return []
    first = next(iter(largest.values())).device
    finite = torch.stack([value.to(first, widest_dtype(first)) for value in largest.values()]).isfinite().tolist()
    return [name for name, is_finite in zip(largest, finite, strict=True) if not is_finite]
