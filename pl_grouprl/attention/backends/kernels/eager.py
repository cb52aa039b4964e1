"""Attention forward and backward in plain PyTorch: any device and dtype, another head size for values, capped scores.

Legend: R runs of a batch, N queries of each, M keys of each, H query heads, K key/value heads, G = H / K, D head size
of queries and keys, E head size of values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pl_grouprl.attention.backends.kernels.call import Index, VarlenCall
from pl_grouprl.attention.backends.kernels.runs import Block, dense_blocks

MAX_SCORES = 2**24
"""Approximate limit on the number of scores in memory at a time."""


@dataclass(frozen=True)
class EagerKernel:
    """Matrix products and exponentials in float32 or wider.

    Attributes:
        softcap: If set, a score s becomes softcap * tanh(s / softcap) (Gemma 2, arXiv:2408.00118, sec. 2).
    """

    softcap: float | None = None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, call: VarlenCall, scale: float
    ) -> Iterator[tuple[Index, Tensor, Tensor]]:
        """See `VarlenKernel.forward`."""
        wide = torch.promote_types(query.dtype, torch.float32)
        for block in _blocks(query, call):
            with _without_autocast(query):
                keys, values = (block.keys.take(tensor).to(wide) for tensor in (key, value))
                queries = _fold(block.queries.take(query).to(wide), keys.shape[1])
                scores, _ = self._scores(queries, keys, block, query.shape[1], scale)
                part_lse = scores.logsumexp(-1, keepdim=True)
                part = scores.sub_(part_lse).exp_() @ values
                out, lse = _unfold(part, query.shape[1]), _unfold(part_lse, query.shape[1])[..., 0]
            yield block.queries.tokens, block.queries.flat(out).to(query.dtype), block.queries.flat_lse(lse)

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        call: VarlenCall,
        scale: float,
    ) -> Iterator[tuple[Index, Index, Tensor, Tensor, Tensor]]:
        """See `VarlenKernel.backward`."""
        wide = torch.promote_types(query.dtype, torch.float32)
        heads, kv_heads = query.shape[1], key.shape[1]
        for block in _blocks(query, call):
            with _without_autocast(query):
                keys, values = (block.keys.take(tensor).to(wide) for tensor in (key, value))
                queries = _fold(block.queries.take(query).to(wide), kv_heads)
                grads = block.queries.take(grad, blank=True).to(wide)
                delta = _fold((grads * block.queries.take(out)).sum(-1, keepdim=True), kv_heads)
                grads = _fold(grads, kv_heads)
                scores, slope = self._scores(queries, keys, block, heads, scale)
                weights = scores.sub_(_fold(block.queries.take_lse(lse)[..., None], kv_heads)).exp_()
                grad_scores = (grads @ values.mT).sub_(delta).mul_(weights)
                if slope is not None:
                    grad_scores.mul_(slope)
                for_query = _unfold((grad_scores @ keys).mul_(scale), heads)
                for_key = (grad_scores.mT @ queries).mul_(scale)
                for_value = weights.mT @ grads
            flat_key, flat_value = block.keys.flat(for_key), block.keys.flat(for_value)
            yield block.queries.tokens, block.keys.tokens, block.queries.flat(for_query), flat_key, flat_value

    def _scores(
        self, queries: Tensor, keys: Tensor, block: Block, heads: int, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        """Scores of a block, minus infinity where hidden, and the cap's slope, if any: [R, K, G * N, M] each."""
        scores = queries @ keys.mT * scale  # a copy: selective checkpointing may have saved the product
        slope = None
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_()
            slope = 1 - scores.square()
            scores.mul_(self.softcap)
        hidden = block.hidden()
        if hidden is not None:
            # Folding keeps the N queries of a head together, and all heads have the same mask.
            scores.unflatten(2, (heads // keys.shape[1], -1)).masked_fill_(hidden[:, None], float("-inf"))
        return scores, slope


def _without_autocast(query: Tensor) -> torch.autocast:
    """Disable autocast, which would round the factors of matrix products."""
    return torch.autocast(query.device.type, enabled=False)


def _blocks(query: Tensor, call: VarlenCall) -> Iterator[Block]:
    """Blocks of queries and keys, cut to about `MAX_SCORES` scores at most; padded batches stay whole."""
    for block in dense_blocks(call, query.device, plain_causal=False):
        yield from block.cut(max(1, MAX_SCORES // (query.shape[1] * block.keys.length)))


def _fold(batch: Tensor, kv_heads: int) -> Tensor:
    """[R, H, N, D] -> [R, K, G * N, D]: the queries of all heads that share a key/value head as one run."""
    return batch.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def _unfold(batch: Tensor, heads: int) -> Tensor:
    """The inverse of `_fold`: [R, K, G * N, D] -> [R, H, N, D]."""
    return batch.unflatten(2, (heads // batch.shape[1], -1)).flatten(1, 2)
