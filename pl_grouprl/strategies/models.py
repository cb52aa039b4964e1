"""Finds the parts of a LightningModule to shard, and refuses those that cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from pl_grouprl.models.compile import decoder_layers

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


def roots(module: nn.Module) -> list[nn.Module]:
    """The outermost modules that are called as a whole: transformers models, and modules with other weights.

    Args:
        module: A LightningModule, a critic, or a transformers model.
    """
    if is_transformers_model(module) or any(True for _ in module.parameters(recurse=False)):
        return [module]
    return [root for child in module.children() for root in roots(child)]


def is_transformers_model(module: nn.Module) -> bool:
    """Whether a module has a config and embeddings, as transformers' models do."""
    return hasattr(module, "get_input_embeddings") and hasattr(module, "config")


def decoder_layers_of(root: nn.Module) -> Sequence[nn.Module]:
    """Decoder layers of a transformers model; empty for other modules."""
    return list(decoder_layers(root)) if is_transformers_model(root) else []


def refuse_whole_weights(module: LightningModule, strategy: str) -> None:
    """Refuse critics and compiled layers that a sharding strategy does not support.

    Raises:
        ValueError: Names the option and what to use instead.
    """
    critic = getattr(module, "critic_source", None)
    if type(critic).__name__ == "LoRACritic":
        raise ValueError(
            f"critic is a LoRACritic, which shares the storage of whole weights with the policy; {strategy} shards "
            "them. Use PolicyCopyCritic or SharedTrunkCritic, or the strategy ddp."
        )
    if getattr(getattr(module, "policy_source", None), "compile_layers", False):
        raise ValueError(
            f"policy has compile_layers=True, which is not supported under {strategy}; leave it out, or use ddp."
        )
