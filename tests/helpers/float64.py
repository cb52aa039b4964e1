"""Runs a model in float64 throughout, although its norms, routers and rotary tables ask for float32."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class InFloat64(TorchFunctionMode):
    """Replaces float32, wherever a function is given it or makes it, by float64.

    Not within a backward pass. Layers that activation checkpointing runs again there must enter it by themselves, or
    torch raises a CheckpointError about other dtypes: `context_fn=lambda: (nullcontext(), InFloat64())`.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)
