"""What an attention backend is.

Legend: T packed tokens, H query heads, K key/value heads (H is a multiple of K), D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pl_grouprl.packing import SharedPrefixLayout

Attend = Callable[[Tensor, Tensor, Tensor, SharedPrefixLayout, float], Tensor]
"""(query [1, H, T, D], key [1, K, T, D], value [1, K, T, D], layout, scale) -> output [1, T, H, D], differentiable."""


@dataclass(frozen=True)
class Backend:
    """One way to compute attention over a packed row.

    Attributes:
        name: As passed to `shared_prefix(model, backend=...)`.
        attend: The computation.
        refusal: Why it cannot serve these tensors, with the remedy, or None if it can.
        value_size_may_differ: Whether heads of `value` may have another size than those of `key`.
        max_depth: Deepest forest that it can run: 1 is prompts with rollouts; None is any.
    """

    name: str
    attend: Attend
    refusal: Callable[[Tensor, Tensor, Tensor], str | None] = lambda query, key, value: None
    value_size_may_differ: bool = False
    max_depth: int | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, layout: SharedPrefixLayout, scale: float) -> Tensor:
        """Attend, or say why not.

        Raises:
            ValueError: If the row and the layout differ in tokens, or the forest is deeper than the backend can run.
            RuntimeError: If the backend cannot serve the device, dtype or need of a gradient.
        """
        if query.shape[0] != 1 or query.shape[2] != layout.num_tokens:
            raise ValueError(
                f"prefix_layout has {layout.num_tokens} tokens, but the model was given input of shape "
                f"[{query.shape[0]}, {query.shape[2]}]; pass one packed row, of shape [1, {layout.num_tokens}]."
            )
        if self.max_depth is not None and max(layout.depths, default=0) > self.max_depth:
            raise ValueError(
                f"attention backend {self.name!r} runs forests of depth {self.max_depth}, this layout has depth "
                f"{max(layout.depths)}; use backend 'cascade' or 'flex'."
            )
        reason = self.refusal(query, key, value)
        if key.shape[-1] != value.shape[-1] and not self.value_size_may_differ:
            reason = f"keys have head size {key.shape[-1]} and values {value.shape[-1]}; use backend 'reference'."
        if reason is not None:
            raise RuntimeError(f"attention backend {self.name!r} refuses: {reason}")
        return self.attend(query, key, value, layout, scale)


def needs_gradient(*tensors: Tensor) -> bool:
    """Whether a backward pass through a call with these tensors is to be expected."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
