"""What sharding strategies share: norms over all ranks' shards, and the modules to shard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pl_grouprl.models.compile import decoder_layers
from pl_grouprl.strategies.support import StrategySupport

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


class ShardedSupport(StrategySupport):
    """Base class for strategies whose optimizer steps each rank's shards separately."""

    shards = True
    keeps_plain_weights = False

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Norm of the gradients over all ranks' shards, a scalar. Collective."""
        device = self.trainer.strategy.root_device
        gradients = [gradient for gradient in self.gradients(parameters) if gradient.numel()]
        norms = torch._foreach_norm(gradients) if gradients else []
        total = torch.stack([torch.zeros((), device=device), *(n.to(device, torch.float32) for n in norms)])
        return self.trainer.strategy.reduce(total.square().sum(), reduce_op="sum").sqrt()

    def zero_loss_over(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Zero: no reducer waits for gradients of unused parameters."""
        return torch.zeros((), device=self.trainer.strategy.root_device)


def roots(module: nn.Module) -> list[nn.Module]:
    """The outermost modules that are called as a whole: transformers models, and others with direct parameters.

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
    if getattr(critic, "needs_whole_weights", False):
        raise ValueError(
            f"critic is a {type(critic).__name__}, which shares the storage of whole weights with the policy; "
            f"{strategy} shards them. Use PolicyCopyCritic or SharedTrunkCritic, or the strategy ddp."
        )
    if getattr(getattr(module, "policy_source", None), "compile_layers", False):
        raise ValueError(
            f"policy has compile_layers=True, which is not supported under {strategy}; leave it out, or use ddp."
        )
