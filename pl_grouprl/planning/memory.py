"""Memory of one device, counted: what training holds, and what is left for tokens and for rollouts.

Weights, gradients and moments are counted exactly, from the parameters of models on the meta device. Activations follow
a formula whose coefficients were counted for PyTorch's operations of a Qwen3 layer under `bf16-mixed`; docs/memory.md
has it, and what it was compared with.

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

GIB = 2**30

USABLE = 0.9
"""Share of a device's memory that is counted on; the rest is for CUDA, the allocator and what is not counted."""

SEQUENCE = 1024
"""Tokens of a sequence in a table's cache, and the smallest budget that counts as fitting."""

MIN_QUANTIZED = 4096
"""Smaller tensors keep moments of 32 bits."""


def empty_model(config: Any, dtype: torch.dtype = torch.float32, adapter: LoRAAdapter | None = None) -> Any:
    """Build a model on the meta device: shapes and dtypes, no storage.

    Args:
        config: A transformers config.
        dtype: Of the weights.
        adapter: Trained in place of the weights.
    """
    import transformers

    with torch.device("meta"):
        model = getattr(transformers, language_model_class(config)).from_config(config, dtype=dtype)
    return model if adapter is None else adapter.add_to(model)


@dataclass(frozen=True)
class Method:
    """What is trained, and how it is stored.

    Attributes:
        name: As printed.
        trains_all: Train all weights, in float32; otherwise an adapter, in float32, on weights in bfloat16.
        state_bits: Of the optimizer.
        four_bits: Store the linear layers of the frozen base in 4 bits, with scales of 8 bits.
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
        weights: With an adapter and the scales of 4-bit weights.
        gradients: Of what is trained; kept until the next update begins.
        moments: Of AdamW.
        copies: Weights that an update has in another dtype meanwhile: autocast's copies of the float32 matrices in
            bfloat16, and the largest 4-bit matrix, dequantized.
    """

    weights: int = 0
    gradients: int = 0
    moments: int = 0
    copies: int = 0

    def __add__(self, other: Held) -> Held:
        """Add up two models."""
        own, others = vars(self), vars(other)
        return Held(**{name: own[name] + others[name] for name in own})


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
        state_bits: Of the optimizer.
        four_bits: Whether the frozen linear layers, except for the head, are stored in 4 bits.
        autocast: Whether the precision is a mixed one.
        known: Parameters that another model has counted.
    """
    backbone = find_backbone(model) if hasattr(model, "get_decoder") else model
    matrices = {module.weight for module in backbone.modules() if isinstance(module, nn.Linear)} - set(known)
    embeddings = {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    quantized = {p for p in matrices if four_bits and not p.requires_grad}
    own = set(model.parameters()) - set(known)
    trained = [p for p in own if p.requires_grad]
    copied = sum(2 * p.numel() for p in matrices if autocast and p.dtype == torch.float32 and p not in quantized)
    return Held(
        weights=sum(four_bit_bytes(p.numel()) if p in quantized else p.nbytes for p in own),
        gradients=sum(p.nbytes for p in trained),
        moments=sum(moment_bytes(p.numel(), state_bits, p in embeddings, p.element_size()) for p in trained),
        copies=copied + max((2 * p.numel() for p in quantized), default=0),
    )


def moment_bytes(size: int, bits: int, is_embedding: bool = False, width: int = 4) -> int:
    """Both moments of a tensor, in its dtype; with 8 bits, a float32 scale for each block of 256 in either."""
    if bits == 32 or is_embedding or size < MIN_QUANTIZED:
        return 2 * width * size
    return 2 * (size + 4 * math.ceil(size / 256))


def four_bit_bytes(size: int) -> int:
    """A 4-bit matrix: codes, a scale of 8 bits for each 64 of them, and a float32 scale for each 256 scales."""
    scales = math.ceil(size / 64)
    return math.ceil(size / 2) + scales + 4 * math.ceil(scales / 256)


@dataclass(frozen=True)
class LayerBytes:
    """Bytes per token of a decoder, by its config.

    Attributes:
        config: The decoder's config.
        rank: Rank of the trained adapter; None if all weights are trained.
        width: Bytes of a weight, and so of a number in the cache.
    """

    config: Any
    rank: int | None = None
    width: int = 4

    @property
    def _sizes(self) -> tuple[int, int, int, int, int, int]:
        """N, K, D, N H, K H and I."""
        config = self.config
        heads = config.num_attention_heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        experts = getattr(config, "moe_intermediate_size", None)
        if experts:
            inner = experts * (getattr(config, "num_experts_per_tok", None) or 1)
        return heads, key_heads, config.hidden_size, heads * head_dim, key_heads * head_dim, inner

    @property
    def kept_per_layer(self) -> int:
        """What a layer keeps for its backward pass without checkpointing."""
        heads, key_heads, hidden, query, key, inner = self._sizes
        norms = 8 * heads + 4 * key_heads  # of heads; log-sum-exp
        if self.rank is None:
            return 26 * hidden + 10 * query + 10 * key + 8 * inner + norms + 8
        return 18 * hidden + 10 * query + 8 * key + 8 * inner + norms + 8 + 14 * self.rank

    @property
    def working(self) -> int:
        """The gradients inside the layer that is differentiated."""
        _, _, hidden, query, _, inner = self._sizes
        return 8 * hidden + 2 * query + 4 * inner if self.rank is None else 14 * hidden + 6 * inner

    def activations(self, checkpointing: bool) -> tuple[int, int]:
        """Bytes that the forward pass leaves, and those in addition while a layer is differentiated."""
        layers = self.config.num_hidden_layers
        if not checkpointing:
            return layers * self.kept_per_layer, self.working
        stream = (4 if self.rank is None else 2) * self.config.hidden_size  # the input of a layer
        return layers * stream, self.kept_per_layer + self.working

    @property
    def head(self) -> int:
        """Logits, kept for 512 tokens (not per token), and blocks of them; for a trained head also its new gradient."""
        logits = 512 * self.config.vocab_size
        return logits if self.rank is not None else 3 * logits + 4 * self.config.vocab_size * self.config.hidden_size

    @property
    def cache(self) -> int:
        """Keys and values in all layers; rollouts run in the dtype of the weights."""
        return 2 * self.width * self._sizes[4] * self.config.num_hidden_layers


@dataclass(frozen=True)
class Footprint:
    """What one device holds in a run.

    Attributes:
        policy: The policy.
        layers: Its bytes per token.
        reference: Bytes of a frozen copy, or of a teacher.
        critic: What the critic adds.
        critic_layers: Its bytes per token, if it has its own backbone.
        gathered: Weights that rollouts gather from other devices.
    """

    policy: Held
    layers: LayerBytes
    reference: int = 0
    critic: Held = Held()
    critic_layers: LayerBytes | None = None
    gathered: int = 0

    @property
    def resident(self) -> int:
        """Bytes at any time, in rollouts too."""
        models = self.policy + self.critic
        return models.weights + models.gradients + models.moments + self.reference

    @property
    def copies(self) -> int:
        """Bytes of weights in another dtype during updates."""
        return self.policy.copies + self.critic.copies

    def activations(self, tokens: int, checkpointing: bool) -> int:
        """Bytes of a micro-batch at its peak, logits not included."""
        left, inside = self._per_token(checkpointing)
        return tokens * (left + inside)

    def logits(self, tokens: int, checkpointing: bool) -> int:
        """Bytes that the head adds to that peak; it is done before the first layer is differentiated."""
        left, _ = self._per_token(checkpointing)
        return max(0, tokens * left + self.layers.head - self.activations(tokens, checkpointing))

    def _per_token(self, checkpointing: bool) -> tuple[int, int]:
        own = [layers.activations(checkpointing) for layers in (self.layers, self.critic_layers) if layers is not None]
        return sum(left for left, _ in own), max(inside for _, inside in own)

    def largest_budget(self, gib: float, checkpointing: bool) -> int:
        """Most tokens of a micro-batch on a device of so many GiB; 0 or less if nothing fits."""
        room = int(gib * GIB * USABLE) - self.resident - self.copies
        left, inside = self._per_token(checkpointing)
        return min(room // (left + inside), (room - self.layers.head) // left)

    def cached_tokens(self, gib: float) -> int:
        """Most tokens in the caches of a rollout."""
        return (int(gib * GIB * USABLE) - self.resident - self.gathered) // self.layers.cache


def footprint_of_method(config: Any, method: Method, rank: int = 16) -> Footprint:
    """What a device holds if a model of this config is trained by a method, without a critic.

    Args:
        config: A transformers config.
        method: The method.
        rank: Of the adapters, on all linear layers of the decoder.
    """
    adapter = None if method.trains_all else LoRAAdapter(r=rank)
    model = empty_model(config, torch.float32 if method.trains_all else torch.bfloat16, adapter)
    held = held_bytes(model, state_bits=method.state_bits, four_bits=method.four_bits)
    layers = LayerBytes(
        config.get_text_config(decoder=True),
        None if method.trains_all else rank,
        4 if method.trains_all else 2,
    )
    return Footprint(held, layers, held.weights if method.has_reference and method.trains_all else 0)


SHARDED = ("fsdp", "fsdp2", "deepspeed_stage_3")
"""Strategies that divide the weights."""


def divided(footprint: Footprint, strategy: str, devices: int) -> Footprint:
    """Divide a footprint as a strategy does; docs/memory.md has the table.

    Args:
        footprint: Of the whole models.
        strategy: `single`, `ddp`, `fsdp`, `fsdp2`, `deepspeed_stage_2` or `deepspeed_stage_3`.
        devices: Number of processes.
    """
    if strategy == "single":
        return footprint
    shard = 1 / devices
    weights, gradients, moments = {
        "ddp": (1.0, 2.0, 1.0),  # gradients and their buckets
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
