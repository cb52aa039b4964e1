"""FlashAttention's operators in closed form on CPU, so that the code that calls them runs without a GPU.

Nothing here uses the package. What the arguments mean is FlashAttention's own: runs are given by their offsets, the
last query of a run stands at its last key, and a window counts the keys to the left and right of a query's own.

Legend: Q query tokens of a call, M key tokens of a call, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def flash_attention_on_cpu() -> Iterator[None]:
    """Within it, `aten::_flash_attention_forward` and its backward run on CPU, in any dtype."""
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("_flash_attention_forward", _forward, "CPU")
        library.impl("_flash_attention_backward", _backward, "CPU")
        yield
    finally:
        library._destroy()


def _forward(
    query, key, value, cu_query, cu_key, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale,
    window_size_left=None, window_size_right=None, **_,
):  # fmt: skip
    _check(query, key, value, cu_query, cu_key, max_q, max_k, dropout_p)
    seen = _seen(cu_query, cu_key, is_causal, window_size_left, window_size_right)
    scores, _, wide_value = _scores(query, key, value, seen, scale)
    lse = scores.logsumexp(-1)
    out = torch.einsum("hqk,khd->qhd", (scores - lse[..., None]).exp(), wide_value).to(query.dtype)
    unused = query.new_empty(0)
    return out, lse.to(torch.promote_types(query.dtype, torch.float32)), unused, unused, unused


def _backward(
    grad, query, key, value, out, lse, cu_query, cu_key, max_q, max_k, dropout_p, is_causal, rng_state, unused, *,
    scale, window_size_left=None, window_size_right=None,
):  # fmt: skip
    _check(query, key, value, cu_query, cu_key, max_q, max_k, dropout_p)
    assert lse.is_contiguous()
    seen = _seen(cu_query, cu_key, is_causal, window_size_left, window_size_right)
    scores, wide_key, wide_value = _scores(query, key, value, seen, scale)
    grad = grad.double()
    weights = (scores - lse.double()[..., None]).exp()
    delta = (grad * out.double()).sum(-1).t()[..., None]
    grad_scores = weights * (torch.einsum("qhd,khd->hqk", grad, wide_value) - delta) * scale
    grad_query = torch.einsum("hqk,khd->qhd", grad_scores, wide_key)
    grad_key = torch.einsum("hqk,qhd->khd", grad_scores, query.double())
    grad_value = torch.einsum("hqk,qhd->khd", weights, grad)
    grad_key, grad_value = (tensor.unflatten(1, (key.shape[1], -1)).sum(2) for tensor in (grad_key, grad_value))
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _check(query, key, value, cu_query, cu_key, max_q, max_k, dropout_p) -> None:
    for cumulative, longest, tokens in ((cu_query, max_q, query), (cu_key, max_k, key)):
        assert cumulative.dtype == torch.int32
        assert cumulative[0] == 0
        assert cumulative[-1] == len(tokens)
        assert (cumulative.diff() > 0).all()
        assert cumulative.diff().max() == longest
        assert tokens.stride(-1) == 1
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert dropout_p == 0.0


def _seen(cu_query: Tensor, cu_key: Tensor, is_causal: bool, left: int | None, right: int | None) -> Tensor:
    """Which keys each query sees, shape [Q, M]; a window of None or -1 is no limit."""
    left, right = (-1 if side is None else side for side in (left, right))
    right = 0 if is_causal else right
    at_query, at_key = (
        torch.searchsorted(cumulative[1:], torch.arange(int(cumulative[-1])), right=True)
        for cumulative in (cu_query, cu_key)
    )
    # Places are counted back from the end of the run, where queries and keys are aligned.
    query_to_go = cu_query[1:][at_query] - torch.arange(len(at_query))
    key_to_go = cu_key[1:][at_key] - torch.arange(len(at_key))
    behind = key_to_go - query_to_go[:, None]
    seen = at_query[:, None] == at_key
    if left >= 0:
        seen &= behind <= left
    return seen & (-behind <= right) if right >= 0 else seen


def _scores(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [H, Q, M], minus infinity where unseen, and keys and values repeated for every head, in float64."""
    heads = query.shape[1] // key.shape[1]
    key, value = (tensor.double().repeat_interleave(heads, dim=1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    return scores.masked_fill(~seen, float("-inf")), key, value
