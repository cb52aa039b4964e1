"""Merges the adapters of one module into a copy of its weights, using PEFT's arithmetic."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pl_grouprl.models.adapter_layers import adapter_layers, remove_adapters
from pl_grouprl.strategies.weights import named_places


def merged(layer: Any, name: str, weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Merge the active adapters of a layer into a copy of its base.

    Args:
        layer: A PEFT layer; only its structure is read.
        name: Its name in the model.
        weights: All its whole weights, by their names in the layer. Emptied, so they can be freed.

    Yields:
        Name in the model without adapters, and detached value.
    """
    holder: Any = nn.Module()
    holder.layer = _bare(layer, weights)
    weights.clear()
    for own in adapter_layers(holder):
        base = own.get_base_layer()
        for inner, parameter in list(base.named_parameters(recurse=False)):
            setattr(base, inner, nn.Parameter(parameter.clone(), requires_grad=False))
        with torch.no_grad():
            own.merge()
    remove_adapters(holder)
    for inner, weight in named_places(holder.layer).items():
        yield f"{name}.{inner}", weight.get()


def _bare(module: nn.Module, weights: dict[str, Tensor]) -> Any:
    """Copy a module's structure with other weights, and without hooks of a sharding strategy."""
    bare = object.__new__(type(module))
    nn.Module.__init__(bare)
    for name, value in vars(module).items():
        if name not in vars(bare) and name != "forward" and not isinstance(value, Tensor):
            vars(bare)[name] = copy.copy(value) if isinstance(value, dict | list | set) else value
    bare.training = module.training
    bare._parameters.update({name: None for name, own in module._parameters.items() if own is None})
    for name, weight in weights.items():
        if "." not in name and name in module._buffers:
            bare._buffers[name] = weight
        elif "." not in name:
            bare._parameters[name] = nn.Parameter(weight, requires_grad=False)
    for name, child in module._modules.items():
        within = {own.removeprefix(f"{name}."): w for own, w in weights.items() if own.startswith(f"{name}.")}
        bare._modules[name] = None if child is None else _bare(child, within)
    return bare
