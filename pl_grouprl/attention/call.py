"""A packed row's layout, and all else that the layers of one decoder call share.

Legend: T tokens of a row, S of them that run, H query heads, K key/value heads, D head size; t = T / s tokens of each
of s peers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pl_grouprl.packing import SharedPrefixLayout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass
class LayoutCall:
    """A layout, passed through one forward of a decoder.

    Attributes:
        layout: The forest of the packed row.
        ran: The modules that followed it, by identity: their kind of layer, and what ran it.
        only: Kind of the layers that run the chosen backend, while others run the reference; None for all layers.
        shards: How the row is split over ranks; None if this rank has all of it.
        states: States of the prefilled tokens; if there are none, records those of the row's tokens.
        columns_T: Columns of the tokens in the caller's rows, for layers that count them; None uses positions.
        dense: Whether layers get a dense mask, because they compute with it, instead of a marker.
        owner: The `SharedPrefix` context that started the call.
        rows: The caller's rows (`SharedRows`), to which its output is unpacked; None if the caller packed the row.
        expects_cache: Whether the caller expects a cache in the output.
    """

    layout: SharedPrefixLayout
    ran: dict[int, tuple[str, str]] = field(default_factory=dict)
    only: str | None = None
    shards: RowShards | None = None
    states: PrefixStates | None = None
    columns_T: Tensor | None = None
    dense: bool = False
    owner: Any = None
    rows: Any = None
    expects_cache: bool = False

    def note(self, module: nn.Module, kind: str, runner: str) -> None:
        """Note that a module followed the layout: its kind of layer, and what ran it."""
        self.ran[id(module)] = (kind, runner)

    def kinds(self) -> dict[str, tuple[str, int]]:
        """For each kind of layer, what ran it and the number of layers."""
        counts = Counter(self.ran.values())
        return {kind: (backend, counts[kind, backend]) for kind, backend in sorted(counts)}


PACKED_ROW: ContextVar[LayoutCall | None] = ContextVar("packed_row", default=None)
"""The call on a packed row that a decoder is running; None in an ordinary call.

A global suffices for what is decided once per call: masks are created before the layers, and a layer's contexts of
checkpointing before its forward pass, never when it is recomputed.
"""

# Layer states with which later calls continue earlier tokens, so that a group need not fit into one call: the keys and
# values of attention layers, and final states of stateful layers. A call on the prompt fills a `PrefixStates`; calls
# whose layout marks the prompt's tokens as prefilled read it. A call on a branch also fills another, for calls that
# continue both. Each call has its own graph, which ends at the `Leaf` tensors of earlier calls. Its backward adds
# to their gradients, and theirs runs last.

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


def _concatenate(leaves: Sequence[Leaf], own: Tensor | None, dim: int) -> Tensor:
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
        return _concatenate(leaves, own, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        leaves = ctx.prefilled.leaves()
        *parts, own = gradients[0].split([*(leaf.data.shape[ctx.dim] for leaf in leaves), ctx.own_size], ctx.dim)
        for leaf, part in zip(leaves, parts, strict=True):
            if leaf.recorded.requires_grad:
                leaf.add(part)
        return None, None, None, own if ctx.own_size else None, None


class PrefixStates:
    """Tensors by layer and name. Pass it to a decoder as `prefix_states`, together with `prefix_layout`.

    Args:
        path: The states of the prefilled tokens: of the prompt, then of each branch down to the tokens that run.
        record: Whether the call fills it with the states of the tokens that run.
        recomputes: Whether activation checkpointing runs the layers again in the backward pass.

    Attributes:
        records: Whether it still takes states; False once the call is over.
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
            raise NotImplementedError(f"{kind} has no gradient; set use_reentrant=False or a larger token budget.")
        if name in self._leaves.setdefault(layer, {}):
            raise NotImplementedError(f"{kind} runs several times per forward; use a larger token budget.")
        self._leaves[layer][name] = Leaf(tensor)

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
        if not last:
            raise RuntimeError(f"prefix_states has nothing for a {type(layer).__name__}; pass this model's.")
        return {name: Prefilled((states,), layer, name).join() for name, states in last.items()}

    def join(self, layer: nn.Module, layout: SharedPrefixLayout, key: Tensor, value: Tensor) -> JoinedStates:
        """Prepend the keys and values of the prefilled tokens; record those of the tokens that run, if recording.

        Args:
            layer: The attention module.
            layout: The forest of the row.
            key: Keys of the tokens that run, shape [1, K, S, D].
            value: Values, likewise.
        """
        if self.records:
            length = layout.segments[1 if layout.num_prefilled else 0].length  # without the padding of a sequence group
            self.keep(layer, ("key",), key[:, :, :length])
            self.keep(layer, ("value",), value[:, :, :length])
        path = self._path if layout.num_prefilled else ()
        return JoinedStates(path, layer, key, value, by_parts=not self._recomputes)


class JoinedStates:
    """Keys and values of the prefilled and of the running tokens, concatenated.

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

    def __init__(self, path: Sequence[States], layer: nn.Module, key: Tensor, value: Tensor, *, by_parts: bool) -> None:
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
            return _concatenate(prefilled.leaves(), own, dim=2).as_strided(*view)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class RowShards:
    """How a packed row is split over the peers of a sequence group (DeepSpeed-Ulysses, arXiv:2309.14509).

    Each of s peers has t consecutive tokens of the row. An all-to-all before attention turns that into all T tokens of
    H / s heads, and one after it back, so attention sees the whole row.

    Args:
        group: The s peers, which all run the same row.
        num_tokens: Tokens of the row that run, without the padding at its end.

    Attributes:
        num_peers: s.
        num_padding: Padding that makes the row's length a multiple of s.
        own_tokens: This peer's t tokens in the row, including padding.
    """

    def __init__(self, group: ProcessGroup, num_tokens: int) -> None:
        self.group, self.num_tokens, self.num_peers = group, num_tokens, group.size()
        tokens_per_peer = math.ceil(num_tokens / self.num_peers)
        self.num_padding = self.num_peers * tokens_per_peer - num_tokens
        start = group.rank() * tokens_per_peer
        self.own_tokens = slice(start, start + tokens_per_peer)

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange other peers' heads for their tokens: [1, H, t, D] to [1, H / s, T, D], in one all-to-all.

        If s does not divide the key/value heads, they are repeated, so each peer has the heads that its queries need.

        Raises:
            ValueError: If s does not divide H.
        """
        check_heads(query.shape[1], self.num_peers)
        copies = math.lcm(key.shape[1], self.num_peers) // key.shape[1]
        parts = [
            tensor[0].transpose(0, 1).unflatten(1, (self.num_peers, -1)).transpose(0, 1)  # [s, t, heads / s, D]
            for tensor in (query, key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1))
        ]
        received = _Exchange.apply(torch.cat([part.flatten(1) for part in parts], 1), self.group)
        shares = received.split([part[0].numel() for part in parts], 1)
        query, key, value = (
            share.unflatten(1, part.shape[1:]).flatten(0, 1).transpose(0, 1)[None]
            for share, part in zip(shares, parts, strict=True)
        )
        return query, key, value

    def to_tokens(self, attended: Tensor) -> Tensor:
        """Reverse the exchange for attention's output: [1, T, H / s, D] to [1, t, H, D]."""
        parts = attended[0].unflatten(0, (self.num_peers, -1))
        received = _Exchange.apply(parts, self.group)  # [s, t, H / s, D]
        return received.transpose(0, 1).flatten(1, 2)[None]

    def own_heads(self, per_head_H: Tensor | None) -> Tensor | None:
        """This peer's share of a per-head tensor."""
        return None if per_head_H is None else per_head_H.chunk(self.num_peers)[self.group.rank()]

    def gather(self, local: Tensor, dim: int) -> Tensor:
        """Concatenate all peers' tokens along `dim`, without padding; the peers' gradients of the result add up."""
        parts = local.movedim(dim, 0).expand(self.num_peers, *local.movedim(dim, 0).shape)
        received = _Exchange.apply(parts, self.group)
        return received.flatten(0, 1)[: self.num_tokens].movedim(0, dim)


class _Exchange(torch.autograd.Function):
    """Sends part i of [s, ...] to peer i: an all-to-all of equal parts, which is its own transpose."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grads[0], ctx.group), None


def _all_to_all(parts: Tensor, group: ProcessGroup) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


def check_heads(num_heads: int, num_peers: int) -> None:
    """Check that query heads can be split equally over peers.

    Raises:
        ValueError: If they cannot.
    """
    if num_heads % num_peers:
        raise ValueError(f"sequence_parallel_size={num_peers} does not divide the {num_heads} query heads of a layer.")
