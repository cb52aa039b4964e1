"""Samples tokens in one Triton kernel, which reads the logits and writes nothing of their size.

Legend: B sequences, V vocabulary. A program has one sequence, and reads its logits three times: for the softmax, for
the sum of the integer weights, and for the block of tokens where the cumulative sum passes the random number.
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
"""Logits per block: 16 for each of a program's 256 threads."""


def sample_triton(logits_BV: Tensor, temperature: float, uniforms_B: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `sampling.sample_tokens`, without filters; the most likely token if `uniforms_B` is None.

    The sums of weights are exact, as there. Weights are those of this kernel's softmax, which may round differently.
    """
    rows, width = logits_BV.shape
    tokens_B = torch.empty(rows, dtype=torch.int64, device=logits_BV.device)
    logprobs_B = torch.empty(rows, dtype=torch.float32, device=logits_BV.device)
    with torch.cuda.device_of(logits_BV):
        _sample[(rows,)](
            logits_BV, uniforms_B, tokens_B, logprobs_B, width, *logits_BV.stride(), temperature,
            GREEDY=uniforms_B is None, WIDTH=min(_WIDTH, triton.next_power_of_2(width)), num_warps=8,
        )  # fmt: skip
    return tokens_B, logprobs_B


@triton.jit
def _sample(  # type: ignore[no-untyped-def]
    logits, uniforms, tokens, logprobs, width, row_stride, stride, temperature,
    GREEDY: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start_of_row = logits + row * row_stride
    largest, total = -1e30, 0.0
    for start in range(0, width, WIDTH):
        z = _block(start_of_row, start + tl.arange(0, WIDTH), width, stride, temperature)
        new = tl.maximum(largest, tl.max(z, 0))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(z - new), 0)
        largest = new
    log_total = tl.log(total)
    token = width - 1
    if GREEDY:
        most = -float("inf")
        for start in range(0, width, WIDTH):
            column = start + tl.arange(0, WIDTH)
            logprob = _block(start_of_row, column, width, stride, temperature) - largest - log_total
            new = tl.max(logprob, 0)
            first = tl.min(tl.where(logprob == new, column, width - 1), 0)
            token = tl.where(new > most, first, token)
            most = tl.maximum(most, new)
    else:
        total_weight = tl.full((), 0, tl.int64)
        for start in range(0, width, WIDTH):
            z = _block(start_of_row, start + tl.arange(0, WIDTH), width, stride, temperature)
            total_weight += tl.sum(_weights(z - largest - log_total), 0)
        target = (tl.load(uniforms + row) * total_weight.to(tl.float64)).to(tl.int64)
        before, before_found = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
        found = 0
        for start in range(0, width, WIDTH):
            z = _block(start_of_row, start + tl.arange(0, WIDTH), width, stride, temperature)
            end = before + tl.sum(_weights(z - largest - log_total), 0)
            here = (before <= target) & (target < end)
            found = tl.where(here, start, found)
            before_found = tl.where(here, before, before_found)
            before = end
        column = found + tl.arange(0, WIDTH)
        z = _block(start_of_row, column, width, stride, temperature)
        end = before_found + tl.cumsum(_weights(z - largest - log_total), 0)
        token = tl.minimum(tl.min(tl.where(target < end, column, width - 1), 0), width - 1)
    z = tl.load(start_of_row + token.to(tl.int64) * stride).to(tl.float32) / temperature
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, z - largest - log_total)


@triton.jit
def _block(start_of_row, column, width, stride, temperature):  # type: ignore[no-untyped-def]
    z = tl.load(start_of_row + column.to(tl.int64) * stride, mask=column < width, other=-float("inf"))
    return z.to(tl.float32) / temperature


@triton.jit
def _weights(logprob):  # type: ignore[no-untyped-def]
    return (tl.exp(logprob) * 4503599627370496.0).to(tl.int64)  # 2^52, as `sampling._fixed_point`
