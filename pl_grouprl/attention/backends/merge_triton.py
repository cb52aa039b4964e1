"""Merges partial attention outputs in one Triton kernel: reads and writes each number once, computes in float32.

Legend: S packed tokens that run, N of them that are merged, H query heads, E head size of values.
"""
# ruff: noqa: ANN001, ANN202, N803 - Triton reads annotations of a kernel as its own types

from __future__ import annotations

import torch
from torch import Tensor

from pl_grouprl.utilities.optional import Absent

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:
    triton = tl = Absent("triton")

from pl_grouprl.attention.backends.kernels import Index

_ROWS = 16
"""Token heads per program: with 128 numbers each, 16 numbers for each of its 128 threads."""


def merge_triton(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, where: Index) -> None:
    """See `pl_grouprl.attention.backends.cascade.merge`; `out` and `part` must be contiguous along E."""
    if isinstance(where, slice):
        out, lse, index = out[where], lse[:, where], None
    else:
        index = where
    tokens, heads, size = part.shape
    with torch.cuda.device_of(out):
        _merge[(triton.cdiv(tokens * heads, _ROWS),)](
            out, lse, part, part_lse, index, tokens * heads, heads, size,
            out.stride(0), out.stride(1), lse.stride(0), lse.stride(1),
            part.stride(0), part.stride(1), part_lse.stride(0), part_lse.stride(1),
            HAS_INDEX=index is not None, ROWS=_ROWS, SIZE=triton.next_power_of_2(size),
        )  # fmt: skip


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    out, lse, part, part_lse, index, num_rows, heads, size,
    out_token, out_head, lse_head, lse_token, part_token, part_head, part_lse_head, part_lse_token,
    HAS_INDEX: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SIZE)
    in_rows = row < num_rows
    inside = in_rows[:, None] & (column < size)[None, :]
    token, head = row // heads, row % heads
    target = tl.load(index + token, mask=in_rows, other=0) if HAS_INDEX else token
    lse_at = lse + head * lse_head + target * lse_token
    out_at = out + (target * out_token + head * out_head)[:, None] + column[None, :]
    old_lse = tl.load(lse_at, mask=in_rows, other=0.0).to(tl.float32)
    new_lse = tl.load(part_lse + head * part_lse_head + token * part_lse_token, mask=in_rows, other=0.0).to(tl.float32)
    old = tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
    new = tl.load(part + (token * part_token + head * part_head)[:, None] + column[None, :], mask=inside, other=0.0).to(
        tl.float32
    )
    share = tl.sigmoid(new_lse - old_lse)
    tl.store(out_at, (old + share[:, None] * (new - old)).to(out.dtype.element_ty), mask=inside)
    largest = tl.maximum(old_lse, new_lse)
    total = largest + tl.log(1.0 + tl.exp(tl.minimum(old_lse, new_lse) - largest))
    tl.store(lse_at, total, mask=in_rows)
