"""One packed row on the peers of a sequence group: split by tokens between attention calls, by heads inside them.

DeepSpeed-Ulysses, arXiv:2309.14509. Each of s peers has T / s consecutive tokens of the row. An all-to-all before
attention turns that into all T tokens of H / s heads, and one after it back, so attention sees the whole row.

Legend: T tokens of the row with padding, t = T / s tokens of a peer, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class RowShards:
    """How a packed row is split over the peers of a sequence group; passed along with the layout.

    Attributes:
        group: The s peers, which all run the same row.
        num_tokens: Tokens of the row that run, without the padding at its end.
    """

    group: ProcessGroup
    num_tokens: int

    @property
    def num_peers(self) -> int:
        """S."""
        return self.group.size()

    @property
    def tokens_per_peer(self) -> int:
        """t, including padding."""
        return math.ceil(self.num_tokens / self.num_peers)

    @property
    def num_padding(self) -> int:
        """Padding that makes the row's length a multiple of s."""
        return self.num_peers * self.tokens_per_peer - self.num_tokens

    @property
    def own_tokens(self) -> slice:
        """This peer's tokens in the row."""
        start = self.group.rank() * self.tokens_per_peer
        return slice(start, start + self.tokens_per_peer)

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange other peers' heads for their tokens: [1, H, t, D] to [1, H / s, T, D], in one all-to-all.

        If s does not divide the key/value heads, they are repeated, so each peer has those that its query heads need.

        Raises:
            ValueError: If s does not divide H.
        """
        check_heads(query.shape[1], self.num_peers)
        copies = math.lcm(key.shape[1], self.num_peers) // key.shape[1]
        parts = [
            tensor[0].transpose(0, 1).unflatten(1, (self.num_peers, -1)).transpose(0, 1)  # [s, t, heads / s, D]
            for tensor in (query, key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1))
        ]
        received = self._exchange(torch.cat([part.flatten(1) for part in parts], 1))
        shares = received.split([part[0].numel() for part in parts], 1)
        query, key, value = (
            share.unflatten(1, part.shape[1:]).flatten(0, 1).transpose(0, 1)[None]
            for share, part in zip(shares, parts, strict=True)
        )
        return query, key, value

    def to_tokens(self, attended: Tensor) -> Tensor:
        """Reverse the exchange for attention's output: [1, T, H / s, D] to [1, t, H, D]."""
        received = self._exchange(attended[0].unflatten(0, (self.num_peers, -1)))  # [s, t, H / s, D]
        return received.transpose(0, 1).flatten(1, 2)[None]

    def own_heads(self, per_head_H: Tensor | None) -> Tensor | None:
        """This peer's share of a per-head tensor."""
        return None if per_head_H is None else per_head_H.chunk(self.num_peers)[self.group.rank()]

    def gather(self, local: Tensor, dim: int) -> Tensor:
        """Concatenate all peers' tokens along `dim`, without padding; the peers' gradients of the result add up."""
        received = self._exchange(local.movedim(dim, 0).expand(self.num_peers, *local.movedim(dim, 0).shape))
        return received.flatten(0, 1)[: self.num_tokens].movedim(0, dim)

    def _exchange(self, parts: Tensor) -> Tensor:
        """Send part i of [s, ...] to peer i; returns the parts received, in the same shape."""
        return _Exchange.apply(parts, self.group)


class _Exchange(torch.autograd.Function):
    """An all-to-all of equal parts; it is its own transpose."""

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
    """Refuse query heads that cannot be split equally over peers.

    Raises:
        ValueError: Gives both numbers.
    """
    if num_heads % num_peers:
        divisors = [str(size) for size in range(1, num_heads + 1) if num_heads % size == 0]
        raise ValueError(
            f"sequence_parallel_size={num_peers} does not divide the {num_heads} query heads of an attention layer; "
            f"choose one of {', '.join(divisors)}."
        )
