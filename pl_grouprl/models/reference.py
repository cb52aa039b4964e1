"""The reference policy that KL penalties compare with: a frozen copy of the initial policy.

A policy with an adapter needs none: its base is frozen, and is the policy with the adapter off.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def frozen_copy(model: nn.Module) -> nn.Module:
    """Copy a model that is never trained. Its mode is left alone; put it in evaluation mode to score with it."""
    return copy.deepcopy(model).requires_grad_(False)


def leave_out_of_checkpoints(module: nn.Module, child: str) -> None:
    """Keep a child out of `module.state_dict()`, and do not miss it in `load_state_dict`, strict or not.

    For weights that are made again from their source: a checkpoint would hold them twice.
    """

    def drop(_: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        for name in [name for name in state if name.startswith(f"{prefix}{child}.")]:
            del state[name]

    def forgive(_: nn.Module, incompatible: Any) -> None:
        own = (f"{child}.", f"_fsdp_wrapped_module.{child}.")  # the latter where FSDP1 wraps the module
        incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if not name.startswith(own)]

    module.register_state_dict_post_hook(drop)
    module.register_load_state_dict_post_hook(forgive)


@torch.no_grad()
def fingerprint(model: nn.Module, *, frozen_only: bool = False) -> float:
    """Sum of all absolute weights, or of the frozen ones: enough to notice that a source now gives another model."""
    parameters = (p for p in model.parameters() if not (frozen_only and p.requires_grad))
    return float(sum(parameter.abs().sum(dtype=torch.float64) for parameter in parameters))
