"""Attention of rollouts to their shared prompt and to their suffixes.

Legend: B rows of a decode batch, H query heads, K key/value heads, R = H / K, D head size, T tokens of all prompts,
S positions of a row's suffix (its tokens after the prompt).

All rows of a prompt query it in one run, which reads its keys and values once; the two parts of the softmax are merged
by their log-sum-exp, as in Cascade Inference (FlashInfer, 2024) and Hydragen (arXiv:2402.05099).

Which layers can do that is detected, not listed. While prompts are encoded, our attention function wraps the model's
and observes whether a layer uses the exact tensors from its cache, with a plain causal mask. Only such layers share
prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from pl_grouprl.attention.backends.cascade import merge_in_place, non_sink_share
from pl_grouprl.attention.backends.kernels import has_fused_kernel, head_multiple
from pl_grouprl.attention.function import attend_by_mask, register_over
from pl_grouprl.attention.masks import MaskRule, read_layer_options, read_mask_function
from pl_grouprl.attention.support import find_decoder
from pl_grouprl.rollout.hf.prefill import keeps_more_than_keys
from pl_grouprl.rollout.hf.shared_prompt import ContinuedPromptsLayer, PromptLayer, layer_of_keys
from pl_grouprl.utilities import internals


@contextmanager
def attending_to_shared_prompts(model: Any) -> Iterator[None]:
    """Make a decoder's layers share prompts if they can. No effect on calls with other caches.

    No effect either if a layer keeps more for each token than keys and values (an indexer): then all layers get copies.

    Args:
        model: A transformers decoder with a language-model head.
    """
    decoder = find_decoder(model)
    before = internals.attention_implementation(decoder.config)
    # Layers that select tokens may look at the name of the implementation, and would not know ours.
    if not internals.takes_any_attention_function(decoder) or keeps_more_than_keys(model):
        yield
        return
    wrapped = before or "eager"
    name = register_over(wrapped, "rollouts", _attention_function(wrapped), _mask_function)
    internals.set_attention_implementation(decoder.config, name)
    try:
        yield
    finally:
        internals.set_attention_implementation(decoder.config, before)


def _mask_function(wrapped: Callable[..., Any] | None) -> Callable[..., Any]:
    """Wrap the implementation's mask function, tagging masks that are plainly causal."""

    def make_mask(*args: Any, **kwargs: Any) -> Any:
        mask = None if wrapped is None else wrapped(*args, **kwargs)
        if isinstance(mask, Tensor):
            with suppress(NotImplementedError):  # has unknown parts
                mask.is_plain = read_mask_function(kwargs["mask_function"]) == MaskRule()  # type: ignore[attr-defined]
        return mask

    return make_mask


def _attention_function(wrapped: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        layer = layer_of_keys(key)
        if isinstance(layer, ContinuedPromptsLayer):
            options = read_layer_options(module, query, kwargs)
            return attend(query, layer, options.scale, options.sinks_H).transpose(1, 2).contiguous(), None
        if isinstance(layer, PromptLayer):
            layer.was_read(_reads_plainly(module, query, key, value, attention_mask, layer, kwargs))
        return attend_by_mask(module, wrapped, query, key, value, attention_mask, **kwargs)

    return attention


def _reads_plainly(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, layer: PromptLayer, kwargs: dict[str, Any]
) -> bool:
    """Whether `attend` would give a layer's result for the tokens after a cached prompt."""
    try:
        options = read_layer_options(module, query, kwargs)
    except (NotImplementedError, ValueError):
        return False
    unbounded = options.softcap is None and options.window is None
    sees_all = mask is None or getattr(mask, "is_plain", False)
    return unbounded and sees_all and value is layer.values and _has_kernel(query, key, value)


def _has_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    same = query.dtype == key.dtype == value.dtype and query.shape[-1] == key.shape[-1] == value.shape[-1]
    if not same or torch.is_autocast_enabled(query.device.type):
        return False
    return query.shape[-1] % head_multiple(query) == 0 and has_fused_kernel(query, key, value)


def attend(query: Tensor, layer: ContinuedPromptsLayer, scale: float, sinks_H: Tensor | None = None) -> Tensor:
    """Attend to prompts and suffixes.

    Args:
        query: Queries of the last tokens of each row, shape [B, H, L, D].
        layer: Keys and values, including those of these tokens.
        scale: Multiplies the scores.
        sinks_H: A score per head that takes part in the softmax and has no value (gpt-oss).

    Returns:
        Shape [B, H, L, D].
    """
    layer.was_read()
    new = query.shape[2]
    query_BKRD = query.reshape(len(query), layer.keys.shape[1], -1, query.shape[-1])  # R * L for several tokens
    suffix_BKRD, suffix_lse_BKR = _attend_suffixes(query_BKRD, layer, scale, new)
    prompt_BKRD, prompt_lse_BKR = _attend_prompts(query_BKRD, layer, scale)
    attended_BKRD, lse_BKR = suffix_BKRD.to(suffix_lse_BKR.dtype), suffix_lse_BKR
    merge_in_place(attended_BKRD, lse_BKR, prompt_BKRD, prompt_lse_BKR)
    if sinks_H is not None:
        sinks_KR = sinks_H.repeat_interleave(new).view(lse_BKR.shape[1:])
        attended_BKRD *= non_sink_share(lse_BKR, sinks_KR)[..., None]
    return attended_BKRD.to(query.dtype).view(query.shape)


def _attend_suffixes(query_BKRD: Tensor, layer: ContinuedPromptsLayer, scale: float, new: int) -> tuple[Tensor, Tensor]:
    """Attention to the suffixes, with its log-sum-exp [B, K, R]."""
    mask = layer.prompts.rows.mask(new, layer.keys.shape[2], query_BKRD.dtype)
    if mask is not None and new == 1:
        return _attend_masked(query_BKRD, layer, scale, mask)
    if mask is not None:
        heads = (_attend_masked(query, layer, scale, mask) for query in query_BKRD.unflatten(2, (-1, new)).unbind(2))
        outs, lses = zip(*heads, strict=True)
        return torch.cat(outs, dim=2), torch.cat(lses, dim=2)
    if query_BKRD.is_cuda:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query_BKRD, layer.keys, layer.values, scale=scale
        )
        return out, lse
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query_BKRD, layer.keys, layer.values, scale=scale)


def _attend_masked(
    query_BKLD: Tensor, layer: ContinuedPromptsLayer, scale: float, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Masked attention of L queries per key head to the suffixes, with its log-sum-exp [B, K, L]."""
    if not query_BKLD.is_cuda:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query_BKLD, layer.keys, layer.values, attn_mask=mask, scale=scale
        )
    return _masked_softmax(query_BKLD, layer.keys, layer.values, mask, scale)


def _masked_softmax(
    query_BKLD: Tensor, keys_BKSD: Tensor, values_BKSD: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """`_attend_masked` for CUDA, whose FlashAttention takes no mask."""
    dtype = torch.promote_types(query_BKLD.dtype, torch.float32)
    scores_BKLS = (query_BKLD @ keys_BKSD.mT).to(dtype) * scale + mask.to(dtype)
    lse_BKL = scores_BKLS.logsumexp(dim=-1)
    return (scores_BKLS - lse_BKL[..., None]).exp().to(query_BKLD.dtype) @ values_BKSD, lse_BKL


def _attend_prompts(query_BKRD: Tensor, layer: ContinuedPromptsLayer, scale: float) -> tuple[Tensor, Tensor]:
    """Attention to the rows' prompts, with its log-sum-exp [B, K, R]."""
    rows = layer.prompts.rows
    if rows.order is not None:
        query_BKRD = query_BKRD[rows.order]
    run = _run_cpu if layer.packed is None else _run_cuda
    out_BKRD, lse_BKR = run(query_BKRD, layer, scale)
    return (out_BKRD, lse_BKR) if rows.inverse is None else (out_BKRD[rows.inverse], lse_BKR[rows.inverse])


def _run_cpu(query_BKRD: Tensor, layer: ContinuedPromptsLayer, scale: float) -> tuple[Tensor, Tensor]:
    """One call per prompt with rows left."""
    outs, lses = [], []
    spans = pairwise(accumulate(layer.prompts.rows.counts, initial=0))
    for (first, last), keys_SKD, values_SKD in zip(spans, layer.prompt_keys, layer.prompt_values, strict=True):
        if first == last:
            continue
        queries_KND = query_BKRD[first:last].transpose(0, 1).flatten(1, 2)
        keys_KSD, values_KSD = keys_SKD.transpose(0, 1), values_SKD.transpose(0, 1)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries_KND[None], keys_KSD[None], values_KSD[None], scale=scale
        )
        outs.append(out[0].unflatten(1, (last - first, -1)).transpose(0, 1))
        lses.append(lse[0].unflatten(1, (last - first, -1)).transpose(0, 1))
    return (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs), torch.cat(lses))


def _run_cuda(query_BKRD: Tensor, layer: ContinuedPromptsLayer, scale: float) -> tuple[Tensor, Tensor]:
    """All prompts in one call; those without rows have no queries."""
    assert layer.packed is not None
    (keys_TKD, values_TKD), prompts = layer.packed, layer.prompts
    batch, heads, per_head, size = query_BKRD.shape
    queries_NKD = query_BKRD.transpose(1, 2).reshape(batch * per_head, heads, size)
    out_NKD, lse_KN, *_ = torch.ops.aten._flash_attention_forward(
        queries_NKD, keys_TKD, values_TKD, prompts.rows.starts * per_head, prompts.starts_on_device,
        max(prompts.rows.counts) * per_head, max(prompts.lengths), 0.0, False, False, scale=scale,
    )  # fmt: skip
    out_BRKD, lse_BRK = out_NKD.view(batch, per_head, heads, size), lse_KN.t().view(batch, per_head, heads)
    return out_BRKD.transpose(1, 2), lse_BRK.transpose(1, 2)
