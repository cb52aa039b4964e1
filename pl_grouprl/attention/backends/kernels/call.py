"""Variable-length attention calls, and the interface of kernels that run them.

Legend: Q query tokens of a call, M key tokens of a call, H query heads, K key/value heads (H is a multiple of K),
D head size of queries and keys, E head size of values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol, TypeVar

import torch
from torch import Tensor

_Made = TypeVar("_Made")

Index = slice | Tensor
"""Tokens of a packed row: a range, or their indices."""


def take(packed: Tensor, index: Index) -> Tensor:
    """Index a packed tensor: a view for a slice, else a copy."""
    return packed[index] if isinstance(index, slice) else packed.index_select(0, index)


def put(packed: Tensor, index: Index, part: Tensor) -> None:
    """Overwrite tokens of a packed tensor."""
    if isinstance(index, slice):
        packed[index] = part
    else:
        packed.index_copy_(0, index, part)


@dataclass(frozen=True)
class VarlenCall:
    """Independent attention problems in one call: the i-th run of queries attends to the i-th run of keys.

    Attributes:
        query_lens: Number of queries of each problem, all positive.
        key_lens: Number of keys of each problem, likewise.
        causal: Whether a query sees only keys up to its position. The last query of a run is aligned with the last
            key: query i of n is at key i + m - n of m, and m >= n. Otherwise each query sees all keys.
        window: Maximum number of keys that a query of a causal call sees, including its own; None for no limit.
        queries: The tokens of the packed row that query, problem by problem. No token queries twice.
        keys: The tokens whose keys and values they attend to, likewise; a token may be in several problems.

    Raises:
        ValueError: If the lengths do not match, or a window is below 1 or given without `causal`.
    """

    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    causal: bool
    window: int | None = None
    queries: Index = field(default_factory=lambda: slice(None), compare=False)
    keys: Index = field(default_factory=lambda: slice(None), compare=False)
    _memo: dict[Hashable, object] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.query_lens) != len(self.key_lens):
            raise ValueError(
                f"query_lens has {len(self.query_lens)} runs and key_lens {len(self.key_lens)}; pass one run of keys "
                "for each run of queries."
            )
        if min((*self.query_lens, *self.key_lens), default=1) < 1:
            raise ValueError("query_lens or key_lens has a run without tokens; leave such a problem out of the call.")
        if self.causal and any(m < n for n, m in zip(self.query_lens, self.key_lens, strict=True)):
            raise ValueError("key_lens of a causal call has a run shorter than its queries; each query needs its key.")
        if self.window is not None and not (self.causal and self.window >= 1):
            raise ValueError(
                f"window={self.window} with causal={self.causal}; a window is at least 1 and needs a causal call."
            )

    def to(self, device: torch.device) -> VarlenCall:
        """Move the indices to a device."""
        queries, keys = (i if isinstance(i, slice) else i.to(device) for i in (self.queries, self.keys))
        return replace(self, queries=queries, keys=keys, _memo={})

    @property
    def effective_window(self) -> int | None:
        """The window, or None if it hides no key."""
        return None if self.window is None or self.window >= max(self.key_lens, default=0) else self.window

    def cumulative(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Offsets of the runs of queries and of keys on the device, shape [problems + 1] each, int32."""

        def offsets(lens: tuple[int, ...]) -> Tensor:
            return torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device)

        return self.memo(("cumulative", device), lambda: (offsets(self.query_lens), offsets(self.key_lens)))

    def memo(self, key: Hashable, make: Callable[[], _Made]) -> _Made:
        """Cache something that a kernel derives from this call."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]  # type: ignore[return-value]


class VarlenKernel(Protocol):
    """The two primitives. Both take the tensors of a packed row: query [S, H, D], key [T, K, D] and value [T, K, E].

    They yield the results of a call in parts, each with the N queries and M keys of the row that it is about.
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, call: VarlenCall, scale: float
    ) -> Iterator[tuple[Index, Tensor, Tensor]]:
        """Yield queries, their output [N, H, E] and the log-sum-exp of their scores [H, N] (float32 or wider).

        Each query of the call is in one part.
        """

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
        """Yield queries, keys and gradients of query [N, H, D], key [M, K, D] and value [M, K, E], to be added up.

        If `out` and `lse` come from a softmax over more keys than this call has, the result is this call's share of
        the gradients.
        """


MAX_CUDA_HEAD_SIZE = 256
"""Of FlashAttention."""

CUDA_HEAD_MULTIPLE = 8
"""FlashAttention takes head sizes that are multiples of this."""


def has_fused_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a fused kernel serves these tensors, [..., D] each, heads padded to one size where they differ."""
    if query.is_cuda:
        half = query.dtype in (torch.bfloat16, torch.float16)
        return half and max(key.shape[-1], value.shape[-1]) <= MAX_CUDA_HEAD_SIZE
    return query.device.type == "cpu"


def head_multiple(query: Tensor) -> int:
    """The number that the fused kernel needs head sizes to be a multiple of."""
    return CUDA_HEAD_MULTIPLE if query.is_cuda else 1
