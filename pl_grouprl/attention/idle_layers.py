"""Layers that do not run in the check on entry, such as cross-attention to images, which text alone does not reach.

The check says nothing about them, so they refuse packed rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from pl_grouprl.attention.mask import is_marker


def layers_of(decoder: nn.Module) -> list[nn.Module]:
    """The decoder's layers: its longest list of modules."""
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=[]))


@contextmanager
def tracking_idle_layers(decoder: nn.Module) -> Iterator[list[nn.Module]]:
    """Yields the decoder's layers; a layer leaves the list when it runs."""
    idle = layers_of(decoder)

    def note(layer: nn.Module, args: Any) -> None:
        if any(layer is one for one in idle):
            idle.remove(layer)

    handles = [layer.register_forward_pre_hook(note) for layer in idle]
    try:
        yield idle
    finally:
        for handle in handles:
            handle.remove()


def refuse_packed_row(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook of such a layer.

    Raises:
        NotImplementedError: If a packed row reaches it.
    """
    if kwargs.get("prefix_layout") is not None or any(map(is_marker, (*args, *kwargs.values()))):
        raise NotImplementedError(
            f"{type(layer).__name__} did not run on text alone, so it was not compared between a shared and a repeated "
            "prefix; train this model with sharing='repeated'."
        )
