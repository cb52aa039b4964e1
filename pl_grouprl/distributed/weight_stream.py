"""A policy's weights as a stream in checkpoint form, with adapters merged or separate.

The functions read a stream of raw weights and the model's structure and config, never the model's tensors, which may be
shards or empty. Only the raw stream is collective: from the same stream, every rank yields the same weights without
communication. It is read to its end, one weight at a time, holding at most the weights of one module with an adapter,
or of one transformers conversion (the experts of a layer).
"""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from pl_grouprl.distributed.strategies import Weight, named_places, plain_name
from pl_grouprl.models.adapters import adapter_layers, base_of, remove_adapters
from pl_grouprl.utilities import internals

Named = tuple[str, Tensor]

PEFT_PREFIX = "base_model.model."
"""PEFT's prefix of parameter names, in its models and files."""


def checkpoint_weights(model: Any, weights: Iterable[Named]) -> Iterator[Named]:
    """Yield the contents of a Hugging Face checkpoint of a model, with active adapters merged into its weights.

    Names and values equal what `merged_copy(model).save_pretrained` writes. A tied weight comes once. For a
    separate adapter see `base_weights` and `adapter_weights`.

    Args:
        model: A transformers model, not quantized, with or without PEFT layers, or a `PeftModel`.
        weights: Names, as in `model.named_parameters()`, and whole values of all parameters and persistent buffers, on
            any device. A tied weight comes once. The weights of a module are consecutive, and must not change until the
            last of them was read. They are not modified.

    Yields:
        Name and detached value. Each may be released when the next is requested.

    Raises:
        ValueError: Before reading, if transformers cannot reverse the model's form; while reading, if a weight of the
            stream is missing, repeated, or not in the model.
        TypeError: If PEFT wrapped modules in a way that cannot be merged.
        RuntimeError: If weights are tied but not declared as tied by its class.
    """
    return _as_saved(model, weights, merge=True)


def base_weights(model: Any, weights: Iterable[Named]) -> Iterator[Named]:
    """Yield the contents of a Hugging Face checkpoint of a model without its adapters.

    Args:
        model: As in `checkpoint_weights`.
        weights: As in `checkpoint_weights`; adapters among them are omitted.

    Yields:
        Name and detached value. Modules that PEFT trains whole have their original weights.

    Raises:
        ValueError: As in `checkpoint_weights`, and if an adapter was merged into the weights (`merge_adapter`).
        TypeError: As in `checkpoint_weights`.
        RuntimeError: As in `checkpoint_weights`.
    """
    if any(getattr(layer, "merged", False) for layer in adapter_layers(model)):
        raise ValueError("the policy has an adapter merged into its weights; call its unmerge_adapter first.")
    return _as_saved(model, weights, merge=False)


def adapter_weights(model: Any, weights: Iterable[Named]) -> Iterator[Named]:
    """Yield the contents of PEFT's adapter_model.safetensors for a model's active adapter.

    Args:
        model: As in `checkpoint_weights`.
        weights: As in `checkpoint_weights`; only those of the adapter are yielded.

    Yields:
        Name, such as `base_model.model.model.layers.0.mlp.up_proj.lora_A.weight`, and detached value, in its training
        dtype. Modules that PEFT trains whole are included, as in its file; resized embeddings are not, because they
        count as part of the base.

    Raises:
        ValueError: If the model has no adapter, or several are active; or for the stream, as in `checkpoint_weights`.
    """
    from peft import get_peft_model_state_dict

    base = base_of(model)
    adapter, config = _active_config(base)
    routes, stand_ins = Routes(type(base).__name__), {}
    for name, weight in named_places(base).items():
        routes.add(name, weight)
        stand_ins[name] = torch.empty(0)
    route_of = {id(stand_in): routes.by_name[name] for name, stand_in in stand_ins.items()}
    source, config.base_model_name_or_path = config.base_model_name_or_path, None  # PEFT would look it up on the hub
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Setting `save_embedding_layers`")
            in_file = get_peft_model_state_dict(base, state_dict=stand_ins, adapter_name=adapter)
    finally:
        config.base_model_name_or_path = source
    for name, stand_in in in_file.items():
        route_of[id(stand_in)].names.append(f"{PEFT_PREFIX}{name}")
    return routes.follow(weights)


def adapter_config(model: Any) -> dict[str, Any]:
    """The contents of PEFT's adapter_config.json for a model's active adapter, as plain JSON values.

    Args:
        model: As in `checkpoint_weights`.

    Returns:
        PEFT's options by name, such as `peft_type`, `r`, `lora_alpha`, `target_modules`, `use_dora`, `use_rslora`,
        `bias`, `modules_to_save` and `rank_pattern`. Sets of names are sorted lists, the same on every rank.

    Raises:
        ValueError: If the model has no adapter, or several are active.
    """
    config: Any = _active_config(base_of(model))[1]
    plain: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=sorted))
    return plain


def _active_config(base: Any) -> tuple[str, Any]:
    """The active adapter's name and PEFT config."""
    active = {name for layer in adapter_layers(base) for name in layer.active_adapters}
    if len(active) != 1:
        raise ValueError(f"{type(base).__name__} has {len(active)} active adapters; choose one with set_adapter.")
    name = active.pop()
    return name, base.peft_config[name]


def _as_saved(model: Any, weights: Iterable[Named], *, merge: bool) -> Iterator[Named]:
    """The stream under the names and in the layout in which transformers saves it; adapters are merged or omitted."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    base = base_of(model)
    routes = Routes(type(base).__name__, _outermost_layers(base))
    plain_names: dict[str, Hashable] = {}  # names without adapters; those of a tied weight share a key
    for name, weight in named_places(base).items():
        route = routes.add(name, weight)
        parts = name.split(".")
        above = (".".join(parts[:count]) for count in range(1, len(parts)))
        layer = next((prefix for prefix in above if prefix in routes.layers), None)
        if layer is None:
            route.names.append(name)
            plain_names[name] = route
            continue
        inner = name.removeprefix(f"{layer}.")
        plain, is_merged = _inside(routes.layers[layer], inner, merge)
        if is_merged:
            route.parts.append((layer, inner))
        elif plain is not None:
            route.names.append(f"{layer}.{plain}")
        if plain is not None:
            plain_names[f"{layer}.{plain}"] = (route, layer) if is_merged else route
    stand_ins = {weight: torch.empty(1) for weight in set(plain_names.values())}
    state = {name: stand_ins[weight] for name, weight in plain_names.items()}
    saved = remove_tied_weights_from_state_dict(state, base).keys() - internals.unsaved_names(base)
    for route in routes.by_name.values():
        route.names = [name for name in route.names if name in saved]
    return _in_checkpoint_form(base, [name for name in plain_names if name in saved], routes.follow(weights))


# Where each weight of a model goes: to its names in a checkpoint, or into a merged layer.


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

    def follow(self, weights: Iterable[Named]) -> Iterator[Named]:
        """Read a stream; yield weights under their routes' names, and merged layers once they are complete.

        Raises:
            ValueError: If the stream lacks a weight, has one twice, or has an unknown one.
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
                    yield from _merge_layer(self.layers[layer], layer, whole)
                    del whole
            del weight
        if awaited:
            first = next(iter(awaited.values()))
            raise ValueError(f"the stream of weights ended without {len(awaited)} of {self._owner}, such as {first!r}.")


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


def _outermost_layers(model: nn.Module) -> dict[str, Any]:
    """PEFT layers by name, without those nested in another."""
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


def _merge_layer(layer: Any, name: str, weights: dict[str, Tensor]) -> Iterator[Named]:
    """Merge the active adapters of a PEFT layer into a copy of its base; only the layer's structure is read.

    Args:
        layer: The layer.
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


class Gatherer:
    """Collects weights until a group is complete.

    Args:
        sizes: Number of weights in each group.
    """

    def __init__(self, sizes: Mapping[Any, int]) -> None:
        self._sizes = sizes
        self._held: dict[Hashable, dict[str, Tensor]] = {}

    def add(self, group: Hashable, name: str, weight: Tensor) -> dict[str, Tensor] | None:
        """Add one weight.

        Returns:
            All weights of the group by name if this was the last one (they are then dropped); otherwise None.
        """
        held = self._held.setdefault(group, {})
        held[name] = weight
        return self._held.pop(group) if len(held) == self._sizes[group] else None


# Transformers 5 stores the weights of some models differently in memory than in checkpoints, such as all experts of a
# layer in one tensor. It is reversed here as `save_pretrained` does, but on a stream.

_IRREVERSIBLE = (ValueError, NotImplementedError, RuntimeError, TypeError, re.error)
"""Errors that transformers raises for irreversible conversions."""


def _in_checkpoint_form(model: Any, names: Iterable[str], weights: Iterator[Named]) -> Iterator[Named]:
    """Convert a stream of a model's weights to the contents of its checkpoint; holds the weights of one conversion.

    Args:
        model: A transformers model. Its tensors are not read.
        names: Names of all weights in the stream.
        weights: The stream.

    Raises:
        ValueError: At once, if the model's form cannot be reversed; or while reading, if the form of a weight cannot.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter, revert_weight_conversion

    owner = type(model).__name__
    conversions = internals.weight_conversions(model)
    if conversions is None:
        # As in `revert_weight_conversion`: a model that was not loaded from a checkpoint is saved without prefixes.
        found = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [conversion for conversion in found if not isinstance(conversion, PrefixChange)]
    if not conversions:
        return weights

    def refuse(what: str, error: Exception) -> NoReturn:
        raise ValueError(
            f"{owner} stores {what} differently from its checkpoints, and transformers cannot reverse that from the "
            f"weights alone ({type(error).__name__}: {error}); sample with HFRolloutEngine."
        ) from error

    try:
        backwards = [conversion.reverse_transform() for conversion in reversed(conversions)]
    except _IRREVERSIBLE as error:
        refuse("weights", error)
    converters = [conversion for conversion in backwards if isinstance(conversion, WeightConverter)]

    def group(name: str) -> tuple[str, bool]:
        """Key shared by all weights of one conversion: the first name that it writes."""
        for converter in converters:  # at most one converts a weight
            target, pattern = converter.rename_source_key(name)
            if pattern is not None:
                return target, True
        return name, False

    def convert() -> Iterator[Named]:
        gatherer = Gatherer(Counter(map(group, names)))
        for name, weight in weights:
            whole = gatherer.add(group(name), name, weight)
            del weight
            if whole is None:
                continue
            try:
                reverted = revert_weight_conversion(_Structure(model.config, conversions, whole), whole)  # type: ignore[arg-type]
            except _IRREVERSIBLE as error:
                refuse(repr(next(iter(whole))), error)
            whole.clear()
            for target in list(reverted):
                yield target, reverted.pop(target)

    return convert()


class _Structure:
    """The parts of a model that conversions may see: its config, and the weights to convert.

    The model itself is never read, because its tensors may be shards.
    """

    def __init__(self, config: Any, conversions: list[Any], weights: dict[str, Tensor]) -> None:
        self.config = config
        self._weight_conversions = conversions
        self._weights = weights

    def get_parameter(self, name: str) -> Tensor:
        if name not in self._weights:
            raise TypeError(f"the conversion reads {name!r} from the model, which may be sharded")
        return self._weights[name]

    def __getattr__(self, name: str) -> NoReturn:
        raise TypeError(f"the conversion reads {name!r} from the model, which may be sharded")
