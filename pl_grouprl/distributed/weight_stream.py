"""A policy's weights as a stream in checkpoint form, with adapters merged or separate."""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from pl_grouprl.distributed.strategies import Weight, named_places, plain_name
from pl_grouprl.models.adapters import adapter_layers, base_of, remove_adapters
from pl_grouprl.utilities import internals

# Routes each weight of a model to its names in a checkpoint, or into a merged layer.

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


# Converts a model's weights to the names and layout in which transformers saves them.
#
# Transformers 5 stores the weights of some models differently in memory than in checkpoints, such as all experts of a
# layer in one tensor. `CheckpointForm` reverses that as `save_pretrained` does, but on a stream: it holds at most the
# weights of one conversion.

Key = TypeVar("Key", bound=Hashable)


class Gatherer(Generic[Key]):
    """Collects weights until a group is complete.

    Args:
        sizes: Number of weights in each group.
    """

    def __init__(self, sizes: Mapping[Key, int]) -> None:
        self._sizes = sizes
        self._held: dict[Key, dict[str, Tensor]] = {}

    def add(self, group: Key, name: str, weight: Tensor) -> dict[str, Tensor] | None:
        """Add one weight.

        Returns:
            All weights of the group by name if this was the last one (they are then dropped); otherwise None.
        """
        held = self._held.setdefault(group, {})
        held[name] = weight
        return self._held.pop(group) if len(held) == self._sizes[group] else None


def saved_names(model: Any, names: Mapping[str, Hashable]) -> set[str]:
    """Names under which `save_pretrained` saves weights: one each, even for tied weights with several names.

    Args:
        model: A transformers model.
        names: Names of all weights, each with a key shared by all names of a tied weight.

    Raises:
        RuntimeError: If weights are tied but not declared as tied by the model's class, which transformers cannot save.
    """
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    stand_ins = {weight: torch.empty(1) for weight in set(names.values())}
    state = {name: stand_ins[weight] for name, weight in names.items()}
    return remove_tied_weights_from_state_dict(state, model).keys() - internals.unsaved_names(model)


class CheckpointForm:
    """Converts a stream of a model's weights to the contents of its checkpoint.

    Args:
        model: A transformers model. Its tensors are not read.
        names: Names of all weights in the stream.

    Raises:
        ValueError: If the model is quantized, or its form cannot be reversed.
    """

    def __init__(self, model: Any, names: Iterable[str]) -> None:
        self._owner = type(model).__name__
        if getattr(model, "hf_quantizer", None) is not None:
            raise ValueError(
                f"{self._owner} is quantized (quantization_config), so its weights are not those of a checkpoint; "
                "load it without quantization."
            )
        self._conversions = _conversions(model)
        self._config = model.config
        self._converters = self._reversed_converters()
        self._gatherer = Gatherer(Counter(map(self._group, names)))

    def convert(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield names and weights as in a checkpoint; those that need no conversion immediately.

        Raises:
            ValueError: If a weight's form cannot be reversed.
        """
        for name, weight in weights:
            if not self._conversions:
                yield name, weight
            elif (whole := self._gatherer.add(self._group(name), name, weight)) is not None:
                yield from self._reverted(whole)
            del weight

    def _reverted(self, weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        from transformers.core_model_loading import revert_weight_conversion

        structure = _Structure(self._config, self._conversions, weights)
        try:
            reverted = revert_weight_conversion(structure, weights)  # type: ignore[arg-type]
        except _IRREVERSIBLE as error:
            self._refuse(repr(next(iter(weights))), error)
        weights.clear()
        for name in list(reverted):
            yield name, reverted.pop(name)

    def _reversed_converters(self) -> list[Any]:
        """Conversions that change more than names, in the order of `revert_weight_conversion`."""
        from transformers.core_model_loading import WeightConverter

        try:
            backwards = [conversion.reverse_transform() for conversion in reversed(self._conversions)]
        except _IRREVERSIBLE as error:
            self._refuse("weights", error)
        return [conversion for conversion in backwards if isinstance(conversion, WeightConverter)]

    def _group(self, name: str) -> tuple[str, bool]:
        """Key shared by all weights of one conversion: the first name that it writes."""
        for converter in self._converters:  # at most one converts a weight
            target, pattern = converter.rename_source_key(name)
            if pattern is not None:
                return target, True
        return name, False

    def _refuse(self, what: str, error: Exception) -> NoReturn:
        raise ValueError(
            f"{self._owner} stores {what} differently from its checkpoints, and transformers cannot reverse that "
            f"from the weights alone ({type(error).__name__}: {error}); sample with HFRolloutEngine."
        ) from error


_IRREVERSIBLE = (ValueError, NotImplementedError, RuntimeError, TypeError, re.error)
"""Errors that transformers raises for irreversible conversions."""


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


def _conversions(model: Any) -> list[Any]:
    """The conversions from the checkpoint's form to the model's; empty if they are the same."""
    conversions = internals.weight_conversions(model)
    if conversions is not None:
        return conversions
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    # As in `revert_weight_conversion`: a model that was not loaded from a checkpoint is saved without prefixes.
    found = get_model_conversion_mapping(model, add_legacy=False)
    return [conversion for conversion in found if not isinstance(conversion, PrefixChange)]


# A policy's weights as a stream in checkpoint form, with adapters merged or separate.
#
# The functions read a stream of raw weights and the model's structure and config, never the model's tensors, which may
# be shards or empty. Only the raw stream is collective: from the same stream, every rank yields the same weights
# without
# communication. It is read to its end, one weight at a time, holding at most the weights of one module with an adapter,
# or of one transformers conversion (the experts of a layer).

Named = tuple[str, Tensor]


def checkpoint_weights(model: Any, weights: Iterable[Named]) -> Iterator[Named]:
    """Yield the contents of a Hugging Face checkpoint of a model, with active adapters merged into its weights.

    Names and values are exactly those that `merged_copy(model).save_pretrained` writes. A tied weight comes once. For a
    separate adapter see `base_weights` and `adapter_weights`.

    Args:
        model: A transformers model, with or without PEFT layers, or a `PeftModel`.
        weights: Names, as in `model.named_parameters()`, and whole values of all parameters and persistent buffers, on
            any device. A tied weight comes once. The weights of a module are consecutive, and must not change until the
            last of them was read. They are not modified.

    Yields:
        Name and detached value. Each may be released when the next is requested.

    Raises:
        ValueError: Before reading, if the model is quantized or transformers cannot reverse its form; while reading, if
            a weight of the stream is missing, repeated, or not in the model.
        TypeError: If it is not a transformers model, or PEFT wrapped modules in a way that cannot be merged.
        RuntimeError: If weights are tied but not declared as tied by its class.
    """
    return _as_saved(model, weights, merge=True)


def base_weights(model: Any, weights: Iterable[Named]) -> Iterator[Named]:
    """Yield the contents of a Hugging Face checkpoint of a model without its adapters.

    Args:
        model: As in `checkpoint_weights`.
        weights: As in `checkpoint_weights`; adapters among them are left out.

    Yields:
        Name and detached value. Modules that PEFT trains whole have their original weights.

    Raises:
        ValueError: As in `checkpoint_weights`, and if an adapter was merged into the weights (`merge_adapter`).
        TypeError: As in `checkpoint_weights`.
        RuntimeError: As in `checkpoint_weights`.
    """
    if any(getattr(layer, "merged", False) for layer in adapter_layers(model)):
        raise ValueError(
            f"{type(base_of(model)).__name__} has an adapter merged into its weights, so they are not the base; call "
            "its unmerge_adapter first."
        )
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
    base = base_of(model)
    routes, stand_ins = Routes(type(base).__name__), {}
    for name, weight in named_places(base).items():
        routes.add(name, weight)
        stand_ins[name] = torch.empty(0)
    names = _names_in_file(base, stand_ins)
    route_of = {id(stand_in): routes.by_name[name] for name, stand_in in stand_ins.items()}
    for name, stand_in in names.items():
        route_of[id(stand_in)].names.append(name)
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


def _as_saved(model: Any, weights: Iterable[Named], *, merge: bool) -> Iterator[Named]:
    base = base_of(model)
    if not hasattr(base, "save_pretrained"):
        raise TypeError(
            f"{type(base).__name__} is not a transformers model (no save_pretrained), so it has no checkpoint."
        )
    routes, outcome = plan_routes(base, merge=merge)
    saved = saved_names(base, outcome)
    for route in routes.by_name.values():
        route.names = [name for name in route.names if name in saved]
    form = CheckpointForm(base, [name for name in outcome if name in saved])
    return form.convert(routes.follow(weights))


def _active_config(base: Any) -> tuple[str, Any]:
    """The active adapter's name and PEFT config."""
    layers = adapter_layers(base)
    active = {name for layer in layers for name in layer.active_adapters}
    if len(active) != 1:
        raise ValueError(
            f"{type(base).__name__} has {len(active)} active adapters ({', '.join(sorted(active)) or 'none'}), but "
            "only one can be sent; choose it with set_adapter, or send the weights merged."
        )
    name = active.pop()
    return name, base.peft_config[name]


def _names_in_file(base: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The active adapter's weights, as chosen by PEFT, by their names in its file."""
    from peft import get_peft_model_state_dict

    adapter, config = _active_config(base)
    source, config.base_model_name_or_path = config.base_model_name_or_path, None  # PEFT would look it up on the hub
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Setting `save_embedding_layers`")
            chosen = get_peft_model_state_dict(base, state_dict=state, adapter_name=adapter)
    finally:
        config.base_model_name_or_path = source
    return {f"{PEFT_PREFIX}{name}": value for name, value in chosen.items()}
