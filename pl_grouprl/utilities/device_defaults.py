"""What a run does on a GPU where its user set nothing: every decision, as a function of plain facts.

Nothing here overrides an option that was set. `training.device_choices` applies the decisions and logs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

GIB = 2**30

SHARE_FOR_CACHES = 0.5
"""Share of the free memory that the caches of rollouts may take; growing one holds it twice for a moment."""

SHARE_FOR_ACTIVATIONS = 0.7
"""Share of the free memory that a micro-batch may take; the rest is for the allocator and what is not counted."""

ALWAYS_FITS = GIB
"""Rollouts that take less are sampled at once whatever is free, so small runs are the same on a busy machine."""

MIN_TOKENS = 1024
"""Smallest token budget of a micro-batch, and its unit."""


class DeviceRates(NamedTuple):
    """Data sheet figures of a GPU.

    Attributes:
        gib: Memory in GiB.
        operations: Dense 16-bit operations per second.
        bandwidth: Bytes read from its memory per second.
    """

    gib: int
    operations: float
    bandwidth: float


DEVICES: dict[str, DeviceRates] = {
    "a10": DeviceRates(24, 125e12, 600e9),
    "a100": DeviceRates(80, 312e12, 2039e9),
    "h100": DeviceRates(80, 989e12, 3350e9),
    "h100-nvl": DeviceRates(94, 835e12, 3900e9),
    "h100-pcie": DeviceRates(80, 756e12, 2000e9),
    "h200": DeviceRates(141, 989e12, 4800e9),
    "l4": DeviceRates(24, 121e12, 300e9),
    "l40": DeviceRates(48, 181e12, 864e9),
    "l40s": DeviceRates(48, 362e12, 864e9),
    "rtx4090": DeviceRates(24, 165e12, 1008e9),
}
"""From NVIDIA's data sheets; A100 (80 GB), H100 and H200 as SXM modules.

Not from `lightning.fabric.utilities.throughput`, whose rates are with sparsity for some GPUs, without tensor cores for
others, and those of an L4 for an L40S.
"""


def find_device(name: str) -> str | None:
    """Find a GPU in `DEVICES` by the name that CUDA gives it; None if it is not there."""
    words = set(name.lower().replace("rtx ", "rtx").replace("-", " ").split())
    return max((known for known in DEVICES if words.issuperset(known.split("-"))), key=len, default=None)


def default_precision(accelerator: Any = "auto") -> Literal["bf16-mixed", "32-true"]:
    """The Trainer's `precision` for this machine: bfloat16 with float32 weights on a GPU, float32 elsewhere.

    The command line uses it where `trainer.precision` is not set. In Python, pass it to the Trainer, whose own default
    is float32 everywhere: `Trainer(precision=default_precision())`.

    Args:
        accelerator: The Trainer's `accelerator`.
    """
    may_use_gpu = accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    return "bf16-mixed" if may_use_gpu and torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"


def fuses_adamw(parameters: Iterable[Tensor], scaler: Any = None) -> bool | None:
    """`fused` of AdamW: one kernel for all weights if all are on a GPU; PyTorch's choice if None.

    Args:
        parameters: The trained parameters, or their shards.
        scaler: Scaler of gradients under `16-mixed`. A fused optimizer would unscale them itself, after the module has
            clipped them.
    """
    on_gpu = all(parameter.device.type == "cuda" and parameter.is_floating_point() for parameter in parameters)
    return True if on_gpu and scaler is None else None


Checkpointing = bool | Literal["attention"]
"""Whether layers recompute their activations; `attention` for all but the outputs of attention."""


def checkpoints_activations(setting: Checkpointing | None, device_type: str) -> Checkpointing:
    """Whether a policy recomputes activations: as set, else on a GPU, as in TRL."""
    return device_type == "cuda" if setting is None else setting


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still allocate on a GPU, its allocator's unused ones included, or on the CPU."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    import psutil

    return int(psutil.virtual_memory().available)


def sequences_at_once(count: int, bytes_per_sequence: int, free: Callable[[], int]) -> int:
    """How many of some sequences to sample at once: all, or a power of two that fits in the free memory.

    Args:
        count: The sequences.
        bytes_per_sequence: What a sequence may take.
        free: Free bytes of the device; called only if it matters.
    """
    needed = count * bytes_per_sequence
    if needed <= ALWAYS_FITS or needed <= (room := int(SHARE_FOR_CACHES * free())):
        return count
    return 1 << (max(1, room // bytes_per_sequence).bit_length() - 1)


def tokens_per_micro_batch(free: int, pending: int, bytes_per_token: int) -> int:
    """Token budget of a micro-batch that fits in the free memory.

    Args:
        free: Free bytes of the device.
        pending: Bytes of gradients and moments that are not allocated yet.
        bytes_per_token: What a token takes at the peak of forward and backward.
    """
    room = max(0, int(SHARE_FOR_ACTIVATIONS * free) - pending)
    return max(MIN_TOKENS, room // bytes_per_token // MIN_TOKENS * MIN_TOKENS)


def cached_bytes(config: Any, width: int) -> int:
    """Bytes of keys and values of a token, in all layers with attention; 0 for a model without attention.

    Args:
        config: The decoder's config.
        width: Bytes of a number.
    """
    return sum(size for size, _ in cached_by_layer(config, width))


def sequence_bytes(config: Any, tokens: int, width: int) -> int:
    """Bytes of a sequence that is decoded: the cache of its tokens, and its logits with temporaries.

    Args:
        config: The decoder's config.
        tokens: Tokens in its cache.
        width: Bytes of a number.
    """
    return tokens * cached_bytes(config, width) + 24 * _size(config, "vocab_size")


def cached_by_layer(config: Any, width: int) -> list[tuple[int, int | None]]:
    """Bytes of keys and values of a token in each layer with attention, and how many tokens it keeps if not all.

    Layers with a window or chunks get a copy of the prompt for each of its rollouts; others share it.

    Args:
        config: The decoder's config.
        width: Bytes of a number.
    """
    layers = _layers(config)
    kinds = getattr(config, "layer_types", None) or ["attention"] * len(layers)
    found: list[tuple[int, int | None]] = []
    for layer, kind in zip(layers, kinds, strict=False):
        if "attention" in kind and "linear" not in kind:
            heads = _size(layer, "num_key_value_heads") or _size(layer, "num_attention_heads")
            window = _size(layer, "sliding_window") or _size(layer, "attention_chunk_size") or None
            is_whole = kind in ("attention", "full_attention")
            found.append((width * heads * sum(_head_sizes(layer)), None if is_whole else window))
    return found


def activation_bytes(config: Any, width: int, checkpointing: Checkpointing) -> int:
    """Upper estimate of the bytes that a token takes at the peak of a decoder's forward and backward.

    Layers of Qwen3 keep 26 D + 10 (N + K) H + 8 I bytes under `bf16-mixed`, those of Gemma 3 a quarter more (D hidden
    size, N and K heads of queries and keys, H head size, I inner size). This takes 40, 12 and 10, more for experts,
    and four times as much for layers with a state.

    Args:
        config: The decoder's config.
        width: Bytes of a number in matrix products: 2 or 4.
        checkpointing: How layers recompute their activations.
    """
    layers, kept = _layers(config), kept_bytes(config, width)
    if checkpointing:
        saved = attended_bytes(config, width) if checkpointing == "attention" else 0
        return sum(4 * _size(layer, "hidden_size") for layer in layers) + saved + 2 * max(kept)
    return sum(kept) + max(kept)


def attended_bytes(config: Any, width: int) -> int:
    """Bytes of a token's output and log-sum-exp in all layers with attention: what checkpointing `attention` saves."""
    layers = _layers(config)
    kinds = getattr(config, "layer_types", None) or ["attention"] * len(layers)
    return sum(
        _size(layer, "num_attention_heads") * (width * _head_sizes(layer)[1] + 4)
        for layer, kind in zip(layers, kinds, strict=False)
        if "attention" in kind and "linear" not in kind
    )


def kept_bytes(config: Any, width: int) -> list[int]:
    """Upper estimate of the bytes that each layer keeps of a token; see `activation_bytes`."""
    sizes = []
    for layer in _layers(config):
        hidden, heads = _size(layer, "hidden_size"), _size(layer, "num_attention_heads")
        heads += _size(layer, "num_key_value_heads") or heads
        dense, chosen = _size(layer, "intermediate_size"), _size(layer, "num_experts_per_tok")
        inner = max(dense, chosen * (_size(layer, "moe_intermediate_size") or dense)) or 4 * hidden
        kept = 40 * hidden + 6 * heads * sum(_head_sizes(layer)) + 10 * inner
        if chosen:  # a token is copied for each of its experts
            kept += 24 * chosen * hidden + 10 * inner
        has_state = any("mamba" in name or "linear_num" in name for name in vars(layer))
        sizes.append((4 * kept if has_state else kept) * width // 2)
    return sizes


def layer_sizes(config: Any) -> list[tuple[int, int, int]]:
    """Sizes of each layer: hidden, queries of all heads, and inner, of all experts that a token visits."""
    sizes = []
    for layer in _layers(config):
        hidden, dense = _size(layer, "hidden_size"), _size(layer, "intermediate_size")
        experts = _size(layer, "num_experts_per_tok") * (_size(layer, "moe_intermediate_size") or dense)
        queries = _size(layer, "num_attention_heads") * sum(_head_sizes(layer)) // 2
        sizes.append((hidden, queries, max(dense, experts) or 4 * hidden))
    return sizes


def _layers(config: Any) -> list[Any]:
    """The config of each layer; transformers does not read what differs between layers from the whole config."""
    return list(getattr(config, "per_layer_config", None) or [config] * _size(config, "num_hidden_layers"))


def _head_sizes(layer: Any) -> tuple[int, int]:
    """Sizes of a head of keys and of one of values."""
    head = _size(layer, "head_dim") or _size(layer, "hidden_size") // max(_size(layer, "num_attention_heads"), 1)
    return _size(layer, "qk_head_dim") or head, _size(layer, "v_head_dim") or head


def _size(config: Any, name: str) -> int:
    """A number of a config, the largest if layers differ; 0 if it has none."""
    value = getattr(config, name, None)
    return max(value) if isinstance(value, list | tuple) else value or 0


class FastFloat32:
    """Lets float32 matrix products on a GPU use TF32, until closed, unless the process has chosen otherwise.

    `torch.set_float32_matmul_precision("highest")`, or any other choice by PyTorch's settings, is kept.
    """

    def __init__(self) -> None:
        self.is_open = False

    def open(self, device_type: str) -> bool:
        """Turn TF32 on; returns whether it was."""
        self.close()
        if device_type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "none":
            torch.set_float32_matmul_precision("high")  # sets the newer API's options, too; the reverse does not
            self.is_open = True
        return self.is_open

    def close(self) -> None:
        """Restore PyTorch's defaults."""
        if self.is_open:
            torch.set_float32_matmul_precision("highest")
            for backend in (torch.backends.cuda, torch.backends.mkldnn):
                backend.matmul.fp32_precision = "none"  # not chosen, which differs from "ieee"
            self.is_open = False
