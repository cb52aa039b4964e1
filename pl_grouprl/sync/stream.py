"""A policy's weights as a stream in checkpoint form, with adapters merged or separate.

The functions read a stream of raw weights and the model's structure and config, never the model's tensors, which may
be shards or empty. Only the raw stream is collective: from the same stream, every rank yields the same weights without
communication. It is read to its end, one weight at a time, holding at most the weights of one module with an adapter,
or of one transformers conversion (the experts of a layer).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from pl_grouprl.models.adapter_layers import adapter_layers, base_of
from pl_grouprl.strategies.weights import named_places
from pl_grouprl.sync.checkpoint_form import CheckpointForm, saved_names
from pl_grouprl.sync.routes import PEFT_PREFIX, Routes, plan_routes

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
