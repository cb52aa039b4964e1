"""What a prompt leaves behind for the rollouts that continue it in later calls: a group need not run in one call.

Attention layers leave their keys and values, layers with a state their final state. The call of the prompt alone fills
a `PrefixStates`; calls whose layout gives the prompt's tokens read one.

Legend: P tokens of the prompt, K key/value heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pl_grouprl.packing import SharedPrefixLayout

Name = tuple[str | int, ...]
"""What a tensor is in its layer: `("key",)`, `("recurrent", 0)` and the like."""


class PrefixStates:
    """Tensors by layer and name. Pass it to a decoder as `prefix_states`, beside `prefix_layout`.

    Args:
        tensors: What the prompt left. None makes one that the next call, that of the prompt, fills.
    """

    def __init__(self, tensors: dict[tuple[nn.Module, Name], Tensor] | None = None) -> None:
        self._tensors = {} if tensors is None else tensors
        self._recording = tensors is None
        self._with_gradient = torch.is_grad_enabled()

    def keep(self, layer: nn.Module, name: Name, tensor: Tensor) -> None:
        """Record what a layer leaves. In a recomputation, when the call is over, that does nothing.

        Raises:
            NotImplementedError: If the layer runs twice in a call, or its result would carry no gradient.
        """
        if not self._recording:
            return
        kind = type(layer).__name__
        if self._with_gradient and not torch.is_grad_enabled():
            raise NotImplementedError(
                f"{kind} runs without gradient in the pass of a prompt whose group is split, as under activation "
                "checkpointing with use_reentrant=True. Use use_reentrant=False, or a larger token budget."
            )
        if (layer, name) in self._tensors:
            raise NotImplementedError(
                f"{kind} runs several times in one forward, where a group cannot be split; use a larger token budget."
            )
        self._tensors[layer, name] = tensor

    def close(self) -> None:
        """The prompt's call is over."""
        self._recording = False

    def take_out(self) -> dict[tuple[nn.Module, Name], Tensor]:
        """Hand over what was recorded and forget it.

        A recomputation holds on to the arguments of its layer, and with them to this object: a recorded tensor kept
        here would keep its own graph alive for ever.
        """
        tensors, self._tensors = self._tensors, {}
        return tensors

    def of(self, layer: nn.Module) -> dict[Name, Tensor]:
        """What a layer left.

        Raises:
            RuntimeError: If it left nothing.
        """
        found = {name: tensor for (owner, name), tensor in self._tensors.items() if owner is layer}
        if not found:
            raise RuntimeError(
                f"prefix_states holds nothing of a {type(layer).__name__}; pass what this model's call of the "
                "prompt has filled."
            )
        return found

    def join(self, layer: nn.Module, layout: SharedPrefixLayout, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the whole row: those of the given tokens in front; a prompt's own are recorded.

        Args:
            layer: The attention module.
            layout: The forest of the row.
            key: Of the tokens that are run, shape [1, K, S, D].
            value: Likewise.
        """
        if not layout.given:
            length = layout.segments[0].length  # without filler of a sequence group
            self.keep(layer, ("key",), key[:, :, :length])
            self.keep(layer, ("value",), value[:, :, :length])
            return key, value
        given = self.of(layer)
        return (
            torch.cat([given["key",].to(key.dtype), key], dim=2),
            torch.cat([given["value",].to(value.dtype), value], dim=2),
        )


def check_prefix_states(states: PrefixStates | None, layout: SharedPrefixLayout) -> None:
    """Refuse a row that does not go with them.

    Raises:
        ValueError: If tokens are given without their states, or states are to be recorded of more than one prompt.
    """
    if states is None:
        if layout.given:
            raise ValueError(f"prefix_layout gives {layout.given} tokens; pass what they left as prefix_states.")
    elif not layout.given and any(segment.length for segment in layout.segments[1:]):
        raise ValueError("prefix_states is filled by a row of one prompt alone; pass its layout, without rollouts.")
