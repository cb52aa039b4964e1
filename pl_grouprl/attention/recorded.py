"""Tensors that earlier calls recorded, detached from their graphs, and what joins them to those of a later call.

Each call has a graph of its own, which ends at the `Leaf` tensors of the calls before it. Its backward adds to their
gradients, and theirs runs last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Name = tuple[str | int, ...]
"""A tensor's role in its layer: `("key",)`, `("recurrent", 0)` and so on."""


class Leaf:
    """A recorded tensor, and the sum of the gradients that later calls have for it.

    Attributes:
        recorded: The tensor, still in its graph.
        data: The same without its graph.
        gradient: The sum, in float32 or wider; None before the first.
    """

    def __init__(self, recorded: Tensor) -> None:
        self.recorded, self.data = recorded, recorded.detach()
        self.gradient: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        """Add a gradient to the sum."""
        if self.gradient is None:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            self.gradient = gradient.to(wide, copy=True)  # not a view of a gradient of the whole path
        else:
            self.gradient += gradient


States = dict[nn.Module, dict[Name, Leaf]]
"""The tensors of one call, by layer and name."""


class Prefilled(NamedTuple):
    """A tensor of each call of a path.

    Attributes:
        path: The states of the calls, the prompt's first.
        layer: Which layer's tensor.
        name: Its role there.
    """

    path: Sequence[States]
    layer: nn.Module
    name: Name

    def leaves(self) -> list[Leaf]:
        """Those of the calls that recorded one."""
        return [own[self.name] for states in self.path if self.name in (own := states.get(self.layer, {}))]

    def join(self, own: Tensor | None = None, *, dim: int = 0) -> Tensor:
        """Concatenate them and what runs now; their gradients are added to the leaves.

        The graph holds this object, not the leaves, so its size does not grow with the length of the path.

        Args:
            own: What runs now, in whose dtype the result is; None if that is nothing.
            dim: The dimension of tokens.
        """
        leaves = self.leaves()
        if not leaves:
            assert own is not None
            return own
        # Makes the result require a gradient, even if only the leaves do.
        is_trained = any(leaf.recorded.requires_grad for leaf in leaves)
        anchor = torch.empty(0, device=leaves[0].data.device, requires_grad=is_trained)
        return _Join.apply(self, leaves, dim, own, anchor)

    def concatenated(self, own: Tensor, *, dim: int) -> Tensor:
        """The same without gradient."""
        return _concatenated(self.leaves(), own, dim)


def _concatenated(leaves: Sequence[Leaf], own: Tensor | None, dim: int) -> Tensor:
    dtype = leaves[0].data.dtype if own is None else own.dtype
    parts = [leaf.data if leaf.data.dtype == dtype else leaf.data.to(dtype) for leaf in leaves]
    parts += [] if own is None else [own]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0].detach()


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, prefilled: Prefilled, leaves: Sequence[Leaf], dim: int, own: Tensor | None, anchor: Tensor
    ) -> Tensor:
        ctx.prefilled, ctx.dim = prefilled, dim
        ctx.own_size = 0 if own is None else own.shape[dim]
        return _concatenated(leaves, own, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        leaves = ctx.prefilled.leaves()
        *parts, own = gradients[0].split([*(leaf.data.shape[ctx.dim] for leaf in leaves), ctx.own_size], ctx.dim)
        for leaf, part in zip(leaves, parts, strict=True):
            if leaf.recorded.requires_grad:
                leaf.add(part)
        return None, None, None, own if ctx.own_size else None, None
