"""Layer states with which later calls continue earlier tokens, so that a group need not fit into one call.

These are the keys and values of attention layers, and the final states of stateful layers. A call on the prompt fills a
`PrefixStates`. Calls whose layout marks the prompt's tokens as prefilled read it. A call on a branch also fills
another, for calls that continue both.

Legend: K key/value heads, S tokens that run, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pl_grouprl.attention.recorded import Leaf, Name, Prefilled, States
from pl_grouprl.packing import SharedPrefixLayout


class PrefixStates:
    """Tensors by layer and name. Pass it to a decoder as `prefix_states`, together with `prefix_layout`.

    Args:
        path: The states of the prefilled tokens: of the prompt, then of each branch down to the tokens that run.
        record: Whether the call fills it with the states of the tokens that run.
        recomputes: Whether activation checkpointing runs the layers again in the backward pass.

    Attributes:
        records: Whether it still takes states; `close` ends that.
    """

    def __init__(self, path: Sequence[States] = (), *, record: bool, recomputes: bool = False) -> None:
        self._path, self.records, self._recomputes = tuple(path), record, recomputes
        self._leaves: States = {}
        self._with_gradient = torch.is_grad_enabled()

    def keep(self, layer: nn.Module, name: Name, tensor: Tensor) -> None:
        """Record a layer's tensor. Does nothing after the call, when layers are recomputed.

        Raises:
            NotImplementedError: If the layer runs twice in a call, or its result would have no gradient.
        """
        if not self.records:
            return
        kind = type(layer).__name__
        if self._with_gradient and not torch.is_grad_enabled():
            raise NotImplementedError(
                f"{kind} runs without gradient on what a split group shares, as activation checkpointing with "
                "use_reentrant=True does. Use use_reentrant=False, or a larger token budget."
            )
        if name in self._leaves.setdefault(layer, {}):
            raise NotImplementedError(
                f"{kind} runs several times per forward, so the group cannot be split; use a larger token budget."
            )
        self._leaves[layer][name] = Leaf(tensor)

    def close(self) -> None:
        """Stop recording: the call is over."""
        self.records = False

    def pop_all(self) -> States:
        """Return the recorded tensors and forget them.

        Activation checkpointing keeps this object, as an argument of layers, so tensors left in it would keep their own
        graph alive forever.
        """
        leaves, self._leaves = self._leaves, {}
        return leaves

    def last(self, layer: nn.Module) -> dict[Name, Tensor]:
        """The latest tensors of a layer by name: those of the lowest branch that has them, or of the prompt.

        Raises:
            RuntimeError: If there are none.
        """
        last = {name: states for states in self._path for name in states.get(layer, ())}
        _check_found(layer, last)
        return {name: Prefilled((states,), layer, name).join() for name, states in last.items()}

    def join(self, layer: nn.Module, layout: SharedPrefixLayout, key: Tensor, value: Tensor) -> JoinedStates:
        """Prepend the keys and values of the prefilled tokens; record those of the tokens that run, if recording.

        Args:
            layer: The attention module.
            layout: The forest of the row.
            key: Keys of the tokens that run, shape [1, K, S, D].
            value: Values, likewise.

        Raises:
            RuntimeError: If there are none of the prefilled tokens.
        """
        if self.records:
            length = layout.segments[1 if layout.num_prefilled else 0].length  # without the padding of a sequence group
            self.keep(layer, ("key",), key[:, :, :length])
            self.keep(layer, ("value",), value[:, :, :length])
        path = self._path if layout.num_prefilled else ()
        if layout.num_prefilled:
            _check_found(layer, any(layer in states for states in path))
        return JoinedStates(path, layer, key, value, by_parts=not self._recomputes)


def _check_found(layer: nn.Module, found: object) -> None:
    if not found:
        raise RuntimeError(
            f"prefix_states has nothing for a {type(layer).__name__}; pass the one filled by this model's call "
            "on the prompt."
        )


class JoinedStates:
    """Keys and values of the prefilled tokens and of those that run, concatenated.

    In the context `saved_by_parts`, autograd saves the parts in place of the concatenation, which would be another copy
    of the path in each layer, for each branch on it.

    Args:
        path: The states of the prefilled tokens.
        layer: The attention module.
        key: Keys of the tokens that run, shape [1, K, S, D].
        value: Values, likewise.
        by_parts: False saves the concatenation, for layers recomputed in the backward pass, which keep neither.

    Attributes:
        key: All keys, in the dtype of the last ones.
        value: All values.
    """

    def __init__(
        self, path: Sequence[States], layer: nn.Module, key: Tensor, value: Tensor, *, by_parts: bool = True
    ) -> None:
        self._by_parts = by_parts and len(path) > 0
        self._parts = [(Prefilled(path, layer, (name,)), own) for name, own in (("key", key), ("value", value))]
        self.key, self.value = (prefilled.join(own, dim=2) for prefilled, own in self._parts)

    def saved_by_parts(self) -> AbstractContextManager[Any]:
        """Context in which autograd saves the parts, wherever it would save a view of `key` or `value`."""
        if not self._by_parts:
            return nullcontext()
        storages = [joined.untyped_storage()._cdata for joined in (self.key, self.value)]
        parts = [(prefilled, own.detach()) for prefilled, own in self._parts]

        def pack(tensor: Tensor) -> Any:
            storage = tensor.untyped_storage()._cdata
            if storage not in storages:
                return tensor
            return parts[storages.index(storage)], tensor.shape, tensor.stride(), tensor.storage_offset()

        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            (prefilled, own), *view = saved
            return prefilled.concatenated(own, dim=2).as_strided(*view)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def check_prefix_states(states: PrefixStates | None, layout: SharedPrefixLayout) -> None:
    """Refuse a row that does not match the states.

    Raises:
        ValueError: If prefilled tokens come without their states, or a row to be recorded has more than one segment.
    """
    if states is None:
        if layout.num_prefilled:
            raise ValueError(
                f"prefix_layout has num_prefilled={layout.num_prefilled}; pass the states of these tokens as "
                "prefix_states."
            )
    elif (
        states.records
        and sum(bool(segment.length) for segment in layout.segments if segment.start >= layout.num_prefilled) > 1
    ):
        raise ValueError(
            "prefix_states can record a row of one prompt or one branch only; pass its layout, without rollouts."
        )
