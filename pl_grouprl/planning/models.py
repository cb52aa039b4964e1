"""The models of a run, built on the meta device, and the memory that they need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pl_grouprl.attention import find_backbone, find_decoder
from pl_grouprl.models import LoRACritic, ModelCost, PolicyCopyCritic, PretrainedCritic, SharedTrunkCritic
from pl_grouprl.models.critic import ValueHead
from pl_grouprl.planning.hardware import Hardware
from pl_grouprl.planning.memory import Footprint, Held, LayerBytes, empty_model, held_bytes
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.utilities.device_defaults import checkpoints_activations

_TRUE = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}


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
        checkpointing: Whether gradient checkpointing is on.
    """

    name: str
    num_parameters: int
    config: Any
    footprint: Footprint
    cost: ModelCost
    has_adapter: bool
    has_critic: bool
    checkpointing: bool


def plan_models(module: Any, hardware: Hardware) -> PlannedModels:
    """Build a module's models without storage; only their configs are read.

    Args:
        module: An `RLModule` whose models are not loaded.
        hardware: Its precision decides dtypes.

    Raises:
        TypeError: If a model's source has no `load_config`.
    """
    source = module.policy_source
    config = load_config(source, "policy")
    adapter = getattr(source, "adapter", None)
    mixed = "mixed" in hardware.precision
    dtype = weight_dtype(source, config, hardware.precision)
    base = empty_model(config, dtype)
    num_parameters = sum(p.numel() for p in base.parameters())
    cost = ModelCost.of(find_decoder(base), base.get_output_embeddings())
    policy = base if adapter is None else adapter.add_to(base)
    bits = module.optimizer_config.state_bits
    four_bits = getattr(source, "quantization", None) is not None
    held = held_bytes(policy, state_bits=bits, four_bits=four_bits, autocast=mixed)
    sampled = _sampling_dtype(module.engine, dtype, hardware)
    layers = LayerBytes.of(policy, autocast=mixed, width=sampled.itemsize)
    critic_held, critic_layers = _critic(module, config, dtype, hardware)
    reference = held.weights if adapter is None and module.kl_penalty.is_used else 0
    return PlannedModels(
        name=type(policy).__name__,
        num_parameters=num_parameters,
        config=config,
        footprint=Footprint(
            held,
            layers,
            reference + _teacher_bytes(module, hardware),
            critic_held,
            critic_layers,
            sampling_copy=num_parameters * sampled.itemsize if sampled != dtype else 0,
        ),
        cost=cost,
        has_adapter=adapter is not None,
        has_critic=critic_layers is not None,
        checkpointing=checkpoints_activations(
            getattr(source, "gradient_checkpointing", False), "cpu" if hardware.device is None else "cuda"
        ),
    )


def _sampling_dtype(engine: Any, dtype: torch.dtype, hardware: Hardware) -> torch.dtype:
    """The dtype that rollouts run in; that of the weights for engines which do not run them."""
    if not isinstance(engine, HFRolloutEngine):
        return dtype
    if engine.dtype == "auto":
        return torch.bfloat16 if hardware.precision == "bf16-mixed" else dtype
    chosen: torch.dtype = getattr(torch, engine.dtype)
    return chosen


def _critic(module: Any, config: Any, dtype: torch.dtype, hardware: Hardware) -> tuple[Held, LayerBytes | None]:
    """What the critic adds, and the bytes per token of its own backbone, if it has one."""
    source: Any = getattr(module, "critic_source", None)
    if source is None:
        return Held(), None
    backbone: Any = None
    if isinstance(source, PretrainedCritic):
        config = source.load_config()
        dtype = weight_dtype(source, config, hardware.precision)
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
    bits = module.critic_optimizer.state_bits
    held = held_bytes(model, state_bits=bits, autocast="mixed" in hardware.precision, known=base)
    if backbone is None:
        return held, None
    return held, LayerBytes.of(backbone, autocast="mixed" in hardware.precision, width=dtype.itemsize)


def _teacher_bytes(module: Any, hardware: Hardware) -> int:
    source = getattr(module, "teacher_source", None)
    if source is None:
        return 0
    config = load_config(source, "teacher")
    return held_bytes(empty_model(config, weight_dtype(source, config, hardware.precision))).weights


def load_config(source: Any, argument: str) -> Any:
    """Load the config of a source's model.

    Raises:
        TypeError: If the source cannot say what it will load.
    """
    if not hasattr(source, "load_config"):
        raise TypeError(
            f"{argument} is a {type(source).__name__} without load_config(), so `plan` cannot know its model before it "
            "is loaded; give the class that method, which returns the transformers config."
        )
    return source.load_config()


def weight_dtype(source: Any, config: Any, precision: str) -> torch.dtype:
    """Dtype of the weights in a run."""
    name = getattr(source, "dtype", "float32")
    loaded = getattr(config, "dtype", None) or torch.float32 if name == "auto" else getattr(torch, name)
    return _TRUE.get(precision, loaded)
