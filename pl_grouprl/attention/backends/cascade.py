"""Shared-prefix attention from two primitives and a merge; reads each long prefix's keys and values once, copies none.

Each segment of the row (or piece of one, see `cascade_plan`) attends to itself; all its descendants attend to all of it
as one long run of queries; partial outputs are merged by their log-sum-exp. Short segments in the middle of a deep tree
are copied into the calls of their descendants instead, which takes less time than merging. In the backward pass each
partial call gets the final output and log-sum-exp, so the partial gradients add up. Splitting attention over keys and
merging by log-sum-exp comes from FlashAttention (arXiv:2205.14135) and Cascade Inference (FlashInfer, 2024).

Legend: T packed tokens, S of them that run, H query heads, K key/value heads, D head size of keys, V of values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pl_grouprl.attention.backends.backend import Backend, ExplicitGradient
from pl_grouprl.attention.backends.cascade_plan import CascadePlan, longest_block, plan_cascade
from pl_grouprl.attention.backends.kernels import (
    CPUKernel,
    CUDAKernel,
    EagerKernel,
    Index,
    VarlenKernel,
    has_fused_kernel,
    head_multiple,
    put,
)
from pl_grouprl.attention.backends.merge import merge, non_sink_share
from pl_grouprl.attention.backends.rule import AttentionRule
from pl_grouprl.packing import SharedPrefixLayout


def cascade_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: CascadePlan,
    scale: float,
    kernel: VarlenKernel,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Run a plan on packed tensors, differentiably.

    Args:
        query: Shape [S, H, D].
        key: Shape [T, K, D].
        value: Shape [T, K, V].
        plan: The calls of the row's layout.
        scale: Multiplies the scores.
        kernel: The two primitives.
        sinks_H: See `AttentionRule`.

    Returns:
        Shape [S, H, V].
    """
    return _Cascade.apply(query, key, value, sinks_H, plan, scale, kernel)


class _Cascade(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks_H: Tensor | None,
        plan: CascadePlan,
        scale: float,
        kernel: VarlenKernel,
    ) -> Tensor:
        out, lse = cascade_forward(query, key, value, sinks_H, plan, scale, kernel)
        ctx.save_for_backward(query, key, value, sinks_H, out, lse)
        ctx.plan, ctx.scale, ctx.kernel = plan, scale, kernel
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks_H, out, lse = ctx.saved_tensors
        plan, scale, kernel = ctx.plan, ctx.scale, ctx.kernel
        found = cascade_backward(grads[0], query, key, value, sinks_H, out, lse, plan, scale, kernel)
        return (*found, None, None, None)


def cascade_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks_H: Tensor | None,
    plan: CascadePlan,
    scale: float,
    kernel: VarlenKernel,
) -> tuple[Tensor, Tensor]:
    """The output, shape [S, H, V], and the log-sum-exp of all scores, sinks included, shape [H, S]."""
    out, lse = _own_output(query, key, value, plan, scale, kernel)
    for call in plan.others:
        for queries, part, part_lse in kernel.forward(query, key, value, call, scale):
            merge(out, lse, part, part_lse, queries)
    if sinks_H is not None:  # one more key for every query, with a value of zero
        sinks_H1 = sinks_H.to(lse.dtype)[:, None]
        out = out * non_sink_share(lse, sinks_H1).t()[..., None]
        lse = torch.logaddexp(lse, sinks_H1)
    return out.to(query.dtype), lse


def _own_output(
    query: Tensor, key: Tensor, value: Tensor, plan: CascadePlan, scale: float, kernel: VarlenKernel
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the first call, in which every token queries.

    They are copies if anything is merged into them: selective checkpointing may have saved the kernel's own.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    dtype = wide if plan.parts_of_query > 2 else query.dtype  # merged more than once: round only at the end
    out = query.new_empty(*query.shape[:2], value.shape[2], dtype=dtype)
    lse = query.new_empty(query.shape[1], query.shape[0], dtype=wide)
    for queries, part, part_lse in kernel.forward(query, key, value, plan.own, scale):
        if len(part) == len(query):
            return part.to(dtype, copy=bool(plan.others)), part_lse.clone()
        put(out, queries, part.to(dtype))
        put(lse.t(), queries, part_lse.t())
    return out, lse


def cascade_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks_H: Tensor | None,
    out: Tensor,
    lse: Tensor,
    plan: CascadePlan,
    scale: float,
    kernel: VarlenKernel,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and sinks, from the output's gradient and the results of the forward pass."""
    grad = grad.contiguous()
    sums = [_Sum(query, plan.parts_of_query), _Sum(key, plan.parts_of_key), _Sum(value, plan.parts_of_key)]
    for call in (plan.own, *plan.others):
        for queries, keys, *parts in kernel.backward(grad, query, key, value, out, lse, call, scale):
            for total, index, part in zip(sums, (queries, keys, keys), parts, strict=True):
                total.add(index, part)
    grad_sinks = None
    if sinks_H is not None:
        # A key with a value of zero: the gradient of its score is -p * sum(grad * out).
        shares_HT = (sinks_H.to(lse.dtype)[:, None] - lse).exp()
        inner_HT = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(dim=-1).t()
        grad_sinks = -(shares_HT * inner_HT).sum(dim=-1).to(sinks_H.dtype)
    grad_query, grad_key, grad_value = (total.total() for total in sums)
    return grad_query, grad_key, grad_value, grad_sinks


class _Sum:
    """Adds up partial gradients of a packed tensor, in float32 or wider.

    If the first part has all tokens and none has more than two parts, it becomes the sum itself: adding two numbers in
    place rounds once, like a float32 sum.
    """

    def __init__(self, tensor: Tensor, most_parts: int) -> None:
        self._tensor, self._most_parts = tensor, most_parts
        self._total: Tensor | None = None

    def add(self, index: Index, part: Tensor) -> None:
        wide = torch.promote_types(part.dtype, torch.float32)
        if self._total is None and isinstance(index, slice) and part.shape[0] == self._tensor.shape[0]:
            self._total = part if self._most_parts <= 2 else part.to(wide)
            return
        if self._total is None:
            self._total = torch.zeros_like(self._tensor, dtype=wide)
        if isinstance(index, slice):
            self._total[index].add_(part)
        else:
            self._total.index_add_(0, index, part.to(self._total.dtype))

    def total(self) -> Tensor:
        return torch.zeros_like(self._tensor) if self._total is None else self._total.to(self._tensor.dtype)


def has_fast_kernel(query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> bool:
    """Whether PyTorch's fused kernels support a layer; otherwise the cascade uses plain matrix products."""
    return rule.softcap is None and has_fused_kernel(query, key, value)


def _refusal(query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> str | None:
    blocks_beyond = rule.blocks is not None and rule.window is not None and not rule.window_bounds_blocks
    if blocks_beyond and longest_block(rule.blocks or ()) > (rule.window or 0):
        return "it cannot run an image that reaches beyond the window; use backend 'flex' or 'reference'."
    if rule.chunk is not None and (rule.blocks is not None or rule.window is not None):
        return "it cannot run chunks together with windows or images; use backend 'flex' or 'reference'."
    return None


def _attend(query: Tensor, key: Tensor, value: Tensor, layout: SharedPrefixLayout, rule: AttentionRule) -> Tensor:
    packed, plan, kernel = prepare(query, key, value, layout, rule)
    return cascade_attention(*packed, plan, rule.scale, kernel, rule.sinks_H)[None, ..., : value.shape[-1]]


def prepare(
    query: Tensor, key: Tensor, value: Tensor, layout: SharedPrefixLayout, rule: AttentionRule
) -> tuple[tuple[Tensor, Tensor, Tensor], CascadePlan, VarlenKernel]:
    """Arguments of `cascade_attention`, from tensors of shape [1, H or K, T, D or V]; may pad heads with zeros."""
    plan = layout.memo(("cascade", query.device, rule.visibility), lambda: plan_cascade(layout, rule, query.device))
    kernel: VarlenKernel = EagerKernel(rule.softcap)
    if has_fast_kernel(query, key, value, rule):
        query, key, value = _same_head_size(query, key, value, multiple_of=head_multiple(query))
        kernel = CUDAKernel() if query.is_cuda else CPUKernel()
    # The fused CPU kernel assumes that heads are contiguous along D.
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    # squeeze instead of indexing, whose gradient is a copy into a tensor of zeros.
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    return (query, key, value), plan, kernel


def _same_head_size(*tensors: Tensor, multiple_of: int) -> list[Tensor]:
    """Pad heads with zeros, which change no score and no other component of the output."""
    size = max(tensor.shape[-1] for tensor in tensors)
    size += -size % multiple_of
    return [tensor if tensor.shape[-1] == size else pad(tensor, (0, size - tensor.shape[-1])) for tensor in tensors]


def _forward(
    query: Tensor, key: Tensor, value: Tensor, layout: SharedPrefixLayout, rule: AttentionRule
) -> tuple[Tensor, Tensor]:
    """See `ExplicitGradient.forward`."""
    packed, plan, kernel = prepare(query, key, value, layout, rule)
    out, lse = cascade_forward(*packed, rule.sinks_H, plan, rule.scale, kernel)
    return out[None, ..., : value.shape[-1]].contiguous(), lse.contiguous()


def _backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: SharedPrefixLayout,
    rule: AttentionRule,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """See `ExplicitGradient.backward`."""
    packed, plan, kernel = prepare(query, key, value, layout, rule)
    padding = (0, packed[2].shape[-1] - value.shape[-1])
    *found, for_sinks = cascade_backward(
        pad(grad[0], padding), *packed, rule.sinks_H, pad(out[0], padding), lse, plan, rule.scale, kernel
    )
    for_query, for_key, for_value = (
        part[..., : tensor.shape[-1]].transpose(0, 1)[None].contiguous()
        for part, tensor in zip(found, (query, key, value), strict=True)
    )
    return for_query, for_key, for_value, for_sinks


def _preference(query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> int:
    """First choice with fused kernels; without them, only better than the dense mask."""
    return 3 if has_fast_kernel(query, key, value, rule) else 1


CASCADE = Backend("cascade", _attend, _refusal, preference=_preference, explicit=ExplicitGradient(_forward, _backward))
