"""States of a prompt, with which its rollouts can run in later calls, so a group need not fit into one call.

These are the keys and values of attention layers, and the final states of stateful layers. The call on the prompt
fills a `PrefixStates`; later calls read it, with layouts in which the prompt's tokens are given.

Legend: P tokens of the prompt, K key/value heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pl_grouprl.packing import SharedPrefixLayout

Name = tuple[str | int, ...]
"""A tensor's role in its layer: `("key",)`, `("recurrent", 0)` and so on."""


class PrefixStates:
    """Tensors by layer and name. Pass it to a decoder as `prefix_states`, together with `prefix_layout`.

    Args:
        tensors: The prompt's states. None makes an empty one, which the call on the prompt fills.
    """

    def __init__(self, tensors: dict[tuple[nn.Module, Name], Tensor] | None = None) -> None:
        self._tensors = {} if tensors is None else tensors
        self._recording = tensors is None
        self._with_gradient = torch.is_grad_enabled()

    def keep(self, layer: nn.Module, name: Name, tensor: Tensor) -> None:
        """Record a layer's tensor. Does nothing after the call, when layers are recomputed.

        Raises:
            NotImplementedError: If the layer runs twice in a call, or its result would have no gradient.
        """
        if not self._recording:
            return
        kind = type(layer).__name__
        if self._with_gradient and not torch.is_grad_enabled():
            raise NotImplementedError(
                f"{kind} runs without gradient on the prompt of a split group, as activation checkpointing with "
                "use_reentrant=True does. Use use_reentrant=False, or a larger token budget."
            )
        if (layer, name) in self._tensors:
            raise NotImplementedError(
                f"{kind} runs several times per forward, so the group cannot be split; use a larger token budget."
            )
        self._tensors[layer, name] = tensor

    def close(self) -> None:
        """Stop recording: the prompt's call is over."""
        self._recording = False

    def pop_all(self) -> dict[tuple[nn.Module, Name], Tensor]:
        """Return the recorded tensors and forget them.

        Activation checkpointing keeps this object, as an argument of layers, so tensors left in it would keep their own
        graph alive forever.
        """
        tensors, self._tensors = self._tensors, {}
        return tensors

    def of(self, layer: nn.Module) -> dict[Name, Tensor]:
        """The tensors of a layer.

        Raises:
            RuntimeError: If there are none.
        """
        found = {name: tensor for (owner, name), tensor in self._tensors.items() if owner is layer}
        if not found:
            raise RuntimeError(
                f"prefix_states has nothing for a {type(layer).__name__}; pass the one filled by this model's call "
                "on the prompt."
            )
        return found

    def join(self, layer: nn.Module, layout: SharedPrefixLayout, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Prepend the given tokens' keys and values; when recording a prompt, record its own.

        Args:
            layer: The attention module.
            layout: The forest of the row.
            key: Keys of the tokens that run, shape [1, K, S, D].
            value: Values, likewise.
        """
        if not layout.given:
            length = layout.segments[0].length  # without padding for sequence parallelism
            self.keep(layer, ("key",), key[:, :, :length])
            self.keep(layer, ("value",), value[:, :, :length])
            return key, value
        given = self.of(layer)
        return (
            torch.cat([given["key",].to(key.dtype), key], dim=2),
            torch.cat([given["value",].to(value.dtype), value], dim=2),
        )


def check_prefix_states(states: PrefixStates | None, layout: SharedPrefixLayout) -> None:
    """Refuse a row that does not match the states.

    Raises:
        ValueError: If tokens are given without states, or more than one prompt is to be recorded.
    """
    if states is None:
        if layout.given:
            raise ValueError(f"prefix_layout gives {layout.given} tokens; pass their states as prefix_states.")
    elif not layout.given and any(segment.length for segment in layout.segments[1:]):
        raise ValueError("prefix_states is filled by a row of one prompt; pass its layout, without rollouts.")
