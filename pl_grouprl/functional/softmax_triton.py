"""Triton kernels for a block of logits: one launch per block and pass, computed in float32.

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
"""Logits of a row per step of a program: 16 for each of its 256 threads."""


def add_rows(
    logits_NC: Tensor,
    targets_N: Tensor,
    start: int,
    temperature: float,
    target_N: Tensor,
    max_N: Tensor,
    exp_N: Tensor,
    square_N: Tensor | None,
    moment_N: Tensor | None,
    scale_N: Tensor | None,
) -> None:
    """Add a block to running sums, in place; see `softmax.Sums`. All are in float32, contiguous.

    Args:
        logits_NC: The block, contiguous along C; e^(z-m) overwrites it, 0 in the target's place, if `scale_N` is given.
        targets_N: Token ids.
        start: The block's first token id.
        temperature: Divides the logits.
        target_N: z of the targets.
        max_N: m.
        exp_N: Sum of e^(z-m).
        square_N: Sum of e^2(z-m), if requested.
        moment_N: Sum of (z-m) e^(z-m), if requested.
        scale_N: Output, e^(m' - m) with the earlier maximum m', by which further sums over earlier blocks shrink.
    """
    rows, width = logits_NC.shape
    if rows:
        with torch.cuda.device_of(logits_NC):
            _add_rows[(rows,)](
                logits_NC, targets_N.contiguous(), target_N, max_N, exp_N, square_N, moment_N, scale_N,
                start, width, logits_NC.stride(0), temperature,
                SQUARE=square_N is not None, MOMENT=moment_N is not None, KEEP=scale_N is not None,
                WIDTH=min(_WIDTH, triton.next_power_of_2(width)), num_warps=8,
            )  # fmt: skip


def write_rows(
    logits_NC: Tensor,
    result_NC: Tensor,
    targets_N: Tensor,
    start: int,
    log_total_N: Tensor,
    temperature: float,
    target_N: Tensor,
    factor_N: Tensor,
    entropy_factor_N: Tensor | None,
) -> None:
    """Write the gradient with respect to a block of logits; see `softmax.LogitsGradient` for the last five arguments.

    Args:
        logits_NC: The block, contiguous along C.
        result_NC: Output, contiguous along C; may be `logits_NC`.
        targets_N: Token ids.
        start: The block's first token id.
        log_total_N: Like the other tensors of the gradient, in float32, contiguous.
        temperature: Divides the logits.
        target_N: The gradient with respect to the target's logit.
        factor_N: alpha.
        entropy_factor_N: beta; zero if None.
    """
    rows, width = logits_NC.shape
    if rows:
        with torch.cuda.device_of(logits_NC):
            _write_rows[(rows, triton.cdiv(width, _WIDTH))](
                logits_NC, result_NC, targets_N.contiguous(), log_total_N, target_N, factor_N, entropy_factor_N,
                start, width, logits_NC.stride(0), result_NC.stride(0), temperature,
                MOMENT=entropy_factor_N is not None, WIDTH=min(_WIDTH, triton.next_power_of_2(width)), num_warps=8,
            )  # fmt: skip


@triton.jit
def _add_rows(  # type: ignore[no-untyped-def]
    logits, targets, sum_target, sum_max, sum_exp, sum_square, sum_moment, out_scale,
    block_start, width, stride, temperature,
    SQUARE: tl.constexpr, MOMENT: tl.constexpr, KEEP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    own = tl.load(targets + row) - block_start
    start_of_row = logits + row * stride
    if (own >= 0) & (own < width):
        tl.store(sum_target + row, tl.load(start_of_row + own).to(tl.float32) / temperature)
    before = tl.load(sum_max + row)
    largest, total, square, moment = before, tl.load(sum_exp + row), 0.0, 0.0
    if SQUARE:
        square = tl.load(sum_square + row)
    if MOMENT:
        moment = tl.load(sum_moment + row)
    for start in range(0, width, WIDTH):
        column = start + tl.arange(0, WIDTH)
        z = tl.load(start_of_row + column, mask=column < width, other=-float("inf")).to(tl.float32) / temperature
        z = tl.where(column == own, -float("inf"), z)
        new = tl.maximum(largest, tl.max(z, 0))
        below = largest - new
        scale = tl.exp(below)
        z = z - new
        e = tl.exp(z)
        if MOMENT:
            moment = (moment + below * total) * scale + tl.sum(e * tl.maximum(z, -1e30), 0)
        if SQUARE:
            square = square * scale * scale + tl.sum(e * e, 0)
        total = total * scale + tl.sum(e, 0)
        largest = new
    tl.store(sum_max + row, largest)
    tl.store(sum_exp + row, total)
    if SQUARE:
        tl.store(sum_square + row, square)
    if MOMENT:
        tl.store(sum_moment + row, moment)
    if KEEP:
        tl.store(out_scale + row, tl.exp(before - largest))
        for start in range(0, width, WIDTH):
            column = start + tl.arange(0, WIDTH)
            z = tl.load(start_of_row + column, mask=column < width, other=-float("inf")).to(tl.float32) / temperature
            e = tl.where(column == own, 0.0, tl.exp(z - largest))
            tl.store(start_of_row + column, e.to(logits.dtype.element_ty), mask=column < width)


@triton.jit
def _write_rows(  # type: ignore[no-untyped-def]
    logits, result, targets, log_total, by_target, factor, entropy_factor,
    block_start, width, stride, result_stride, temperature,
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
    own = tl.load(targets + row) - block_start
    gradient = tl.where(column == own, tl.load(by_target + row), gradient * tl.exp(z))
    tl.store(result + row * result_stride + column, gradient.to(result.dtype.element_ty), mask=inside)
