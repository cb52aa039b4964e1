"""Shared-prefix attention from two primitives and a merge; reads each long prefix's keys and values once, copies none.

Each segment of the row (or piece of one, see below) attends to itself; all its descendants attend to all of it as one
long run of queries; partial outputs are merged by their log-sum-exp. Short segments in the middle of a deep tree are
copied into the calls of their descendants instead, which takes less time than merging. In the backward pass each
partial call gets the final output and log-sum-exp, so the partial gradients add up. Splitting attention over keys and
merging by log-sum-exp comes from FlashAttention (arXiv:2205.14135) and Cascade Inference (FlashInfer, 2024).

The plan of a row: segments are cut into *pieces* at chunk borders, across which there is no attention. Short pieces
that follow each other down the forest form a *chain* (see `CHAIN`). Every piece attends causally to its chain, which
ends with the piece; all descendants that start chains of their own attend to all of it, as one long run of queries.
Under a window, each segment attends in one call to itself and to the part of its prefix within the window. Tokens of a
block (an image) attend to later ones by a causal call on the block in reverse order.

Legend: T packed tokens, S of them that run, N of them that are merged, H query heads, K key/value heads, D head size of
keys, V of values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pl_grouprl.attention.backends.interface import AttentionRule, Backend, ExplicitGradient
from pl_grouprl.attention.backends.kernels import (
    CPUKernel,
    CUDAKernel,
    EagerKernel,
    Index,
    VarlenCall,
    VarlenKernel,
    has_fused_kernel,
    head_multiple,
    put,
    take,
)
from pl_grouprl.attention.backends.saved import once
from pl_grouprl.packing import SharedPrefixLayout

_HAS_TRITON = find_spec("triton") is not None  # it comes with PyTorch for CUDA

LONG_RUN = {"cpu": 128, "cuda": 4096}
"""A piece with at least this many descendant queries gets a separate call, on slices. The others share one call per
depth, for which their tokens are gathered.

On CPU both take the same time at about 100 queries (measured: 16 prefixes of 64 tokens, 8 heads of 64). The CUDA value
is an estimate: a call forward and backward is about 50 microseconds of launches, and copying query, output and
gradients of a token with 32 heads of 128 takes about 20 nanoseconds at 3 TB/s, so they break even at 2,500 tokens;
calls not much longer do not fill a GPU.
"""

CHAIN = {"cpu": 256, "cuda": 0}
"""Maximum number of keys of a chain of several pieces; 0 makes no chains.

Each piece gets a copy of the keys of the pieces above it in its chain; in return, there are fewer calls and partial
outputs to merge. `python -m benchmarks forests` shows what they gain (docs/performance.md#forests). On CUDA chains are
not measured, so there are none.
"""

MOST_COPIES = 4
"""Maximum number of keys that a chain copies for the children of a piece, per token of theirs."""


@dataclass(frozen=True)
class CascadePlan:
    """The calls for a layout under a rule.

    Attributes:
        own: The call in which every token queries its own chain or window.
        others: Calls merged into that one: the chains above, by depth, and later tokens of a block.
        parts_of_query: Maximum number of calls in which a token is a query.
        parts_of_key: Maximum number of calls in which a token is a key.
    """

    own: VarlenCall
    others: tuple[VarlenCall, ...]
    parts_of_query: int
    parts_of_key: int


def plan_cascade(layout: SharedPrefixLayout, rule: AttentionRule, device: torch.device) -> CascadePlan:
    """Turn a layout into calls, once per layout, rule and device. Prefilled tokens do not query."""
    if rule.window is None:
        own, others = _forest_calls(layout, rule.chunk, device)
    else:
        own, others = _windowed_call(layout, rule.window), []
    blocks = [(start, stop) for start, stop in _spans(rule.blocks or ()) if stop - start > 1]
    if blocks:  # in reverse order, a causal call that excludes the token itself: each token attends to later ones
        queries = torch.cat([torch.arange(stop - 2, start - 1, -1) for start, stop in blocks])
        keys = torch.cat([torch.arange(stop - 1, start, -1) for start, stop in blocks])
        lengths = tuple(stop - start - 1 for start, stop in blocks)
        others.append(VarlenCall(lengths, lengths, causal=True, queries=queries, keys=keys))

    def most_frequent(indices: list[Index], num_tokens: int) -> int:
        counts = torch.zeros(num_tokens, dtype=torch.long)
        for index in indices:
            if isinstance(index, slice):
                counts[index].add_(1)
            else:
                counts += index.bincount(minlength=num_tokens)
        return int(counts.max()) if num_tokens else 0

    calls = (own, *others)
    return CascadePlan(
        own.to(device),
        tuple(call.to(device) for call in others),
        parts_of_query=most_frequent([call.queries for call in calls], layout.num_queries),
        parts_of_key=most_frequent([call.keys for call in calls], layout.num_tokens),
    )


def _spans(blocks: tuple[int, ...]) -> list[tuple[int, int]]:
    """Start and stop of each block."""
    runs, start = [], 0
    for number, members in groupby(blocks):
        stop = start + sum(1 for _ in members)
        if number >= 0:
            runs.append((start, stop))
        start = stop
    return runs


def _forest_calls(
    layout: SharedPrefixLayout, chunk: int | None, device: torch.device
) -> tuple[VarlenCall, list[VarlenCall]]:
    """The call in which every piece attends to its chain, and those in which pieces attend to the chains above."""
    pieces = _cut(layout, chunk)
    chains = _chains(pieces, CHAIN.get(device.type, CHAIN["cpu"]))
    long_run, first = LONG_RUN.get(device.type, LONG_RUN["cpu"]), layout.num_prefilled
    queries: list[list[slice]] = []
    keys: list[list[slice]] = []
    below: dict[int, list[slice]] = {}  # by piece, the queries that attend to all of its chain
    for piece, chain in zip(pieces, chains, strict=True):
        if piece.tokens.start < first:
            continue
        run = slice(piece.tokens.start - first, piece.tokens.stop - first)
        queries.append([run])
        keys.append(chain.keys)
        above = chain.parent
        while above is not None:
            below.setdefault(above, []).append(run)
            above = chains[above].parent
    below = {number: _joined(runs) for number, runs in below.items()}
    others = []
    for depth in sorted({chains[number].depth for number in below}):
        numbers = [number for number in sorted(below) if chains[number].depth == depth]
        alone = [n for n in numbers if len(below[n]) == 1 and _length(below[n]) >= long_run]
        if len(alone) < len(numbers):  # one call is on slices, too, if all prompts come before all rollouts
            of_all = _call([below[n] for n in numbers], [chains[n].keys for n in numbers], causal=False)
            if isinstance(of_all.queries, slice) and isinstance(of_all.keys, slice):
                others.append(of_all)
                continue
        together = [number for number in numbers if number not in alone]
        for group in [*([number] for number in alone), *([together] if together else [])]:
            others.append(_call([below[n] for n in group], [chains[n].keys for n in group], causal=False))
    return _call(queries, keys, causal=True), others


class _Piece(NamedTuple):
    """Consecutive tokens of a segment; `parent` is the piece that it continues, None if it sees no earlier tokens."""

    tokens: slice
    parent: int | None


def _cut(layout: SharedPrefixLayout, chunk: int | None) -> list[_Piece]:
    """Cut segments into pieces, in row order."""
    pieces: list[_Piece] = []
    last_of_segment: list[int | None] = []
    for segment in layout.segments:
        last = None if segment.parent is None else last_of_segment[segment.parent]
        left_of_chunk = segment.length if chunk is None else chunk - segment.position % chunk
        inner = range(segment.start + left_of_chunk, segment.stop, chunk or 1)
        for start, stop in pairwise([segment.start, *inner, segment.stop]):
            if start == stop:
                continue
            position = segment.position + start - segment.start
            forgets = chunk is not None and position % chunk == 0
            pieces.append(_Piece(slice(start, stop), None if forgets else last))
            last = len(pieces) - 1
        last_of_segment.append(last)
    return pieces


class _Chain(NamedTuple):
    """A piece and its nearest ancestors, to which it attends in one call.

    Attributes:
        keys: Tokens of these ancestors and of the piece, in order.
        parent: The piece directly above the first of these tokens, where another chain ends; None for a root.
        depth: Number of chains above.
    """

    keys: list[slice]
    parent: int | None
    depth: int


def _chains(pieces: list[_Piece], most_keys: int) -> list[_Chain]:
    """The chain that ends with each piece. Either all children of a piece continue its chain, or none.

    Rollouts do not continue the chain of their prompt, a root below which there is nothing else: they are one long run
    of queries.
    """
    children: list[list[int]] = [[] for _ in pieces]
    for number, piece in enumerate(pieces):
        if piece.parent is not None:
            children[piece.parent].append(number)
    chains: dict[int, _Chain] = {}
    for number, piece in enumerate(pieces):
        chain = chains.setdefault(number, _Chain([piece.tokens], None, 0))  # of a root; others have theirs by now
        num_keys, lengths = _length(chain.keys), [_length([pieces[child].tokens]) for child in children[number]]
        deeper = piece.parent is not None or any(children[child] for child in children[number])
        joined = (
            deeper
            and num_keys + max(lengths, default=0) <= most_keys
            and num_keys * len(lengths) <= MOST_COPIES * sum(lengths)
        )
        for child in children[number]:
            own = [pieces[child].tokens]
            chains[child] = _Chain(own, number, chain.depth + 1)
            if joined:
                chains[child] = chain._replace(keys=_joined([*chain.keys, *own]))
    return [chains[number] for number in range(len(pieces))]


def _windowed_call(layout: SharedPrefixLayout, window: int) -> VarlenCall:
    queries, keys = [], []
    for segment in layout.segments:
        if not segment.length or segment.start < layout.num_prefilled:
            continue
        queries.append([slice(segment.start - layout.num_prefilled, segment.stop - layout.num_prefilled)])
        runs, parent, wanted = [slice(segment.start, segment.stop)], segment.parent, window - 1
        while parent is not None and wanted > 0:
            above = layout.segments[parent]
            taken = min(wanted, above.length)
            if taken:
                runs.append(slice(above.stop - taken, above.stop))
            wanted, parent = wanted - taken, above.parent
        keys.append(runs[::-1])
    return _call(queries, keys, causal=True, window=window)


def _call(queries: list[list[slice]], keys: list[list[slice]], causal: bool, window: int | None = None) -> VarlenCall:
    """A call with these runs of the row for each problem."""

    def index(problems: list[list[slice]]) -> Index:
        joined = _joined(run for runs in problems for run in runs)
        if len(joined) < 2:
            return joined[0] if joined else slice(0, 0)
        return torch.cat([torch.arange(run.start, run.stop) for run in joined])

    query_lens, key_lens = tuple(map(_length, queries)), tuple(map(_length, keys))
    return VarlenCall(query_lens, key_lens, causal, window, index(queries), index(keys))


def _length(runs: list[slice]) -> int:
    return sum(run.stop - run.start for run in runs)


def _joined(runs: Iterable[slice]) -> list[slice]:
    """The runs, as one where they follow each other."""
    joined: list[slice] = []
    for run in runs:
        if joined and joined[-1].stop == run.start:
            joined[-1] = slice(joined[-1].start, run.stop)
        else:
            joined.append(run)
    return joined


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, where: Index) -> None:
    """Fold a partial softmax over more keys into another (Cascade Inference, FlashInfer, 2024), in place.

    Args:
        out: Output over the keys so far, shape [S, H, V].
        lse: Log-sum-exp of the scores so far, shape [H, S], float32 or wider.
        part: Output over the new keys, shape [N, H, V].
        part_lse: Log-sum-exp of their scores, shape [H, N].
        where: The N tokens to merge, without repetitions.
    """
    if _HAS_TRITON and out.is_cuda and lse.dtype == torch.float32:  # otherwise PyTorch takes four passes
        from pl_grouprl.attention.backends.merge_triton import merge_triton

        merge_triton(out, lse, part, part_lse, where)
        return
    lse_SH = lse.t()
    old, old_lse_NH, part_lse_NH = take(out, where), take(lse_SH, where), part_lse.t()
    share = torch.sigmoid(part_lse_NH - old_lse_NH)[..., None]
    if old.dtype == part.dtype == share.dtype:
        old.lerp_(part, share)
    else:  # round once
        old.copy_(torch.lerp(old.to(share.dtype), part.to(share.dtype), share))
    torch.logaddexp(old_lse_NH, part_lse_NH, out=old_lse_NH)
    if not isinstance(where, slice):  # `take` copied them
        put(out, where, old)
        put(lse_SH, where, old_lse_NH)


def non_sink_share(lse: Tensor, sinks: Tensor) -> Tensor:
    """The fraction of the softmax that sinks leave to the keys, a factor of the output; arguments broadcast.

    A sink takes part in the softmax and adds nothing to the output (gpt-oss).
    """
    return torch.sigmoid(lse - sinks.to(lse.dtype))


def cascade_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: CascadePlan, kernel: VarlenKernel, sinks_H: Tensor | None = None
) -> Tensor:
    """Run a plan on packed tensors, differentiably.

    Args:
        query: Shape [S, H, D].
        key: Shape [T, K, D].
        value: Shape [T, K, V].
        plan: The calls of the row's layout.
        kernel: The two primitives.
        sinks_H: See `AttentionRule`.

    Returns:
        Shape [S, H, V].
    """
    return _Cascade.apply(query, key, value, sinks_H, plan, kernel)


class _Cascade(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        query, key, value, sinks_H, ctx.plan, ctx.kernel = inputs
        out, lse = once(partial(cascade_forward, *inputs))
        ctx.save_for_backward(query, key, value, sinks_H, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks_H, out, lse = ctx.saved_tensors
        found = cascade_backward(grads[0], query, key, value, sinks_H, out, lse, ctx.plan, ctx.kernel)
        return *found, None, None


def cascade_forward(
    query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor | None, plan: CascadePlan, kernel: VarlenKernel
) -> tuple[Tensor, Tensor]:
    """The output, shape [S, H, V], and the log-sum-exp of all scores, sinks included, shape [H, S]."""
    wide = torch.promote_types(query.dtype, torch.float32)
    dtype = wide if plan.parts_of_query > 2 else query.dtype  # merged more than once: round only at the end
    out = query.new_empty(*query.shape[:2], value.shape[2], dtype=dtype)
    lse = query.new_empty(query.shape[1], query.shape[0], dtype=wide)
    for queries, part, part_lse in kernel.forward(query, key, value, plan.own):
        if len(part) == len(query):
            # Copies if anything is merged into them: selective checkpointing may have saved the kernel's own.
            out, lse = part.to(dtype, copy=bool(plan.others)), part_lse.clone()
        else:
            put(out, queries, part.to(dtype))
            put(lse.t(), queries, part_lse.t())
    for call in plan.others:
        for queries, part, part_lse in kernel.forward(query, key, value, call):
            merge(out, lse, part, part_lse, queries)
    if sinks_H is not None:  # one more key for every query, with a value of zero
        sinks_H1 = sinks_H.to(lse.dtype)[:, None]
        out = out * non_sink_share(lse, sinks_H1).t()[..., None]
        lse = torch.logaddexp(lse, sinks_H1)
    return out.to(query.dtype), lse


def cascade_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks_H: Tensor | None,
    out: Tensor,
    lse: Tensor,
    plan: CascadePlan,
    kernel: VarlenKernel,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and sinks, from the output's gradient and the results of the forward pass."""
    grad = grad.contiguous()
    sums = [_Sum(query, plan.parts_of_query), _Sum(key, plan.parts_of_key), _Sum(value, plan.parts_of_key)]
    for call in (plan.own, *plan.others):
        for queries, keys, *parts in kernel.backward(grad, query, key, value, out, lse, call):
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


def prepare(
    query: Tensor, key: Tensor, value: Tensor, layout: SharedPrefixLayout, rule: AttentionRule
) -> tuple[tuple[Tensor, Tensor, Tensor], CascadePlan, VarlenKernel]:
    """Arguments of `cascade_attention`, from tensors of shape [1, H or K, T, D or V]; may pad heads with zeros."""
    plan = layout.memo(("cascade", query.device, rule.visibility), lambda: plan_cascade(layout, rule, query.device))
    kernel: VarlenKernel = EagerKernel(rule.scale, rule.softcap)
    if has_fast_kernel(query, key, value, rule):
        kernel = CUDAKernel(rule.scale) if query.is_cuda else CPUKernel(rule.scale)
        # Zeros change no score and no other component of the output.
        size = max(tensor.shape[-1] for tensor in (query, key, value))
        size += -size % head_multiple(query)
        query, key, value = (t if t.shape[-1] == size else pad(t, (0, size - t.shape[-1])) for t in (query, key, value))
    # The fused CPU kernel assumes that heads are contiguous along D.
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    # squeeze instead of indexing, whose gradient is a copy into a tensor of zeros.
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    return (query, key, value), plan, kernel


def _attend(query: Tensor, key: Tensor, value: Tensor, layout: SharedPrefixLayout, rule: AttentionRule) -> Tensor:
    packed, plan, kernel = prepare(query, key, value, layout, rule)
    return cascade_attention(*packed, plan, kernel, rule.sinks_H)[None, ..., : value.shape[-1]]


def _forward(
    query: Tensor, key: Tensor, value: Tensor, layout: SharedPrefixLayout, rule: AttentionRule
) -> tuple[Tensor, Tensor]:
    """See `ExplicitGradient.forward`."""
    packed, plan, kernel = prepare(query, key, value, layout, rule)
    out, lse = cascade_forward(*packed, rule.sinks_H, plan, kernel)
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
    grad, out = pad(grad[0], padding), pad(out[0], padding)
    *found, for_sinks = cascade_backward(grad, *packed, rule.sinks_H, out, lse, plan, kernel)
    for_query, for_key, for_value = (
        part[..., : tensor.shape[-1]].transpose(0, 1)[None].contiguous()
        for part, tensor in zip(found, (query, key, value), strict=True)
    )
    return for_query, for_key, for_value, for_sinks


def _refusal(query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> str | None:
    if rule.blocks is not None and rule.window is not None and not rule.window_bounds_blocks:
        longest = max((stop - start for start, stop in _spans(rule.blocks)), default=0)
        if longest > rule.window:
            return "it cannot run an image that reaches beyond the window; use backend 'flex' or 'reference'."
    if rule.chunk is not None and (rule.blocks is not None or rule.window is not None):
        return "it cannot run chunks together with windows or images; use backend 'flex' or 'reference'."
    return None


CASCADE = Backend(
    "cascade",
    _attend,
    _refusal,
    preference=lambda *layer: 3 if has_fast_kernel(*layer) else 1,  # without fused kernels, better than dense
    explicit=ExplicitGradient(_forward, _backward),
)
