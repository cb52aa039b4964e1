"""Routes each weight of a model to its names in a checkpoint, or into a merged layer."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pl_grouprl.models.adapter_layers import adapter_layers, remove_adapters
from pl_grouprl.strategies.weights import Weight, named_places, plain_name
from pl_grouprl.sync.checkpoint_form import Gatherer

PEFT_PREFIX = "base_model.model."
"""PEFT's prefix of parameter names, in its models and files."""


@dataclass(eq=False)
class Route:
    """The destinations of one weight.

    Attributes:
        names: Names under which it is yielded unchanged.
        parts: PEFT layers whose merge needs it, with its name in each.
    """

    names: list[str] = field(default_factory=list)
    parts: list[tuple[str, str]] = field(default_factory=list)


class Routes:
    """The routes of all weights of a stream.

    Args:
        owner: Name of the model's class, for errors.
        layers: PEFT layers by name, whose weights are merged.
    """

    def __init__(self, owner: str, layers: dict[str, Any] | None = None) -> None:
        self.by_name: dict[str, Route] = {}
        self.layers = layers or {}
        self._owner = owner
        self._by_weight: dict[str, Route] = {}

    def add(self, name: str, weight: Weight) -> Route:
        """Add a name of a weight; returns its route, which all names of a tied weight share."""
        self.by_name[name] = route = self._by_weight.setdefault(weight.name, Route())
        return route

    def follow(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Read a stream; yield weights under their routes' names, and merged layers once they are complete.

        Raises:
            ValueError: If the stream lacks a weight, has one twice, or one that the model does not have.
        """
        gatherer = Gatherer(Counter(layer for route in self._by_weight.values() for layer, _ in route.parts))
        awaited = {route: name for name, route in reversed(self.by_name.items())}
        for name, weight in weights:
            route = self.by_name.get(name) or self.by_name.get(name.removeprefix(PEFT_PREFIX))
            if route not in awaited:
                raise ValueError(
                    f"the stream of weights has {name!r} "
                    + (f"twice; {self._owner} has it once." if route else f"which {self._owner} does not have.")
                )
            del awaited[route]
            weight = weight.detach()
            for target in route.names:
                yield target, weight
            for layer, inner in route.parts:
                if (whole := gatherer.add(layer, inner, weight)) is not None:
                    yield from merge_layer(self.layers[layer], layer, whole)
                    del whole
            del weight
        if awaited:
            raise ValueError(
                f"the stream of weights ended without {len(awaited)} of {self._owner}, such as "
                f"{next(iter(awaited.values()))!r}; pass all parameters and persistent buffers."
            )


def plan_routes(base: nn.Module, *, merge: bool) -> tuple[Routes, dict[str, Hashable]]:
    """Plan the routes of weights when adapters are merged or removed.

    Args:
        base: A transformers model, with or without PEFT layers.
        merge: Whether active adapters are merged; otherwise they are left out.

    Returns:
        The routes, and all names that they produce, each with a key shared by all names of a tied weight.
    """
    routes = Routes(type(base).__name__, _outermost(base))
    outcome: dict[str, Hashable] = {}
    for name, weight in named_places(base).items():
        route = routes.add(name, weight)
        parts = name.split(".")
        above = (".".join(parts[:count]) for count in range(1, len(parts)))
        layer = next((prefix for prefix in above if prefix in routes.layers), None)
        if layer is None:
            route.names.append(name)
            outcome[name] = route
            continue
        inner = name.removeprefix(f"{layer}.")
        plain, is_merged = _inside(routes.layers[layer], inner, merge)
        if is_merged:
            route.parts.append((layer, inner))
        elif plain is not None:
            route.names.append(f"{layer}.{plain}")
        if plain is not None:
            outcome[f"{layer}.{plain}"] = (route, layer) if is_merged else route
    return routes, outcome


def _inside(layer: Any, inner: str, merge: bool) -> tuple[str | None, bool]:
    """A PEFT layer's weight: its name in the plain model (None if it is PEFT's), and whether it is merged."""
    active = layer.active_adapters
    if not hasattr(layer, "merge"):  # a module that PEFT trains whole
        chosen = f"modules_to_save.{active[0]}." if merge and active else "original_module."
        return (inner.removeprefix(chosen) if inner.startswith(chosen) else None), False
    base = ""
    while hasattr(layer, "base_layer"):  # PEFT nests one layer per expert weight
        layer, base = layer.base_layer, f"{base}base_layer."
    if inner.startswith(base):
        return inner.removeprefix(base), merge
    return None, merge and inner.replace("base_layer.", "").split(".")[1] in active


def _outermost(model: nn.Module) -> dict[str, Any]:
    """PEFT layers by name, without those nested in another.

    Raises:
        TypeError: If one can neither be merged nor removed.
    """
    layers, found = set(adapter_layers(model)), {}
    last = "."
    for prefix, module in model.named_modules(remove_duplicate=False):
        name = plain_name(prefix)
        if module not in layers or name.startswith(f"{last}."):
            continue
        if not hasattr(module, "merge") and not hasattr(module, "modules_to_save"):
            raise TypeError(f"the {type(module).__name__} of PEFT at {name!r} can neither be merged nor removed.")
        found[name] = module
        last = name
    return found


def merge_layer(layer: Any, name: str, weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Merge the active adapters of a layer into a copy of its base.

    Args:
        layer: A PEFT layer; only its structure is read.
        name: Its name in the model.
        weights: All its weights by their names in the layer, whole. Emptied to free them.

    Yields:
        Name in the model without adapters, and value, detached.
    """
    holder: Any = nn.Module()
    holder.layer = _bare(layer, weights)
    weights.clear()
    for adapter_layer in adapter_layers(holder):
        base = adapter_layer.get_base_layer()
        for inner, parameter in list(base.named_parameters(recurse=False)):
            setattr(base, inner, nn.Parameter(parameter.clone(), requires_grad=False))
        with torch.no_grad():
            adapter_layer.merge()
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
    bare._parameters.update({name: None for name, parameter in module._parameters.items() if parameter is None})
    for name, weight in weights.items():
        if "." not in name and name in module._buffers:
            bare._buffers[name] = weight
        elif "." not in name:
            bare._parameters[name] = nn.Parameter(weight, requires_grad=False)
    for name, child in module._modules.items():
        within = {key.removeprefix(f"{name}."): w for key, w in weights.items() if key.startswith(f"{name}.")}
        bare._modules[name] = None if child is None else _bare(child, within)
    return bare
