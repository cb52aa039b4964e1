"""Operations on models with PEFT layers: disable them, copy the model without them, merge them into a copy.

Copies share the storage of every unchanged weight, so they cost next to nothing.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from pl_grouprl.models.quantization import dequantize
from pl_grouprl.utilities import internals


def adapter_layers(model: nn.Module) -> list[Any]:
    """A model's PEFT layers, and modules that PEFT trains in full; empty if PEFT has not been imported."""
    if "peft" not in sys.modules:
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)]


def has_adapters(model: nn.Module) -> bool:
    """Whether a model has PEFT layers."""
    return bool(adapter_layers(model))


def base_of(model: Any) -> Any:
    """Unwrap a `PeftModel`; return other models unchanged."""
    inner = getattr(model, "get_base_model", None)
    return model if inner is None else inner()


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable a model's adapters, and gradients, since activation checkpointing would recompute with adapters.

    On exit, the active adapters and each parameter's `requires_grad` are restored.

    Raises:
        ValueError: If the model has no adapters, or also trains other weights (such as biases), so that disabling the
            adapters would not give the base model.
    """
    layers = adapter_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no adapters to switch off; score a copy of the base instead.")
    switched = [layer for layer in layers if not layer.disable_adapters]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for layer in switched:
            layer.enable_adapters(False)  # also freezes them
        other = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        if other:
            raise ValueError(
                f"{type(model).__name__} trains {len(other)} weights besides its adapters, such as {other[0]!r}, so "
                "it is not the base model without them; freeze those."
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
        The copy, whose parameters are frozen aliases of the model's storage, and the name of each in the model.
    """
    aliases = {id(p): _alias(p) for p in model.parameters()}
    scales = {id(p.quant_state): p.quant_state for p in model.parameters() if hasattr(p, "quant_state")}
    # The memo makes deepcopy use the aliases, and share the scales of 4-bit weights.
    duplicate = copy.deepcopy(model, {**aliases, **scales})
    return duplicate, {aliases[id(parameter)]: name for name, parameter in model.named_parameters()}


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    if hasattr(parameter, "quant_state"):
        return copy.copy(parameter)
    return nn.Parameter(parameter.detach(), requires_grad=False)


def merged_copy(model: Any, state: dict[str, Tensor] | None = None) -> Any:
    """Copy a model with its active adapters merged into its weights, as a plain transformers model.

    The copy is frozen. Weights without an adapter alias the model's, except those of 4-bit layers, which are
    dequantized first.

    Args:
        model: The model.
        state: The weights to copy, if they are not its own; see `StrategySupport.full_state_dict`.
    """
    duplicate, _ = aliased_copy(base_of(model))
    if state is not None:
        duplicate.load_state_dict(state, assign=True)
    dequantize(duplicate)
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
    """Replace PEFT's layers with the layers they wrap.

    Args:
        model: Changed in place.
        keep_trained: Keep the trained version of modules that PEFT trained in full, not the original.

    Raises:
        TypeError: If a wrapper has neither.
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
        internals.mark_adapted(model, False)


def leave_parameters_out_of_checkpoints(module: nn.Module, names: Iterable[str]) -> None:
    """Leave parameters out of `state_dict`, of the module and its parents, and do not report them missing.

    For weights recreated from their source. The hooks are module-level functions, so the module can be pickled.

    Args:
        module: The module that gets the hooks.
        names: Parameter names, as in its `state_dict`.
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
    left_out = {prefix + name for name in names}
    for key in list(state):
        if not left_out.isdisjoint(accumulate(key.split("."), "{}.{}".format)):  # also the scales of 4-bit weights
            del state[key]


def _fill_in(names: list[str], module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name in names:
        state.setdefault(prefix + name, parameters[name])
