"""Where the weights of a model are found, whatever surrounds its modules and whoever has cut them into shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pl_grouprl.utilities.distributed import local_shard

_WRAPPERS = {"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"}
"""Parts of names that FSDP1, torch.compile and PyTorch's activation checkpointing put in."""


class Weight(NamedTuple):
    """A place of a weight; a strategy may put another tensor there whenever it gathers or shards it."""

    name: str
    owner: nn.Module
    attribute: str

    def get(self) -> Tensor:
        """What is there now, detached."""
        own: Tensor = getattr(self.owner, self.attribute)
        return own.detach()


def plain_name(name: str) -> str:
    """Remove from a name what wrappers have added."""
    return ".".join(part for part in name.split(".") if part and part not in _WRAPPERS)


def named_places(model: nn.Module) -> dict[str, Weight]:
    """Parameters and persistent buffers by every name, module after module; all names of a tied one have its first."""
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
    """Each parameter and persistent buffer once, those of a module together, parameters as `named_parameters` has."""
    return [weight for name, weight in named_places(model).items() if weight.name == name]


def local_weights(model: nn.Module) -> Iterator[Tensor]:
    """What this rank itself holds of each weight: the whole, or its shard of it. Trained ones require a gradient."""
    for weight in weights_of(model):
        own = getattr(weight.owner, weight.attribute)
        yield local_shard(own).requires_grad_(own.requires_grad)


@contextlib.contextmanager
def gathered(*contexts: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """Enter and leave contexts that gather weights outside of inference mode, in which Lightning validates.

    What is surrounded runs in the caller's mode.
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
