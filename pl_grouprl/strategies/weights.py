"""Finds a model's weights, whatever wraps or shards it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pl_grouprl.utilities.distributed import local_shard

_WRAPPERS = {"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"}
"""Name parts added by FSDP1, torch.compile and PyTorch's activation checkpointing."""


class Weight(NamedTuple):
    """The attribute that contains a weight; a strategy may replace the tensor when it gathers or shards it."""

    name: str
    owner: nn.Module
    attribute: str

    def get(self) -> Tensor:
        """The current tensor, detached."""
        tensor: Tensor = getattr(self.owner, self.attribute)
        return tensor.detach()


def plain_name(name: str) -> str:
    """Remove the parts of a name that wrappers added."""
    return ".".join(part for part in name.split(".") if part and part not in _WRAPPERS)


def named_places(model: nn.Module) -> dict[str, Weight]:
    """Parameters and persistent buffers by name, module by module; every name of a tied one maps to its first."""
    found: dict[int, Weight] = {}
    places: dict[str, Weight] = {}
    for prefix, owner in model.named_modules(remove_duplicate=False):
        for attribute, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is None or attribute in owner._non_persistent_buffers_set:
                continue
            name = plain_name(f"{prefix}.{attribute}")
            places[name] = found.setdefault(id(tensor), Weight(name, owner, attribute))
    return places


def weights_of(model: nn.Module) -> list[Weight]:
    """Each parameter and persistent buffer once, module by module, parameters in the order of `named_parameters`."""
    return [weight for name, weight in named_places(model).items() if weight.name == name]


def local_weights(model: nn.Module) -> Iterator[Tensor]:
    """This rank's part of each weight, whole or a shard; `requires_grad` is kept."""
    for weight in weights_of(model):
        tensor = getattr(weight.owner, weight.attribute)
        yield local_shard(tensor).requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def gathered(*contexts: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """Gather weights outside inference mode, in which Lightning validates; the body runs in the caller's mode.

    Args:
        *contexts: Contexts that gather on enter and shard on exit.
    """
    with contextlib.ExitStack() as entered:
        with torch.inference_mode(False), torch.no_grad():
            for context in contexts:
                entered.enter_context(context)
        try:
            yield
        finally:
            with torch.inference_mode(False), torch.no_grad():
                entered.close()
