"""Estimates the memory of a run's models on one device: what training holds, and what is left for tokens and rollouts.

Weights, gradients and moments are counted exactly, from the parameters of models on the meta device; activations from
what autograd saves. docs/memory.md says how that was checked.

Legend: D hidden size, N query heads, K key/value heads, H head size, I intermediate size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from pl_grouprl.attention import find_backbone, find_decoder
from pl_grouprl.attention.layer_check import layers_of
from pl_grouprl.media.rows import language_model_class
from pl_grouprl.models import LoRAAdapter, LoRACritic, ModelCost, PolicyCopyCritic, PretrainedCritic, SharedTrunkCritic
from pl_grouprl.models.critic import ValueHead
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.utilities import internals
from pl_grouprl.utilities.device_defaults import (
    DEVICES,
    Checkpointing,
    attended_bytes,
    cached_by_layer,
    cached_bytes,
    checkpoints_activations,
    find_device,
    kept_bytes,
    layer_sizes,
)

GIB = 2**30

USABLE = 0.9
"""Usable share of a device's memory; the rest is for CUDA, the allocator and anything not counted."""

SEQUENCE = 1024
"""Cached tokens per sequence in a table, and the smallest budget that counts as fitting."""

# The hardware that a run is planned for, its precision and strategy.


_CLASSES = {
    "SingleDeviceStrategy": "single",
    "DDPStrategy": "ddp",
    "FSDPStrategy": "fsdp",
    "ModelParallelStrategy": "fsdp2",
}

KNOWN = ("single", "ddp", "fsdp", "fsdp2", "deepspeed_stage_2", "deepspeed_stage_3")

SHARDED = ("fsdp", "fsdp2", "deepspeed_stage_3")
"""Strategies that shard the weights."""


@dataclass(frozen=True)
class Hardware:
    """What a plan needs to know about a Trainer and its machines.

    Attributes:
        precision: As in Lightning.
        gpus: Devices that train on each node.
        nodes: Nodes.
        servers: Further GPUs, which only sample.
        strategy: One of `KNOWN`; `single` becomes `ddp` on several devices, and `ddp` becomes `single` on one.
        device: A name in `DEVICES`, or `cpu`; None for a GPU that is not known.
        memory: Memory of a device in GiB; defaults to the memory of `device`.

    Raises:
        ValueError: If the strategy or the device is unknown, or a number is out of range.
    """

    precision: str = "32-true"
    gpus: int = 1
    nodes: int = 1
    servers: int = 0
    strategy: str = "single"
    device: str | None = None
    memory: float | None = None

    def __post_init__(self) -> None:
        for name, lowest in (("gpus", 1), ("nodes", 1), ("servers", 0)):
            if getattr(self, name) < lowest:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {lowest}.")
        if self.strategy in ("single", "ddp"):
            object.__setattr__(self, "strategy", "single" if self.processes == 1 else "ddp")
        for name, value, known in (("strategy", self.strategy, KNOWN), ("device", self.device, ("cpu", *DEVICES))):
            if value is not None and value not in known:
                raise ValueError(f"{name} is {value!r}; `plan` knows {', '.join(known)}.")

    @property
    def processes(self) -> int:
        """Devices that train."""
        return self.gpus * self.nodes

    @property
    def label(self) -> str:
        """The device, or its memory if that is all that is known of it."""
        return self.device or f"{self.memory:.0f} GB"

    @property
    def gib(self) -> float | None:
        """Memory of a device in GiB; None if it is not known."""
        if self.memory is not None or self.device is None:
            return self.memory
        if self.device == "cpu":
            import psutil

            return float(psutil.virtual_memory().total / GIB)
        return DEVICES[self.device].gib

    @classmethod
    def of_trainer(cls, options: Mapping[str, Any], device: str | None = None) -> Hardware:
        """Read a Trainer's options from a configuration.

        Args:
            options: The Trainer's arguments.
            device: Name of a GPU; defaults to the CPU if the Trainer uses it, or to this machine's GPU.
        """
        devices = options.get("devices")
        if device is not None:
            device = find_device(device) or device
        elif options.get("accelerator") == "cpu":
            device, devices = "cpu", 1 if devices in (None, "auto") else devices
        elif torch.cuda.is_available():
            device = find_device(torch.cuda.get_device_name())
        return cls(
            str(options.get("precision") or "32-true"),
            count_devices(devices),
            options.get("num_nodes") or 1,
            strategy=strategy_name(options.get("strategy") or "auto"),
            device=device,
        )


def count_devices(devices: Any) -> int:
    """Number of devices for a Trainer's `devices`; `auto` means all GPUs of this machine, or one device."""
    if isinstance(devices, list | tuple):
        return len(devices)
    if devices in (None, "auto", -1, "-1"):
        return max(torch.cuda.device_count(), 1)
    return len(devices.split(",")) if isinstance(devices, str) and "," in devices else int(devices)


def strategy_name(strategy: Any) -> str:
    """One of `KNOWN`, or the name of an unknown strategy."""
    if isinstance(strategy, str):
        known = {"deepspeed": "deepspeed_stage_2", "auto": "ddp"}
        return known.get(strategy, "ddp" if strategy.startswith("ddp") else strategy)
    is_config = isinstance(strategy, Mapping)
    name = strategy["class_path"].rpartition(".")[2] if is_config else type(strategy).__name__
    if name == "DeepSpeedStrategy":
        given = strategy.get("init_args", {}) if is_config else strategy.config["zero_optimization"]
        return f"deepspeed_stage_{given.get('stage', 2)}"
    return _CLASSES.get(name, name)


# What training holds of a model, whatever the number of tokens.


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

    @property
    def resident(self) -> int:
        """Bytes held at all times: all but the copies."""
        return self.weights + self.gradients + self.moments


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
    weights = moments = 0
    for p in counted:
        if p in quantized:  # codes, an 8-bit scale per 64 of them, and a float32 scale per 256 scales
            scales = math.ceil(p.numel() / 64)
            weights += math.ceil(p.numel() / 2) + scales + 4 * math.ceil(scales / 256)
        else:
            weights += p.nbytes
    for p in trained:
        if state_bits == 32 or p in embeddings or p.numel() < 4096:  # smaller tensors keep 32-bit moments
            moments += 2 * p.nbytes
        else:  # and a float32 scale per block of 256
            moments += 2 * (p.numel() + 4 * math.ceil(p.numel() / 256))
    copied = sum(2 * p.numel() for p in matrices if autocast and p.dtype == torch.float32 and p not in quantized)
    copies = copied + max((2 * p.numel() for p in quantized), default=0)
    return Held(weights, sum(p.nbytes for p in trained), moments, copies)


# What a decoder's layers keep for their backward pass, counted without weights or a GPU.
#
# The decoder runs on fake tensors, which have shapes and dtypes but no storage, and autograd reports what it saves.
# Fused kernels stand in for attention and for the experts of a mixture. They keep inputs, output and log-sum-exp, as
# kernels on a GPU do; plain attention on a CPU would keep a score for each pair of tokens.

_LENGTHS = (64, 128)
"""The difference between two rows cancels what does not depend on the tokens: copies of weights, mostly."""


@dataclass(frozen=True)
class KeptBytes:
    """Bytes per token that a decoder keeps.

    Attributes:
        total: The whole decoder, without checkpointing.
        largest: The layer that keeps most.
        inputs: The inputs of all layers, which checkpointing keeps.
        attended: The outputs and log-sum-exps of attention, which `gradient_checkpointing: attention` keeps as well.
    """

    total: int
    largest: int
    inputs: int
    attended: int


def count_kept(model: Any, *, autocast: bool) -> KeptBytes:
    """Count what a model's decoder keeps for each token of a row, without its head.

    Args:
        model: A transformers model on the meta device, with or without a head. Its weights are replaced by fake ones;
            discard it afterwards.
        autocast: Whether it runs under bfloat16 autocast.

    Raises:
        TypeError: If the decoder does something that depends on values, which fake tensors do not have.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            query, key, value = (states.to(torch.get_autocast_dtype("cpu")) for states in (query, key, value))
        return _FusedAttention.apply(query, key, value), None

    decoder = find_decoder(model).train()
    width = 2 if autocast else model.dtype.itemsize
    AttentionInterface.register("pl_grouprl_counted", attend)
    AttentionMaskInterface.register("pl_grouprl_counted", lambda *args, **kwargs: None)
    internals.set_attention_implementation(decoder.config, "pl_grouprl_counted")
    try:
        with FakeTensorMode(), _FusedExperts():
            for module in decoder.modules():  # fake weights and buffers on the CPU: the mode makes them so
                for name, weight in module._parameters.items():
                    if weight is not None:
                        fake = torch.empty(weight.shape, dtype=weight.dtype)
                        module._parameters[name] = nn.Parameter(fake, requires_grad=weight.requires_grad)
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
            short, long = (_saved(decoder, length, autocast) for length in _LENGTHS)
    except Exception as error:  # whatever an operator raises for fake tensors
        raise TypeError(f"plan cannot count the activations of a {type(decoder).__name__}: {error}") from error
    extra = _LENGTHS[1] - _LENGTHS[0]
    kept = [(after - before) // extra for before, after in zip(short[0], long[0], strict=True)]
    inputs = (sum(long[1]) - sum(short[1])) // extra
    return KeptBytes(sum(kept), max(kept[:-1]), inputs, attended_bytes(decoder.config, width))


def _saved(decoder: Any, length: int, autocast: bool) -> tuple[list[int], list[int]]:
    """Bytes that each layer saves, and then the rest of the decoder; and bytes of each layer's input."""
    layers = layers_of(decoder)
    weights = {tensor.untyped_storage()._cdata for tensor in (*decoder.parameters(), *decoder.buffers())}
    saved, inputs = [0] * (len(layers) + 1), [0] * len(layers)
    seen: dict[int, Any] = {}  # keeps storages alive, so that their addresses are not used again
    in_tuple: dict[int, bool] = {}
    running = len(layers)

    def run(index: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal running
        running, inputs[index] = index, (args[0] if args else kwargs["hidden_states"]).nbytes
        output = forward(*args, **kwargs)
        running, in_tuple[index] = len(layers), isinstance(output, tuple)
        return output

    def pass_on(same: int, *args: Any, **kwargs: Any) -> Any:
        states = args[0] if args else kwargs["hidden_states"]
        return (states,) if in_tuple[same] else states

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights and storage._cdata not in seen:
            seen[storage._cdata] = storage
            saved[running] += storage.nbytes()
        return tensor

    # Of equal layers, the second stands for all that follow; the first makes what all share.
    kinds = getattr(decoder.config, "layer_types", None) or [None] * len(layers)
    equal: dict[Any, list[int]] = {}
    for index, layer in enumerate(layers):
        equal.setdefault((repr(layer), kinds[index]), []).append(index)
    alike = list(range(len(layers)))
    for same in equal.values():
        for index in same[2:]:
            alike[index] = same[1]
    for index, layer in enumerate(layers):
        is_run = alike[index] == index
        layer.forward = partial(run, index, layer.forward) if is_run else partial(pass_on, alike[index])
    ids = torch.zeros(1, length, dtype=torch.long)
    try:
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            decoder(input_ids=ids, use_cache=False)
    finally:
        for layer in layers:
            del layer.forward
    return [*(saved[index] for index in alike), saved[-1]], [inputs[index] for index in alike]


class _FusedAttention(torch.autograd.Function):
    """What fused attention keeps: queries, keys and values as the layer passes them, output and log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]
        batch, heads, length, _ = query.shape
        out = query.new_empty(batch, length, heads, value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(batch, heads, length, dtype=torch.float32))
        return out


class _GroupedProduct(torch.autograd.Function):
    """What a grouped product keeps: each input whose partner needs a gradient."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        for_tokens, for_weight = ctx.needs_input_grad
        ctx.save_for_backward(tokens if for_weight else None, weight if for_tokens else None)
        return tokens.new_empty(tokens.shape[0], weight.shape[-1])


class _FusedExperts(TorchFunctionMode):
    """Replaces grouped products, which PyTorch traces for some dtypes only."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in ("grouped_mm", "_grouped_mm"):
            return _GroupedProduct.apply(*args[:2])
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class LayerBytes:
    """Bytes per token of a decoder.

    Attributes:
        config: The decoder's config.
        kept: What its layers keep for the backward pass.
        trains_all: Whether all weights are trained, not an adapter.
        width: Bytes of a value in the KV cache, and of a weight of a sampling server.
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
            bytes_each = 2 if autocast else model.dtype.itemsize
            kept = kept_bytes(config, bytes_each)
            if not kept:
                raise
            inputs = sum(4 * hidden for hidden, *_ in layer_sizes(config))
            estimate = KeptBytes(sum(kept), max(kept), inputs, attended_bytes(config, bytes_each))
            return cls(config, estimate, trains_all, width, is_counted=False)

    def activations(self, checkpointing: Checkpointing) -> tuple[int, int]:
        """Bytes that the forward pass leaves behind, and the extra bytes while a layer is in its backward pass."""
        sizes = layer_sizes(self.config)
        hidden, queries, inner = (max(each) for each in zip(*sizes, strict=True))
        # The gradients inside that layer.
        working = 8 * hidden + 2 * queries + 4 * inner if self.trains_all else 14 * hidden + 6 * inner
        if not checkpointing:
            return self.kept.total, working
        saved = self.kept.attended if checkpointing == "attention" else 0
        own = saved // len(sizes)  # of that layer, which `largest` has already
        return self.kept.inputs + saved, self.kept.largest - own + working

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


# One device in a run.


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
        return self.policy.resident + self.critic.resident + self.reference

    @property
    def copies(self) -> int:
        """Bytes of weights in another dtype during updates."""
        return self.policy.copies + self.critic.copies

    def activations(self, tokens: int, checkpointing: Checkpointing) -> int:
        """Peak bytes of a micro-batch, without logits."""
        left, inside = self._per_token(checkpointing)
        return tokens * (left + inside)

    def logits(self, tokens: int, checkpointing: Checkpointing) -> int:
        """Bytes that the head adds to that peak; the head is done before the backward pass reaches the layers."""
        left, _ = self._per_token(checkpointing)
        return max(0, tokens * left + self.layers.head - self.activations(tokens, checkpointing))

    def _per_token(self, checkpointing: Checkpointing) -> tuple[int, int]:
        pairs = [
            layers.activations(checkpointing) for layers in (self.layers, self.critic_layers) if layers is not None
        ]
        return sum(left for left, _ in pairs), max(inside for _, inside in pairs)

    def largest_budget(self, gib: float, checkpointing: Checkpointing) -> int:
        """Maximum tokens of a micro-batch on a device with this many GiB; 0 or less if nothing fits."""
        room = int(gib * GIB * USABLE) - self.resident - self.copies
        left, inside = self._per_token(checkpointing)
        return min(room // (left + inside), (room - self.layers.head) // left)

    def cached_tokens(self, gib: float) -> int:
        """Maximum tokens in the KV caches of a rollout."""
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


# The models of a run, built on the meta device.


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
class PlannedModels:
    """What a run loads.

    Attributes:
        name: The policy's class.
        num_parameters: Parameters of the policy without its adapter.
        config: The policy's config.
        footprint: Memory on one device, with nothing sharded.
        cost: Operations of the policy.
        has_adapter: Whether the policy trains an adapter.
        has_critic: Whether there is a critic with its own backbone.
        checkpointing: How layers recompute their activations.
        teacher: Bytes of the teacher, which the footprint's reference includes.
    """

    name: str
    num_parameters: int
    config: Any
    footprint: Footprint
    cost: ModelCost
    has_adapter: bool
    has_critic: bool
    checkpointing: Checkpointing
    teacher: int = 0
    _methods: dict[Method, Footprint] = field(default_factory=dict)

    def with_method(self, method: Method) -> Footprint:
        """Memory of another method for the same policy, built once."""
        if method not in self._methods:
            own = footprint_of_method(self.config, method)
            self._methods[method] = replace(own, reference=own.reference + self.teacher)
        return self._methods[method]


def plan_models(module: Any, hardware: Hardware) -> PlannedModels:
    """Build a module's models without storage; only their configs are read.

    Args:
        module: An `RLModule` whose models are not loaded.
        hardware: Its precision decides dtypes.

    Raises:
        TypeError: If a model's source has no `load_config`.
    """
    source = module.policy_source
    config, dtype = load_config(source, "policy", hardware.precision)
    adapter = getattr(source, "adapter", None)
    mixed = "mixed" in hardware.precision
    base = empty_model(config, dtype)
    num_parameters = sum(p.numel() for p in base.parameters())
    cost = ModelCost.of(find_decoder(base), base.get_output_embeddings())
    policy = base if adapter is None else adapter.add_to(base)
    bits = module.optimizer_config.state_bits
    four_bits = getattr(source, "quantization", None) is not None
    held = held_bytes(policy, state_bits=bits, four_bits=four_bits, autocast=mixed)
    engine, sampled = module.engine, dtype
    if getattr(engine, "dtype", "auto") != "auto":
        sampled = getattr(torch, engine.dtype)
    elif hardware.precision == "bf16-mixed" or hasattr(engine, "urls"):  # vLLM's servers choose 16 bits
        sampled = torch.bfloat16
    layers = LayerBytes.of(policy, autocast=mixed, width=sampled.itemsize)
    critic_held, critic_layers = _critic(module, config, dtype, hardware)
    reference, taught = held.weights if adapter is None and module.kl_penalty.is_used else 0, 0
    if (teacher := getattr(module, "teacher_source", None)) is not None:
        taught = held_bytes(empty_model(*load_config(teacher, "teacher", hardware.precision))).weights
    copy = num_parameters * sampled.itemsize if sampled != dtype and isinstance(engine, HFRolloutEngine) else 0
    return PlannedModels(
        name=type(policy).__name__,
        num_parameters=num_parameters,
        config=config,
        footprint=Footprint(held, layers, reference + taught, critic_held, critic_layers, sampling_copy=copy),
        cost=cost,
        has_adapter=adapter is not None,
        has_critic=critic_layers is not None,
        checkpointing=checkpoints_activations(
            getattr(source, "gradient_checkpointing", False), "cpu" if hardware.device == "cpu" else "cuda"
        ),
        teacher=taught,
    )


def _critic(module: Any, config: Any, dtype: torch.dtype, hardware: Hardware) -> tuple[Held, LayerBytes | None]:
    """What the critic adds, and the bytes per token of its own backbone, if it has one."""
    source: Any = getattr(module, "critic_source", None)
    if source is None:
        return Held(), None
    backbone: Any = None
    if isinstance(source, PretrainedCritic):
        config, dtype = load_config(source, "critic", hardware.precision)
        backbone = find_backbone(empty_model(config, dtype))
    elif isinstance(source, PolicyCopyCritic | LoRACritic):
        backbone = find_backbone(empty_model(config, dtype))
    elif not isinstance(source, SharedTrunkCritic):
        raise TypeError(f"critic is a {type(source).__name__}, which `plan` does not know; use one of this package.")
    if isinstance(source, LoRACritic):
        source.put_on(backbone, "critic")
    head = ValueHead.near_zero(config.get_text_config(decoder=True).hidden_size, source.head_std, source.seed)
    model = nn.ModuleList([head] if backbone is None else [backbone, head])
    base = [p for p in model.parameters() if not p.requires_grad]  # the policy's
    mixed = "mixed" in hardware.precision
    held = held_bytes(model, state_bits=module.critic_optimizer.state_bits, autocast=mixed, known=base)
    return held, None if backbone is None else LayerBytes.of(backbone, autocast=mixed, width=dtype.itemsize)


def load_config(source: Any, argument: str, precision: str) -> tuple[Any, torch.dtype]:
    """Load the config of a source's model, and tell the dtype of its weights in a run.

    Raises:
        TypeError: If the source cannot say what it will load.
        OSError: If there is no such model.
    """
    if not hasattr(source, "load_config"):
        raise TypeError(f"{argument} is a {type(source).__name__} without load_config(), which `plan` needs; add it.")
    config = source.load_config()
    name = getattr(source, "dtype", "float32")
    loaded = getattr(config, "dtype", None) or torch.float32 if name == "auto" else getattr(torch, name)
    true = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
    return config, true.get(precision, loaded)
