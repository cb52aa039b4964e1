"""Helpers for frozen models: teachers, and the reference policy of KL penalties, a copy of the initial policy.

A policy with an adapter needs no copy: its frozen base, with the adapter off, is the reference.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn


def frozen_copy(model: nn.Module) -> nn.Module:
    """Copy a model and freeze the copy. Keeps its mode; put it in evaluation mode before scoring."""
    return copy.deepcopy(model).requires_grad_(False)


@contextmanager
def unfrozen(model: nn.Module) -> Iterator[None]:
    """Let all parameters of a frozen model require gradients, for checks that compare gradients."""
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]  # not quantized ones
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def leave_out_of_checkpoints(module: nn.Module, child: str) -> None:
    """Leave a child out of `module.state_dict()`, and do not report it missing in `load_state_dict`, even if strict.

    For weights that are recreated from their source.
    """
    module.register_state_dict_post_hook(partial(_drop, child))  # not closures, which cannot be pickled
    module.register_load_state_dict_post_hook(partial(_ignore_missing, child))


def _drop(child: str, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    for name in [name for name in state if name.startswith(f"{prefix}{child}.")]:
        del state[name]


def _ignore_missing(child: str, module: nn.Module, incompatible: Any) -> None:
    own = re.compile(rf"((_fsdp_wrapped_)?module\.)*{re.escape(child)}\.")  # FSDP1, or an average, may wrap the module
    incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if not own.match(name)]


@torch.no_grad()
def fingerprint(model: nn.Module, *, frozen_only: bool = False) -> float:
    """Sum of the absolute weights, optionally of frozen ones only; detects that a source's model has changed."""
    parameters = (p for p in model.parameters() if not (frozen_only and p.requires_grad))
    return float(sum(parameter.abs().sum(dtype=torch.float64) for parameter in parameters))
