"""Estimates the memory of one device: what training holds, and what is left for tokens and rollouts.

Weights, gradients and moments are counted exactly, from the parameters of models on the meta device; activations from
what autograd saves. docs/memory.md says how that was checked.

Legend: D hidden size, N query heads, K key/value heads, H head size, I intermediate size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pl_grouprl.attention import find_backbone
from pl_grouprl.media.processor import language_model_class
from pl_grouprl.models import LoRAAdapter
from pl_grouprl.planning.activations import KeptBytes, count_kept
from pl_grouprl.utilities.device_defaults import cached_by_layer, cached_bytes, kept_bytes, layer_sizes

GIB = 2**30

USABLE = 0.9
"""Usable share of a device's memory; the rest is for CUDA, the allocator and anything not counted."""

SEQUENCE = 1024
"""Cached tokens per sequence in a table, and the smallest budget that counts as fitting."""

MIN_QUANTIZED = 4096
"""Smaller tensors keep 32-bit moments."""


def empty_model(config: Any, dtype: torch.dtype = torch.float32, adapter: LoRAAdapter | None = None) -> Any:
    """Build a model on the meta device: shapes and dtypes, no storage.

    Args:
        config: A transformers config.
        dtype: Dtype of the weights.
        adapter: Adapter to train instead of the weights.
    """
    import transformers

    with torch.device("meta"):
        model = getattr(transformers, language_model_class(config)).from_config(config, dtype=dtype)
    return model if adapter is None else adapter.add_to(model)


@dataclass(frozen=True)
class Method:
    """What is trained, and how it is stored.

    Attributes:
        name: Printed name.
        trains_all: Train all weights, in float32; otherwise an adapter in float32 on bfloat16 weights.
        state_bits: Bits of the optimizer's states.
        four_bits: Store the linear layers of the frozen base in 4 bits, with 8-bit scales.
        has_reference: Keep a copy of the initial policy (`beta` above 0); an adapter needs none.
    """

    name: str
    trains_all: bool
    state_bits: int = 32
    four_bits: bool = False
    has_reference: bool = False


METHODS = (
    Method("AdamW", True),
    Method("AdamW, `beta` > 0", True, has_reference=True),
    Method("8-bit AdamW", True, 8),
    Method("8-bit AdamW, `beta` > 0", True, 8, has_reference=True),
    Method("LoRA", False),
    Method("4 bits and LoRA", False, four_bits=True),
)


@dataclass(frozen=True)
class Held:
    """Bytes of one model that do not depend on the number of tokens.

    Attributes:
        weights: Weights, including an adapter and the scales of 4-bit weights.
        gradients: Gradients of trained parameters; kept until the next update begins.
        moments: AdamW's moments.
        copies: Temporary copies of weights in another dtype during an update: autocast's bfloat16 copies of float32
            matrices, and the largest 4-bit matrix, dequantized.
    """

    weights: int = 0
    gradients: int = 0
    moments: int = 0
    copies: int = 0

    def __add__(self, other: Held) -> Held:
        """The sum of two models."""
        first, second = vars(self), vars(other)
        return Held(**{name: first[name] + second[name] for name in first})


def held_bytes(
    model: Any,
    *,
    state_bits: int = 32,
    four_bits: bool = False,
    autocast: bool = True,
    known: Sequence[nn.Parameter] = (),
) -> Held:
    """Count a model's weights, gradients, moments and copies.

    Args:
        model: A model, on any device. Parameters without `requires_grad` are frozen.
        state_bits: Bits of the optimizer's states.
        four_bits: Whether the frozen linear layers, except for the head, are stored in 4 bits.
        autocast: Whether the precision is mixed.
        known: Parameters already counted with another model.
    """
    backbone = find_backbone(model) if hasattr(model, "get_decoder") else model
    matrices = {module.weight for module in backbone.modules() if isinstance(module, nn.Linear)} - set(known)
    embeddings = {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    quantized = {p for p in matrices if four_bits and not p.requires_grad}
    counted = set(model.parameters()) - set(known)
    trained = [p for p in counted if p.requires_grad]
    copied = sum(2 * p.numel() for p in matrices if autocast and p.dtype == torch.float32 and p not in quantized)
    return Held(
        weights=sum(four_bit_bytes(p.numel()) if p in quantized else p.nbytes for p in counted),
        gradients=sum(p.nbytes for p in trained),
        moments=sum(moment_bytes(p.numel(), state_bits, p in embeddings, p.element_size()) for p in trained),
        copies=copied + max((2 * p.numel() for p in quantized), default=0),
    )


def moment_bytes(size: int, bits: int, is_embedding: bool = False, width: int = 4) -> int:
    """Bytes of both moments, `width` bytes per value; with 8 bits, plus a float32 scale per block of 256 in each."""
    if bits == 32 or is_embedding or size < MIN_QUANTIZED:
        return 2 * width * size
    return 2 * (size + 4 * math.ceil(size / 256))


def four_bit_bytes(size: int) -> int:
    """Bytes of a 4-bit matrix: codes, an 8-bit scale per 64 of them, and a float32 scale per 256 scales."""
    scales = math.ceil(size / 64)
    return math.ceil(size / 2) + scales + 4 * math.ceil(scales / 256)


@dataclass(frozen=True)
class LayerBytes:
    """Bytes per token of a decoder.

    Attributes:
        config: The decoder's config.
        kept: What its layers keep for the backward pass.
        trains_all: Whether all weights are trained, not an adapter.
        width: Bytes of a value in the KV cache.
        is_counted: Whether `kept` is counted; an upper estimate otherwise.
    """

    config: Any
    kept: KeptBytes
    trains_all: bool = True
    width: int = 4
    is_counted: bool = True

    @classmethod
    def of(cls, model: Any, *, autocast: bool, width: int) -> LayerBytes:
        """Count them for a model on the meta device, which is of no use afterwards."""
        trains_all = all(parameter.requires_grad for parameter in model.parameters())
        config = model.config.get_text_config(decoder=True)
        try:
            return cls(config, count_kept(model, autocast=autocast), trains_all, width)
        except TypeError:
            kept = kept_bytes(config, 2 if autocast else model.dtype.itemsize)
            if not kept:
                raise
            inputs = sum(4 * hidden for hidden, *_ in layer_sizes(config))
            return cls(config, KeptBytes(sum(kept), max(kept), inputs), trains_all, width, is_counted=False)

    @property
    def working(self) -> int:
        """The gradients inside the layer that is in its backward pass."""
        hidden, queries, inner = (max(sizes) for sizes in zip(*layer_sizes(self.config), strict=True))
        return 8 * hidden + 2 * queries + 4 * inner if self.trains_all else 14 * hidden + 6 * inner

    def activations(self, checkpointing: bool) -> tuple[int, int]:
        """Bytes that the forward pass leaves behind, and the extra bytes while a layer is in its backward pass."""
        if not checkpointing:
            return self.kept.total, self.working
        return self.kept.inputs, self.kept.largest + self.working

    @property
    def head(self) -> int:
        """Total bytes (not per token) of logits for 512 tokens, temporaries, and the gradient of a trained head."""
        logits = 512 * self.config.vocab_size
        return 3 * logits + 4 * self.config.vocab_size * self.config.hidden_size if self.trains_all else logits

    @property
    def cache(self) -> int:
        """Keys and values of a token in all layers."""
        return cached_bytes(self.config, self.width)

    def caches(self, prompts: int, prompt: int, sequences: int, response: int) -> int:
        """Bytes of the caches of a rollout, of sequences of equal length; prompts are shared where layers allow it."""
        shared, whole = prompts * prompt + sequences * response, prompt + response
        layers = cached_by_layer(self.config, self.width)
        return sum(size * (shared if kept is None else sequences * min(kept, whole)) for size, kept in layers)


@dataclass(frozen=True)
class Footprint:
    """What one device holds in a run.

    Attributes:
        policy: The policy.
        layers: The policy's bytes per token.
        reference: Bytes of the reference policy or teacher.
        critic: What the critic adds.
        critic_layers: The critic's bytes per token, if it has its own backbone.
        gathered: Weights that rollouts gather from other devices.
        sampling_copy: The copy of the weights that rollouts make in another dtype.
    """

    policy: Held
    layers: LayerBytes
    reference: int = 0
    critic: Held = Held()
    critic_layers: LayerBytes | None = None
    gathered: int = 0
    sampling_copy: int = 0

    @property
    def resident(self) -> int:
        """Bytes held at all times, in rollouts too."""
        models = self.policy + self.critic
        return models.weights + models.gradients + models.moments + self.reference

    @property
    def copies(self) -> int:
        """Bytes of weights in another dtype during updates."""
        return self.policy.copies + self.critic.copies

    def activations(self, tokens: int, checkpointing: bool) -> int:
        """Peak bytes of a micro-batch, without logits."""
        left, inside = self._per_token(checkpointing)
        return tokens * (left + inside)

    def logits(self, tokens: int, checkpointing: bool) -> int:
        """Bytes that the head adds to that peak; the head is done before the backward pass reaches the layers."""
        left, _ = self._per_token(checkpointing)
        return max(0, tokens * left + self.layers.head - self.activations(tokens, checkpointing))

    def _per_token(self, checkpointing: bool) -> tuple[int, int]:
        pairs = [
            layers.activations(checkpointing) for layers in (self.layers, self.critic_layers) if layers is not None
        ]
        return sum(left for left, _ in pairs), max(inside for _, inside in pairs)

    def largest_budget(self, gib: float, checkpointing: bool) -> int:
        """Most tokens in a micro-batch on a device with this many GiB; 0 or less if nothing fits."""
        room = int(gib * GIB * USABLE) - self.resident - self.copies
        left, inside = self._per_token(checkpointing)
        return min(room // (left + inside), (room - self.layers.head) // left)

    def cached_tokens(self, gib: float) -> int:
        """Most tokens in the KV caches of a rollout."""
        room = int(gib * GIB * USABLE) - self.resident - self.gathered - self.sampling_copy
        return room // max(1, self.layers.cache)


def footprint_of_method(config: Any, method: Method, rank: int = 16) -> Footprint:
    """Memory of a device that trains a model of this config with a method, without a critic.

    Args:
        config: A transformers config.
        method: The method.
        rank: Rank of the adapter, which is on all linear layers of the decoder.
    """
    adapter = None if method.trains_all else LoRAAdapter(r=rank)
    model = empty_model(config, torch.float32 if method.trains_all else torch.bfloat16, adapter)
    held = held_bytes(model, state_bits=method.state_bits, four_bits=method.four_bits)
    layers = LayerBytes.of(model, autocast=True, width=2)
    reference = held.weights if method.has_reference and method.trains_all else 0
    return Footprint(held, layers, reference, sampling_copy=held.weights // 2 if method.trains_all else 0)


SHARDED = ("fsdp", "fsdp2", "deepspeed_stage_3")
"""Strategies that shard the weights."""


def divided(footprint: Footprint, strategy: str, devices: int) -> Footprint:
    """Shard a footprint as a strategy does; docs/memory.md has the table.

    Args:
        footprint: Memory of the whole models.
        strategy: `single`, `ddp`, `fsdp`, `fsdp2`, `deepspeed_stage_2` or `deepspeed_stage_3`.
        devices: Number of processes.
    """
    if strategy == "single":
        return footprint
    shard = 1 / devices
    weights, gradients, moments = {
        "ddp": (1.0, 2.0, 1.0),  # gradients and their communication buckets
        "deepspeed_stage_2": (1 + shard, shard, shard),  # the update's copy of the weights
        "deepspeed_stage_3": (2 * shard, shard, shard),
    }.get(strategy, (shard, shard, shard))

    def share(held: Held) -> Held:
        return Held(
            round(held.weights * weights), round(held.gradients * gradients), round(held.moments * moments), held.copies
        )

    is_sharded = strategy in SHARDED
    return replace(
        footprint,
        policy=share(footprint.policy),
        critic=share(footprint.critic),
        reference=round(footprint.reference * (shard if is_sharded else 1)),
        gathered=footprint.policy.weights if is_sharded else 0,
    )
