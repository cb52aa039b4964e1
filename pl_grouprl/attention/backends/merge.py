"""Merges partial attention outputs by their log-sum-exp, in place and in one pass.

Legend: S packed tokens that run, N of them that are merged, H query heads, E head size of values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from pl_grouprl.attention.backends.kernels import Index, put, take


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, where: Index) -> None:
    """Fold a partial softmax over more keys into another (Cascade Inference, FlashInfer, 2024), in place.

    Args:
        out: Output over the keys so far, shape [S, H, E].
        lse: Log-sum-exp of the scores so far, shape [H, S], float32 or wider.
        part: Output over the new keys, shape [N, H, E].
        part_lse: Log-sum-exp of their scores, shape [H, N].
        where: The N tokens to merge, without repetitions.
    """
    fused = _fused() if out.is_cuda and lse.dtype == torch.float32 else None
    if fused is not None:
        fused(out, lse, part, part_lse, where)
        return
    lse_SH, part_lse_NH = lse.t(), part_lse.t()
    old, old_lse_NH = take(out, where), take(lse_SH, where)
    merge_in_place(old, old_lse_NH, part, part_lse_NH)
    if not isinstance(where, slice):  # `take` copied them
        put(out, where, old)
        put(lse_SH, where, old_lse_NH)


@cache
def _fused() -> Callable[[Tensor, Tensor, Tensor, Tensor, Index], None] | None:
    """The Triton kernel, if installed (it comes with PyTorch for CUDA); otherwise PyTorch takes four passes."""
    if find_spec("triton") is None:
        return None
    from pl_grouprl.attention.backends.merge_triton import merge_triton

    return merge_triton


def merge_in_place(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Fold a partial softmax into another: outputs [..., E] with log-sum-exps [...], element by element."""
    share = torch.sigmoid(part_lse - lse)[..., None]
    if out.dtype == part.dtype == share.dtype:
        out.lerp_(part, share)
    else:  # round once
        out.copy_(torch.lerp(out.to(share.dtype), part.to(share.dtype), share))
    torch.logaddexp(lse, part_lse, out=lse)


def non_sink_share(lse: Tensor, sinks: Tensor) -> Tensor:
    """The fraction of the softmax that sinks leave to the keys, a factor of the output; arguments broadcast.

    A sink takes part in the softmax and adds nothing to the output (gpt-oss).
    """
    return torch.sigmoid(lse - sinks.to(lse.dtype))
