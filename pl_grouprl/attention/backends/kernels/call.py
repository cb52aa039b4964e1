"""Variable-length attention calls, and the interface of kernels that run them.

Legend: Q query tokens of a call, M key tokens of a call, H query heads, K key/value heads (H is a multiple of K),
D head size of queries and keys, E head size of values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol, TypeVar

import torch
from torch import Tensor

_Made = TypeVar("_Made")


@dataclass(frozen=True)
class VarlenCall:
    """Independent attention problems in one call: the i-th run of queries attends to the i-th run of keys.

    Attributes:
        query_lens: Number of queries of each problem, all positive; the call's queries are these runs, concatenated.
        key_lens: Number of keys of each problem, likewise.
        causal: Whether a query sees only keys up to its position. The last query of a run is aligned with the last
            key: query i of n is at key i + m - n of m, and m >= n. Otherwise each query sees all keys.
        window: Maximum number of keys that a query of a causal call sees, including its own; None for no limit.

    Raises:
        ValueError: If the lengths do not match, or a window is below 1 or given without `causal`.
    """

    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    causal: bool
    window: int | None = None
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
    """The two primitives. Both take packed tensors: query [Q, H, D], key [M, K, D] and value [M, K, E]."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, call: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return the output [Q, H, E] and the log-sum-exp of the scores [H, Q] (float32 or wider)."""

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value, given the output's gradient.

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
