"""Triton kernels for a block of logits: read and write each logit once, compute in float32.

Legend: N tokens, C columns (token ids) of one block.
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

_WIDTH = 4096
"""Logits per program: 16 for each of its 256 threads."""


def sum_rows(logits_NC: Tensor, column_N: Tensor, temperature: float, keep_exp: bool) -> tuple[Tensor, ...]:
    """Return max, exp, square and moment of `softmax.Sums`, each [N] in float32.

    Args:
        logits_NC: The block, contiguous along C.
        column_N: Column of each row's target, which is excluded; any invalid column if it is in another block.
        temperature: Divides the logits.
        keep_exp: Leave e^(z-m) in `logits_NC`, 0 in the target's place.
    """
    rows, width = logits_NC.shape
    sums = logits_NC.new_empty(4, rows, dtype=torch.float32).unbind()
    if rows:
        with torch.cuda.device_of(logits_NC):
            _sum_rows[(rows,)](
                logits_NC, column_N, *sums, width, logits_NC.stride(0), temperature,
                KEEP=keep_exp, WIDTH=min(_WIDTH, triton.next_power_of_2(width)), num_warps=8,
            )  # fmt: skip
    return sums


def write_rows(
    logits_NC: Tensor,
    result_NC: Tensor,
    log_total_N: Tensor,
    temperature: float,
    factor_N: Tensor,
    entropy_factor_N: Tensor | None,
) -> None:
    """Write p (a + b z') with z' = z - log_total and p = e^z' to `result_NC`, which may be `logits_NC`.

    Args:
        logits_NC: The block, contiguous along C.
        result_NC: Output, with the same strides.
        log_total_N: Log of the sum of e^z over the vocabulary.
        temperature: Divides the logits.
        factor_N: a.
        entropy_factor_N: b; zero if None.
    """
    rows, width = logits_NC.shape
    if rows:
        with torch.cuda.device_of(logits_NC):
            _write_rows[(rows, triton.cdiv(width, _WIDTH))](
                logits_NC, result_NC, log_total_N, factor_N.contiguous(), entropy_factor_N,
                width, logits_NC.stride(0), result_NC.stride(0), temperature,
                MOMENT=entropy_factor_N is not None, WIDTH=min(_WIDTH, triton.next_power_of_2(width)), num_warps=8,
            )  # fmt: skip


@triton.jit
def _sum_rows(  # type: ignore[no-untyped-def]
    logits, columns, out_max, out_exp, out_square, out_moment, width, stride, temperature,
    KEEP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    own = tl.load(columns + row)
    start_of_row = logits + row * stride
    largest, total, square, moment = -1e30, 0.0, 0.0, 0.0
    for start in range(0, width, WIDTH):
        column = start + tl.arange(0, WIDTH)
        z = tl.load(start_of_row + column, mask=column < width, other=-float("inf")).to(tl.float32) / temperature
        z = tl.where(column == own, -float("inf"), z)
        new = tl.maximum(largest, tl.max(z, 0))
        below = largest - new
        scale = tl.exp(below)
        z = z - new
        e = tl.exp(z)
        moment = (moment + below * total) * scale + tl.sum(e * tl.maximum(z, -1e30), 0)
        square = square * scale * scale + tl.sum(e * e, 0)
        total = total * scale + tl.sum(e, 0)
        largest = new
    tl.store(out_max + row, largest)
    tl.store(out_exp + row, total)
    tl.store(out_square + row, square)
    tl.store(out_moment + row, moment)
    if KEEP:
        for start in range(0, width, WIDTH):
            column = start + tl.arange(0, WIDTH)
            z = tl.load(start_of_row + column, mask=column < width, other=-float("inf")).to(tl.float32) / temperature
            e = tl.where(column == own, 0.0, tl.exp(z - largest))
            tl.store(start_of_row + column, e.to(logits.dtype.element_ty), mask=column < width)


@triton.jit
def _write_rows(  # type: ignore[no-untyped-def]
    logits, result, log_total, factor, entropy_factor, width, stride, result_stride, temperature,
    MOMENT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < width
    z = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32) / temperature
    z = z - tl.load(log_total + row)
    gradient = tl.load(factor + row)
    if MOMENT:
        gradient = gradient + tl.load(entropy_factor + row) * tl.maximum(z, -1e30)
    gradient = gradient * tl.exp(z)
    tl.store(result + row * result_stride + column, gradient.to(result.dtype.element_ty), mask=inside)
