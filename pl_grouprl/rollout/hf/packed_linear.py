"""Packs the weights of linear layers for the duration of a rollout: float32 on x86 CPUs.

A decoding step multiplies every weight by a few rows, one per sequence, so it should be bound by memory bandwidth. On
some processors PyTorch's matrix product (MKL) is slower than that, because of how it lays out weights. oneDNN's product
of weights packed for its kernel is up to 3 times faster there, and at least as fast for the many rows of a prompt.
Weights do not change during a rollout, so they are packed once. Packing takes about as long as a few steps, and keeps a
copy of the weights in memory during the rollout.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

MIN_STEPS = 16
"""Packing does not pay off for shorter rollouts."""

MIN_WEIGHTS = 2**17
"""Smaller layers gain nothing: a call of oneDNN has some microseconds of overhead."""

_LINEAR = nn.Linear.forward  # some libraries replace it

_ROWS = 8
"""Number of rows that the layout is optimized for: a hint with little effect; any number works."""


@contextmanager
def packed_linears(model: nn.Module, steps: int) -> Iterator[None]:
    """Run a model's large linear layers on packed weights, without gradients; weights must not change inside.

    Args:
        model: Plain `nn.Linear` modules with large weights are packed; others are left alone.
        steps: Tokens to sample.
    """
    packed: list[nn.Linear] = []
    if steps >= MIN_STEPS and _can_pack():
        packed = [
            module for module in _with_fixed_weights(model) if isinstance(module, nn.Linear) and _is_plain(module)
        ]
    try:
        for module in packed:
            module.__dict__["forward"] = _PackedForward(module)
        yield
    finally:
        for module in packed:
            module.__dict__.pop("forward", None)


@contextmanager
def original_weights(model: nn.Module) -> Iterator[None]:
    """Run the layers on their original weights, inside `packed_linears`."""
    forwards = {
        module: packed
        for module in model.modules()
        if isinstance(packed := vars(module).get("forward"), _PackedForward)
    }
    for module in forwards:
        del module.__dict__["forward"]
    try:
        yield
    finally:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward


def _can_pack() -> bool:
    mkldnn: Any = torch.ops.mkldnn
    has_kernels = hasattr(mkldnn, "_linear_pointwise") and hasattr(mkldnn, "_reorder_linear_weight")
    enabled = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)  # type: ignore[attr-defined]
    if nn.Linear.forward is not _LINEAR or torch.is_autocast_enabled("cpu"):
        return False
    return has_kernels and enabled and platform.machine() in ("x86_64", "AMD64")


def _with_fixed_weights(module: nn.Module) -> Iterator[nn.Module]:
    """A module and its submodules, except those whose weights a forward pass may change.

    PEFT unmerges an adapter if adapters are off; forward pre-hooks fetch weights or simulate low precision.
    """
    if not getattr(module, "merged", False) and not module._forward_pre_hooks:
        yield module
        for child in module.children():
            yield from _with_fixed_weights(child)


def _is_plain(module: nn.Linear) -> bool:
    """Whether a module only multiplies by a large, whole float32 weight."""
    if type(module) is not nn.Linear or "forward" in module.__dict__ or type(module.weight) is not nn.Parameter:
        return False
    weight = module.weight
    is_float32_on_cpu = weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.layout == torch.strided
    return is_float32_on_cpu and weight.dim() == 2 and weight.numel() >= MIN_WEIGHTS


class _PackedForward:
    """The forward of a layer, on a packed copy of its weight."""

    def __init__(self, module: nn.Linear) -> None:
        self._weight, self._bias = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), _ROWS), module.bias

    def __call__(self, input: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(input, self._weight, self._bias, "none", [], "")
