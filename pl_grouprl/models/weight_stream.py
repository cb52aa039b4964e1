"""The weights of a policy, on their way to a sampler: adapters merged or apart, in the form of a checkpoint.

Every function takes a stream of a model's raw weights and is a pure function of it and of the model's structure and
config: of the tensors inside the model nothing is read, as they may be shards, or empty. Given the same stream, every
rank yields the same, without communication; all that is collective is in the stream itself, which is read to the end
and one weight at a time. Never more is held of it than the weights of one module with an adapter, or those that one
conversion of transformers needs (the experts of one layer).
"""

from __future__ import annotations

import copy
import json
import warnings
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pl_grouprl.models.adapter_layers import adapter_layers, base_of, remove_adapters
from pl_grouprl.models.checkpoint_form import CheckpointForm, Gatherer, saved_names

Named = tuple[str, Tensor]

_PREFIX = "base_model.model."
"""What PEFT puts in front of names, of its models' parameters and in its files."""

_WRAPPERS = {"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"}
"""Parts of names that FSDP1, torch.compile and PyTorch's activation checkpointing put in."""


def checkpoint_weights(
    model: Any, weights: Iterable[Named], *, adapter: Literal["merged"] = "merged"
) -> Iterator[Named]:
    """Yield what a Hugging Face checkpoint holds of a model whose active adapters are merged into its weights.

    Names and values are those that `merged_copy(model).save_pretrained` writes, bit by bit. A tied weight comes once.
    All ranks that are given the same stream yield the same.

    Args:
        model: A transformers model, with or without PEFT layers, or a `PeftModel`.
        weights: All parameters, by the names of `model.named_parameters()`, and persistent buffers, whole, on any
            device. Tied ones come once, those of a module follow each other. Values must stay as they are until the
            module's last one was read. They are not changed.
        adapter: `merged`; see `adapter_weights` and `base_weights` for an adapter that stays apart.

    Yields:
        Name and value, detached. One may be let go of when the next is asked for.

    Raises:
        ValueError: If the model is quantized or transformers cannot reverse its form, before anything is read; and if
            the stream lacks weights, or has others than the model or one twice, when that is seen.
        TypeError: If it is no transformers model, or PEFT has wrapped modules in a way that cannot be merged.
        RuntimeError: If weights are tied that its class does not declare so.
    """
    if adapter != "merged":
        raise ValueError(
            f"checkpoint_weights(adapter={adapter!r}) is to be 'merged'; take base_weights and adapter_weights for an "
            "adapter that stays apart."
        )
    return _as_saved(model, weights, merge=True)


def base_weights(model: Any, weights: Iterable[Named]) -> Iterator[Named]:
    """Yield what a Hugging Face checkpoint holds of a model without its adapters.

    All ranks that are given the same stream yield the same.

    Args:
        model: As in `checkpoint_weights`.
        weights: As in `checkpoint_weights`; adapters among them are left out.

    Yields:
        Name and value, detached. Modules that PEFT trains as a whole are as they were before.

    Raises:
        ValueError: As `checkpoint_weights` does, and if an adapter was merged into the weights (`merge_adapter`).
        TypeError: As `checkpoint_weights` does.
        RuntimeError: As `checkpoint_weights` does.
    """
    if any(getattr(layer, "merged", False) for layer in adapter_layers(model)):
        raise ValueError(
            f"{type(base_of(model)).__name__} has an adapter merged into its weights, which are no base therefore; "
            "call its unmerge_adapter first."
        )
    return _as_saved(model, weights, merge=False)


def adapter_weights(model: Any, weights: Iterable[Named]) -> Iterator[Named]:
    """Yield what PEFT's file adapter_model.safetensors holds of a model's active adapter.

    All ranks that are given the same stream yield the same.

    Args:
        model: As in `checkpoint_weights`.
        weights: As in `checkpoint_weights`; what is not of the adapter is left out.

    Yields:
        Name, such as `base_model.model.model.layers.0.mlp.up_proj.lora_A.weight`, and value, detached, in the dtype in
        which it is trained. Modules that PEFT trains as a whole are among them, as in its file. Embeddings that were
        resized are not: they are of the base here.

    Raises:
        ValueError: If the model has no adapter, or several are active; or for the stream, as in `checkpoint_weights`.
    """
    base = base_of(model)
    routes, stand_ins = _Routes(type(base).__name__), {}
    for name, weight in _places(base):
        routes.at(name, weight)
        stand_ins[name] = torch.empty(0)
    names = _names_in_file(base, stand_ins)
    route_of = {id(stand_in): routes.by_name[name] for name, stand_in in stand_ins.items()}
    for name, stand_in in names.items():
        route_of[id(stand_in)].names.append(name)
    return routes.follow(weights)


def adapter_config(model: Any) -> dict[str, Any]:
    """What PEFT's file adapter_config.json holds of a model's active adapter, as plain JSON values.

    Args:
        model: As in `checkpoint_weights`.

    Returns:
        PEFT's options by name, such as `peft_type`, `r`, `lora_alpha`, `target_modules`, `use_dora`, `use_rslora`,
        `bias`, `modules_to_save` and `rank_pattern`. Sets of names are lists in order, the same on every rank.

    Raises:
        ValueError: If the model has no adapter, or several are active.
    """
    config: Any = _active_config(base_of(model))[1]
    plain: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=sorted))
    return plain


@dataclass(eq=False)
class _Route:
    """Where one weight of the stream goes.

    Attributes:
        names: By which it is yielded as it is.
        parts: Modules that are merged of it, and its name in each.
    """

    names: list[str] = field(default_factory=list)
    parts: list[tuple[str, str]] = field(default_factory=list)


class _Routes:
    """Where all weights of a stream go."""

    def __init__(self, owner: str) -> None:
        self.by_name: dict[str, _Route] = {}
        self.layers: dict[str, nn.Module] = {}
        self._owner = owner
        self._by_weight: dict[int, _Route] = {}

    def at(self, name: str, weight: Tensor) -> _Route:
        """The route of a weight in the model; tied ones have one."""
        self.by_name[name] = route = self._by_weight.setdefault(id(weight), _Route())
        return route

    def follow(self, weights: Iterable[Named]) -> Iterator[Named]:
        """Read a stream, and yield weights under the names of their routes, and merged modules once they are whole."""
        gatherer = Gatherer(Counter(layer for route in self._by_weight.values() for layer, _ in route.parts))
        awaited = {route: name for name, route in reversed(self.by_name.items())}
        for name, weight in weights:
            route = self.by_name.get(name) or self.by_name.get(name.removeprefix(_PREFIX))
            if route not in awaited:
                raise ValueError(
                    f"the stream of weights has {name!r} "
                    + (f"twice; {self._owner} has it once." if route else f"which {self._owner} does not have.")
                )
            del awaited[route]
            weight = weight.detach()
            for own in route.names:
                yield own, weight
            for layer, inner in route.parts:
                if (whole := gatherer.add(layer, inner, weight)) is not None:
                    yield from _merged(self.layers[layer], layer, whole)
                    del whole
            del weight
        if awaited:
            raise ValueError(
                f"the stream of weights has ended without {len(awaited)} of {self._owner}, such as "
                f"{next(iter(awaited.values()))!r}; pass all parameters and persistent buffers."
            )


def _as_saved(model: Any, weights: Iterable[Named], *, merge: bool) -> Iterator[Named]:
    base = base_of(model)
    if not hasattr(base, "save_pretrained"):
        raise TypeError(
            f"{type(base).__name__} is no transformers model (no save_pretrained), so it has no checkpoint."
        )
    routes, outcome = _plan(base, merge)
    saved = saved_names(base, outcome)
    for route in routes.by_name.values():
        route.names = [name for name in route.names if name in saved]
    form = CheckpointForm(base, [name for name in outcome if name in saved])
    return form.convert(routes.follow(weights))


def _plan(base: nn.Module, merge: bool) -> tuple[_Routes, dict[str, Hashable]]:
    """Where weights go once adapters are merged or taken off.

    Returns:
        The routes, and all names that come of them, with what those of one tied weight have in common.
    """
    routes = _Routes(type(base).__name__)
    routes.layers = _outermost(base)
    outcome: dict[str, Hashable] = {}
    for name, weight in _places(base):
        route = routes.at(name, weight)
        parts = name.split(".")
        above = (".".join(parts[:count]) for count in range(1, len(parts)))
        layer = next((prefix for prefix in above if prefix in routes.layers), None)
        if layer is None:
            route.names.append(name)
            outcome[name] = route
            continue
        inner = name.removeprefix(f"{layer}.")
        plain, merged = _inside(routes.layers[layer], inner, merge)
        if merged:
            route.parts.append((layer, inner))
        elif plain is not None:
            route.names.append(f"{layer}.{plain}")
        if plain is not None:
            outcome[f"{layer}.{plain}"] = (route, layer) if merged else route
    return routes, outcome


def _inside(layer: Any, inner: str, merge: bool) -> tuple[str | None, bool]:
    """What becomes of a weight in a layer of PEFT: its name in the layer's place, if any, and whether it is merged."""
    active = layer.active_adapters
    if not hasattr(layer, "merge"):  # a module that is trained as a whole
        chosen = f"modules_to_save.{active[0]}." if merge and active else "original_module."
        return (inner.removeprefix(chosen) if inner.startswith(chosen) else None), False
    base = ""
    while hasattr(layer, "base_layer"):  # one layer for each of some experts' weights
        layer, base = layer.base_layer, f"{base}base_layer."
    if inner.startswith(base):
        return inner.removeprefix(base), merge
    return None, merge and inner.replace("base_layer.", "").split(".")[1] in active


def _outermost(model: nn.Module) -> dict[str, Any]:
    """PEFT's layers by name, without those inside of another.

    Raises:
        TypeError: If one is of a kind that can neither be merged nor taken off.
    """
    layers, found = set(adapter_layers(model)), {}
    last = "."
    for prefix, module in model.named_modules(remove_duplicate=False):
        name = _clean(prefix)
        if module not in layers or name.startswith(f"{last}."):
            continue
        if not hasattr(module, "merge") and not hasattr(module, "modules_to_save"):
            raise TypeError(f"the {type(module).__name__} of PEFT at {name!r} can neither be merged nor taken off.")
        found[name] = module
        last = name
    return found


def _merged(layer: Any, name: str, weights: dict[str, Tensor]) -> Iterator[Named]:
    """Merge the active adapters of a layer, by PEFT's own arithmetic, on a copy of its base."""
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
    for inner, weight in _places(holder.layer):
        yield f"{name}.{inner}", weight.detach()


def _bare(module: nn.Module, weights: dict[str, Tensor]) -> Any:
    """A module's structure around other weights: without its own, and without hooks of whoever shards those."""
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


def _places(model: nn.Module) -> Iterator[Named]:
    """Parameters and persistent buffers as they are in a model, by every name without wrappers."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, weight in (*module._parameters.items(), *module._buffers.items()):
            if weight is not None and name not in module._non_persistent_buffers_set:
                yield _clean(f"{prefix}.{name}"), weight


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part and part not in _WRAPPERS)


def _active_config(base: Any) -> tuple[str, Any]:
    """The active adapter's name, and PEFT's options of it."""
    layers = adapter_layers(base)
    active = {name for layer in layers for name in layer.active_adapters}
    if len(active) != 1:
        raise ValueError(
            f"{type(base).__name__} has {len(active)} active adapters ({', '.join(sorted(active)) or 'none'}), and one "
            "is to be sent; choose it with set_adapter, or send the weights merged."
        )
    name = active.pop()
    return name, base.peft_config[name]


def _names_in_file(base: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """PEFT's choice of the active adapter's weights among all, by the names of its file."""
    from peft import get_peft_model_state_dict

    adapter, config = _active_config(base)
    source, config.base_model_name_or_path = config.base_model_name_or_path, None  # for which PEFT would ask the hub
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Setting `save_embedding_layers`")
            chosen = get_peft_model_state_dict(base, state_dict=state, adapter_name=adapter)
    finally:
        config.base_model_name_or_path = source
    return {f"{_PREFIX}{name}": value for name, value in chosen.items()}
