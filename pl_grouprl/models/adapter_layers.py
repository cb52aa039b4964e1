"""What can be done with a model that has PEFT layers: switch them off, copy it without them, merge them in a copy.

Copies are structural. They share the storage of every weight that stays as it is, so they cost next to nothing.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn


def adapter_layers(model: nn.Module) -> list[Any]:
    """PEFT's layers, and modules that it trains as a whole, in a model; none where PEFT has not been imported."""
    if "peft" not in sys.modules:
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)]


def has_adapters(model: nn.Module) -> bool:
    """Whether there are PEFT layers in a model."""
    return bool(adapter_layers(model))


def base_of(model: Any) -> Any:
    """The transformers model inside a `PeftModel`; any other model is its own."""
    inner = getattr(model, "get_base_model", None)
    return model if inner is None else inner()


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Run a model as its base, without gradient: a recomputed activation would not know of the switch.

    Afterwards the adapters that were on are on again, and every parameter is trained or frozen as before.

    Raises:
        ValueError: If the model has no adapters, or weights of its own are trained beside them (biases, say): without
            the adapters it would be no base.
    """
    layers = adapter_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no adapters to switch off; score a copy of the base instead.")
    switched = [layer for layer in layers if not layer.disable_adapters]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for layer in switched:
            layer.enable_adapters(False)  # and freezes them
        other = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        if other:
            raise ValueError(
                f"{type(model).__name__} trains {len(other)} weights beside its adapters, such as {other[0]!r}, so "
                "that it is no base without them; freeze those."
            )
        with torch.no_grad():
            yield
    finally:
        for layer in switched:
            layer.enable_adapters(True)
        for parameter, requires_grad in trained:
            parameter.requires_grad_(requires_grad)


def aliased_copy(model: nn.Module) -> tuple[Any, dict[nn.Parameter, str]]:
    """Copy a model's modules, not its weights.

    Returns:
        The copy, whose parameters are frozen aliases of the model's storage, and the name in the model of each of them.
    """
    aliases = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    # The memo makes the copy take the aliases where it meets a parameter.
    duplicate = copy.deepcopy(model, dict(aliases))
    return duplicate, {aliases[id(parameter)]: name for name, parameter in model.named_parameters()}


def merged_copy(model: Any) -> Any:
    """Copy a model with its active adapters merged into its weights, as a plain transformers model.

    The copy is frozen. Weights without an adapter are aliases of the model's.
    """
    duplicate, _ = aliased_copy(base_of(model))
    for layer in adapter_layers(duplicate):
        if hasattr(layer, "merge"):
            base = layer.get_base_layer()
            for name, parameter in list(base.named_parameters(recurse=False)):
                setattr(base, name, nn.Parameter(parameter.clone(), requires_grad=False))
            with torch.no_grad():
                layer.merge()
    remove_adapters(duplicate, keep_trained=True)
    return duplicate


def remove_adapters(model: nn.Module, *, keep_trained: bool = False) -> None:
    """Put the layers that PEFT has wrapped back in its layers' places.

    Args:
        model: Changed in place.
        keep_trained: Of modules that PEFT trained as a whole, put the trained one in its place, not the original.

    Raises:
        TypeError: If there is a wrapper of a kind that has neither.
    """
    if not has_adapters(model):
        return
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    for name, child in list(model.named_children()):
        if isinstance(child, BaseTunerLayer):
            setattr(model, name, child.get_base_layer())
        elif isinstance(child, ModulesToSaveWrapper):
            trained = child.modules_to_save[child.active_adapters[0]]
            setattr(model, name, trained if keep_trained else child.original_module)
        elif isinstance(child, AuxiliaryTrainingWrapper):
            raise TypeError(f"a {type(child).__name__} of PEFT cannot be removed from {type(model).__name__}.{name}.")
        else:
            remove_adapters(child, keep_trained=keep_trained)
    if "peft_config" in vars(model):
        del model.peft_config  # type: ignore[attr-defined]
        model._hf_peft_config_loaded = False  # type: ignore[assignment]


def leave_parameters_out_of_checkpoints(module: nn.Module, names: Iterable[str]) -> None:
    """Keep parameters out of the `state_dict` of a module, and of all that contains it, and do not miss them.

    For weights that are made again from their source. The hooks are functions of this file, as a module could not be
    pickled with local ones.

    Args:
        module: Gets the hooks.
        names: Of parameters, as in its own `state_dict`.
    """
    names = list(names)
    module.register_state_dict_post_hook(partial(_drop, names))
    module.register_load_state_dict_pre_hook(partial(_fill_in, names))


def leave_frozen_parameters_out_of_checkpoints(module: nn.Module, child: str) -> None:
    """Keep the frozen parameters of a child out of the checkpoints of a module."""
    parameters = getattr(module, child).named_parameters(remove_duplicate=False)
    leave_parameters_out_of_checkpoints(
        module, [f"{child}.{name}" for name, parameter in parameters if not parameter.requires_grad]
    )


def _drop(names: list[str], module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    for name in names:
        state.pop(prefix + name, None)


def _fill_in(names: list[str], module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    own = dict(module.named_parameters(remove_duplicate=False))
    for name in names:
        state.setdefault(prefix + name, own[name])
