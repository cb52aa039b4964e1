"""The backends by name, and how `auto` chooses; FlexAttention and the Prefix Grouper's package as backends.

Legend: T packed tokens, S of them that run, H query heads, K key/value heads, D head size of keys, V of values,
P groups, L tokens of the longest group.
"""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pl_grouprl.attention.backends.cascade import CASCADE, has_fast_kernel, non_sink_share
from pl_grouprl.attention.backends.interface import (
    REFERENCE,
    AttentionRule,
    Backend,
    needs_gradient,
    visibility_function,
)
from pl_grouprl.packing import SharedPrefixLayout
from pl_grouprl.utilities import optional
from pl_grouprl.utilities.tolerances import TOLERANCES, gradient_difference


def get_backend(name: str, argument: str = "backend") -> Backend:
    """Find a backend by name.

    Raises:
        ValueError: If the name is unknown; names the caller's argument.
    """
    if name not in BACKENDS:
        raise ValueError(f"{argument} is {name!r}; choose one of {', '.join(sorted(BACKENDS))}.")
    return BACKENDS[name]


def register_backend(backend: Backend) -> None:
    """Register a backend under its name.

    Args:
        backend: Must have a new name. `auto` chooses it where its `preference` is highest.

    Raises:
        ValueError: If the name is taken.
    """
    if backend.name in BACKENDS:
        raise ValueError(f"there is an attention backend named {backend.name!r} already; choose another name.")
    BACKENDS[backend.name] = backend


def choose(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: AttentionRule,
    compiled: bool = False,
    layout: SharedPrefixLayout | None = None,
) -> Backend:
    """Choose the backend that `auto` runs for a layer: the usable backend with the highest preference.

    If that is the cascade on CUDA, this also switches PyTorch to the newest FlashAttention installed, for the whole
    process (`use_newest_flash_attention`).

    Args:
        query: Shape [1, H, S, D].
        key: Shape [1, K, T, D].
        value: Shape [1, K, T, V].
        rule: How the layer attends.
        compiled: Whether the layer is compiled.
        layout: Layout of the row; None omits backends that cannot run every layout.
    """
    candidates = [
        (preference, backend)
        for backend in BACKENDS.values()
        if (backend.in_compiled_layers or not compiled)
        and backend.runs(layout)
        and (preference := backend.preference(query, key, value, rule)) is not None
    ]
    ordered = sorted(candidates, key=lambda entry: -entry[0])
    chosen = next(backend for _, backend in ordered if backend.refusal(query, key, value, rule) is None)
    if chosen is CASCADE and query.is_cuda and has_fast_kernel(query, key, value, rule):
        sizes = query.shape[1], key.shape[1], key.shape[3], value.shape[3]
        use_newest_flash_attention(query.device, query.dtype, sizes, rule.window is not None)
    return chosen


# FlashAttention-3 and 4 are packages. PyTorch's switch replaces its FlashAttention-2 with their kernels, for all
# of the process. FlashAttention-4 has windows from PyTorch 2.13 on.

_NEWER = {"FA3": optional.FLASH_ATTENTION_3_AVAILABLE, "FA4": optional.FLASH_ATTENTION_4_AVAILABLE}
"""Whether the versions are installed, by PyTorch's names."""

_RUNS_ON = {"FA3": (9,), "FA4": (9, 10)}
"""Major compute capabilities: 9 is Hopper, 10 is Blackwell."""

_SMALL = SharedPrefixLayout([40, 9, 17, 1], [None, 0, 0, None])

_given_up: list[str] = []
"""The version that failed in this process, which then keeps FlashAttention-2."""


@cache
def use_newest_flash_attention(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int, int], has_window: bool
) -> None:
    """Let the cascade's FlashAttention be the newest one installed, if it is right for layers of this kind.

    The first version that is installed for the GPU is tried on a small row, forward and backward. If it raises or
    differs from the reference by more than rounding, now or for a later kind of layer, the process keeps PyTorch's
    own. Another version that is active already stays. PyTorch 2.10 cannot switch back, so nothing is tried there.

    Args:
        device: The GPU.
        dtype: Of queries, keys and values.
        sizes: H, K, D and V.
        has_window: Whether the layers have a window.
    """
    from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

    switch: Any = torch.nn.attention
    if not any(_NEWER.values()) or _given_up or not hasattr(switch, "restore_flash_attention_impl"):
        return
    major, active = torch.cuda.get_device_capability(device)[0], switch.current_flash_attention_impl()
    name = next((name for name, installed in _NEWER.items() if installed and major in _RUNS_ON[name]), None)
    if name is None or active not in (None, name):
        return
    try:
        if active is None:
            switch.activate_flash_attention_impl(name)
        # A separate thread has no autocast, no checkpointing, and records gradients.
        with ThreadPoolExecutor(1) as thread:
            error = thread.submit(_error_on_a_small_row, device, dtype, sizes, has_window).result()
        tolerance = TOLERANCES[dtype].hidden
        problem = "" if error <= tolerance else f"it differs from the reference by {error:.1e} (limit {tolerance:g})"
    except Exception as raised:
        problem = str(raised)
    if problem:
        _given_up.append(name)
        switch.restore_flash_attention_impl()
        rank_zero_warn(f"{name} is installed but not used, attention runs PyTorch's FlashAttention-2: {problem}.")
    elif active is None:
        rank_zero_info(f"Attention runs {name}, which is installed; sharing.backend: cascade keeps FlashAttention-2.")


def _error_on_a_small_row(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int, int], has_window: bool
) -> float:
    """The cascade's largest relative error among output and gradients, against the reference in float32."""
    heads, kv_heads, key_size, value_size = sizes
    rule = AttentionRule(key_size**-0.5, window=12 if has_window else None)
    generator = torch.Generator().manual_seed(0)
    shapes = [(heads, key_size), (kv_heads, key_size), (kv_heads, value_size)]
    rows = [torch.randn(1, count, _SMALL.num_tokens, size, generator=generator).to(dtype) for count, size in shapes]
    results = []
    for backend, wide in ((CASCADE, dtype), (ORACLE, torch.float32)):
        tensors = [row.to(device, wide).requires_grad_() for row in rows]
        out = backend.attend(tensors[0], tensors[1], tensors[2], _SMALL, rule)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), tensors)])
    return max(gradient_difference([one], [other]) for one, other in zip(*results, strict=True))


# FlexAttention with the layout's mask. PyTorch has no backward pass for it on CPU, so there it only serves scoring. On
# CUDA it is compiled with dynamic shapes: rows of other lengths and layouts run the same program. (A row of one block
# compiles separately, as may the first row if it has as many blocks as heads.)

BLOCK = 128
"""Size of a mask block, in queries and keys."""

_SMALLEST_HEAD = 16
"""Of the kernel on CUDA."""

_PAIRS = 2**26
"""Query-key pairs whose visibility is computed at a time."""


@cache
def _flex_attention(device_type: str) -> Any:
    """Compiled on CUDA; not on CPU, where the compiled version lacks most rules."""
    from torch.nn.attention.flex_attention import flex_attention

    if device_type != "cuda":
        return flex_attention
    from lightning.pytorch.utilities.rank_zero import rank_zero_info

    rank_zero_info("FlexAttention compiles for this model, forward and backward, which may take a minute.")
    return torch.compile(flex_attention, dynamic=True)


def block_mask(layout: SharedPrefixLayout, rule: AttentionRule, device: torch.device) -> Any:
    """The same mask as `create_block_mask`, without a dense mask of all pairs in memory."""
    from torch.nn.attention.flex_attention import BlockMask

    sees = visibility_function(layout, rule, device)
    tokens = torch.arange(layout.num_tokens, device=device)
    query_tokens = tokens[layout.num_prefilled :]

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(query_tokens[query], key)

    some, every = [], []
    rows = max(1, _PAIRS // (BLOCK * max(1, layout.num_tokens))) * BLOCK
    for queries in query_tokens.split(rows):
        seen = sees(queries[:, None], tokens[None])
        seen = pad(seen, (0, -len(tokens) % BLOCK, 0, -len(queries) % BLOCK))
        tiles = seen.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        some.append(tiles.any(3).any(1))
        every.append(tiles.all(3).all(1))
    full = torch.cat(every)
    return BlockMask.from_kv_blocks(
        *_counted(torch.cat(some) & ~full), *_counted(full), BLOCK_SIZE=BLOCK, mask_mod=visible,
        seq_lengths=(layout.num_queries, layout.num_tokens),
    )  # fmt: skip


def _counted(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Per block of queries, the number of key blocks it sees, and all key blocks, these first; int32, [1, 1, ...]."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


def _attend_flex(query: Tensor, key: Tensor, value: Tensor, layout: SharedPrefixLayout, rule: AttentionRule) -> Tensor:
    from torch.nn.attention.flex_attention import AuxRequest

    softcap = rule.softcap or 0.0

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    key_of_mask = ("block_mask", query.device, rule.visibility)
    mask = layout.memo(key_of_mask, lambda: block_mask(layout, rule, query.device))
    if not needs_gradient(query, key, value):  # the CPU kernel checks requires_grad even if no graph is recorded
        query, key, value = query.detach(), key.detach(), value.detach()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        out, aux = _flex_attention(query.device.type)(
            query,
            key,
            value,
            score_mod=None if rule.softcap is None else capped,
            block_mask=mask,
            scale=rule.scale,
            enable_gqa=query.shape[1] != key.shape[1],
            return_aux=AuxRequest(lse=rule.sinks_H is not None),
        )
    if rule.sinks_H is not None:
        out = out * non_sink_share(aux.lse, rule.sinks_H[None, :, None])[..., None].to(out.dtype)
    return out.transpose(1, 2)


def _flex_refusal(query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> str | None:
    gradient = needs_gradient(query, key, value) or (rule.sinks_H is not None and needs_gradient(rule.sinks_H))
    if query.device.type == "mps":
        return "FlexAttention has neither gradients nor log-sum-exps on mps; use backend 'cascade'."
    if query.device.type == "cpu" and gradient:
        return "FlexAttention has no backward pass on CPU; use backend 'cascade' for training there."
    if query.device.type == "cuda" and (size := min(query.shape[-1], value.shape[-1])) < _SMALLEST_HEAD:
        return f"FlexAttention on CUDA needs heads of at least {_SMALLEST_HEAD}, here {size}; use backend 'cascade'."
    return None


def _flex_preference(query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> int | None:
    """On CUDA, for what fused kernels lack: soft caps in half precision, bidirectional images under a window.

    Not in float32 where the cascade serves, whose matrix products need not be compiled first.
    """
    if not query.is_cuda:
        return None
    return 2 if query.dtype in (torch.bfloat16, torch.float16) else 0  # of equals, the first in `BACKENDS` runs


# Compiled layers call attention as an opaque operator, in which FlexAttention would run uncompiled and dense.
FLEX = Backend("flex", _attend_flex, _flex_refusal, in_compiled_layers=False, preference=_flex_preference)


# The public package of the Prefix Grouper paper (arXiv:2506.05433), which verl uses. It pads groups to one length,
# copies the prefix's keys and values for each rollout, and only supports prompts with rollouts.


def _attend_prefix_grouper(
    query: Tensor, key: Tensor, value: Tensor, layout: SharedPrefixLayout, rule: AttentionRule
) -> Tensor:
    def plan() -> tuple[Any, Tensor, tuple[Tensor, ...]]:
        from prefix_grouper import PrefixGrouper

        groups: list[list[int]] = []
        for index in layout.depth_first_order:
            segment = layout.segments[index]
            if segment.parent is None:
                groups.append([])
            groups[-1].append(segment.length)
        # The package needs a child, so a root alone gets an empty one.
        groups = [group if len(group) > 1 else [*group, 0] for group in groups]
        grouper = PrefixGrouper(groups, device=query.device, padding_mode="right")
        places_T = layout.depth_first_places.to(query.device)
        kept_PL: Tensor = grouper.padding_mask
        return grouper, kept_PL, tuple(index[places_T] for index in kept_PL.nonzero(as_tuple=True))

    grouper, kept_PL, places = layout.memo(("prefix_grouper", query.device), plan)
    padded = []
    for tensor in (query, key, value):
        batch = tensor.new_zeros(*kept_PL.shape, tensor.shape[1], tensor.shape[3])
        batch = batch.index_put(places, tensor[0].transpose(0, 1))
        padded.append(batch.transpose(1, 2))
    out_PLHD = grouper.forward(_sdpa, *padded, scale=rule.scale)
    return out_PLHD[places][None]


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float) -> Tensor:
    """Causal attention, aligned lower right, with a padding mask of the keys; returns [batch, length, H, D]."""
    queries, keys = query.shape[2], key.shape[2]
    causal = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    allowed = causal & mask.bool()[:, None, None, :]
    # Let padding rows see themselves, so their unused results and gradients stay finite.
    allowed = allowed | torch.eye(queries, keys, dtype=torch.bool, device=query.device).roll(keys - queries, 1)
    heads_per_key = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(heads_per_key, dim=1) for tensor in (key, value))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, allowed, scale=scale)
    return out.transpose(1, 2)


def _prefix_grouper_refusal(query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> str | None:
    if rule.features:
        return f"the package does not support {', '.join(rule.features)}; use backend 'auto'."
    if key.shape[-1] != value.shape[-1]:
        return f"keys have head size {key.shape[-1]} and values {value.shape[-1]}; use backend 'auto'."
    return None


PREFIX_GROUPER = Backend(
    "prefix_grouper", _attend_prefix_grouper, _prefix_grouper_refusal, max_depth=1, takes_prefilled=False
)


def _attend_auto(query: Tensor, key: Tensor, value: Tensor, layout: SharedPrefixLayout, rule: AttentionRule) -> Tensor:
    return choose(query, key, value, rule, layout=layout)(query, key, value, layout, rule)


AUTO = Backend("auto", _attend_auto, choice=choose)
ORACLE = REFERENCE
"""The backend that all others are compared with."""

BACKENDS = {backend.name: backend for backend in (AUTO, CASCADE, FLEX, PREFIX_GROUPER, REFERENCE)}
