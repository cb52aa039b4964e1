"""Shared-prefix attention from two primitives and a merge: each prefix's keys and values are read once, never copied.

Every segment attends causally to itself; the descendants of a segment attend to it whole, as one long run of queries;
the partial outputs are merged by their log-sum-exp. In the backward pass each partial kernel is given the final output
and the final log-sum-exp, so that the partial gradients simply add up. The idea of splitting attention over the keys
and merging by log-sum-exp is that of FlashAttention (arXiv:2205.14135) and Cascade Inference (FlashInfer, 2024).

Legend: T packed tokens, Q query tokens of a call, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pl_grouprl.attention.backend import Backend
from pl_grouprl.attention.kernels import CPUKernel, CUDAKernel, VarlenCall, VarlenKernel
from pl_grouprl.packing import SharedPrefixLayout

_Index = slice | Tensor


@dataclass(frozen=True)
class AncestorCall:
    """Descendants attending to the segments of one depth: which tokens ask, which are asked, and the call."""

    queries: _Index
    keys: _Index
    call: VarlenCall


@dataclass(frozen=True)
class CascadePlan:
    """The calls that a layout takes: one causal call of all segments, then one for each depth with descendants."""

    own: VarlenCall
    ancestors: tuple[AncestorCall, ...]


def plan_cascade(layout: SharedPrefixLayout, device: torch.device) -> CascadePlan:
    """Turn a layout into calls; done once per layout and device."""
    own_lens = tuple(segment.length for segment in layout.segments if segment.length)
    by_depth: dict[int, list[tuple[slice, slice]]] = {}
    for segment, depth, stop in zip(layout.segments, layout.depths, layout.subtree_stops, strict=True):
        if segment.length and stop > segment.stop:
            by_depth.setdefault(depth, []).append((slice(segment.stop, stop), slice(segment.start, segment.stop)))
    ancestors = []
    for _, pairs in sorted(by_depth.items()):
        query_runs, key_runs = zip(*pairs, strict=True)
        call = VarlenCall(_lengths(query_runs), _lengths(key_runs), causal=False)
        ancestors.append(AncestorCall(_index(query_runs, device), _index(key_runs, device), call))
    return CascadePlan(VarlenCall(own_lens, own_lens, causal=True), tuple(ancestors))


def cascade_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: CascadePlan, scale: float, kernel: VarlenKernel
) -> Tensor:
    """Run a plan on packed tensors, differentiably.

    Args:
        query: Shape [T, H, D].
        key: Shape [T, K, D].
        value: Shape [T, K, D].
        plan: The calls of the row's layout.
        scale: Factor of the scores.
        kernel: The two primitives for the device.

    Returns:
        Shape [T, H, D].
    """
    return _Cascade.apply(query, key, value, plan, scale, kernel)


class _Cascade(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: CascadePlan, scale: float, kernel: VarlenKernel
    ) -> Tensor:
        out, lse = kernel.forward(query, key, value, plan.own, scale)
        if plan.ancestors:
            out = out.to(lse.dtype)  # partial outputs are merged in float32
        for step in plan.ancestors:
            part, part_lse = kernel.forward(
                _take(query, step.queries), _take(key, step.keys), _take(value, step.keys), step.call, scale
            )
            _merge(out, lse, part, part_lse, step.queries)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.plan, ctx.scale, ctx.kernel = plan, scale, kernel
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        kernel, scale = ctx.kernel, ctx.scale
        grad_query, grad_key, grad_value = kernel.backward(grad, query, key, value, out, lse, ctx.plan.own, scale)
        for step in ctx.plan.ancestors:
            asked, asking = step.keys, step.queries
            part_query, part_key, part_value = kernel.backward(
                _take(grad, asking), _take(query, asking), _take(key, asked), _take(value, asked),
                _take(out, asking), _take(lse.t(), asking).t(), step.call, scale,
            )  # fmt: skip
            _add(grad_query, asking, part_query)
            _add(grad_key, asked, part_key)
            _add(grad_value, asked, part_value)
        return grad_query, grad_key, grad_value, None, None, None


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, where: _Index) -> None:
    """Fold a partial softmax over more keys into `out` [T, H, D] and `lse` [H, T] at the tokens `where`."""
    old_lse = _take(lse.t(), where).t()
    new_lse = torch.logaddexp(old_lse, part_lse)
    old_weight = (old_lse - new_lse).exp_().t()[..., None]
    part_weight = (part_lse - new_lse).exp_().t()[..., None]
    out[where] = _take(out, where) * old_weight + part * part_weight
    lse[:, where] = new_lse


def _take(packed: Tensor, index: _Index) -> Tensor:
    return packed[index] if isinstance(index, slice) else packed.index_select(0, index)


def _add(packed: Tensor, index: _Index, part: Tensor) -> None:
    if isinstance(index, slice):
        packed[index] += part
    else:
        packed.index_add_(0, index, part)


def _lengths(runs: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(run.stop - run.start for run in runs)


def _index(runs: tuple[slice, ...], device: torch.device) -> _Index:
    if len(runs) == 1:
        return runs[0]
    return torch.cat([torch.arange(run.start, run.stop) for run in runs]).to(device)


def _refusal(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    if query.device.type not in ("cpu", "cuda"):
        return f"it runs on CPU and CUDA, not on {query.device.type!r}; use backend 'reference'."
    if query.device.type == "cuda" and query.dtype not in (torch.bfloat16, torch.float16):
        return f"FlashAttention on CUDA takes bfloat16 and float16, not {query.dtype}; use backend 'flex' or bfloat16."
    return None


def _attend(query: Tensor, key: Tensor, value: Tensor, layout: SharedPrefixLayout, scale: float) -> Tensor:
    plan = layout.memo(("cascade", query.device), lambda: plan_cascade(layout, query.device))
    kernel: VarlenKernel = CUDAKernel() if query.device.type == "cuda" else CPUKernel()
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return cascade_attention(query, key, value, plan, scale, kernel)[None]


CASCADE = Backend("cascade", _attend, _refusal)
