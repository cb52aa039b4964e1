"""What the modules ask of a strategy; here the answers of a single device and of DDP, where every rank holds all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class StrategySupport:
    """Reaches weights and gradients under one strategy. Subclasses serve those that shard.

    Args:
        trainer: The run's Trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def check(self, module: LightningModule) -> None:
        """Refuse at setup what cannot be honoured under this strategy.

        Raises:
            ValueError: With the option, its value and what to do.
        """

    def shard(self, module: LightningModule) -> None:
        """Shard the models of a module where the strategy leaves that to `configure_model`. Here nothing."""

    @contextlib.contextmanager
    def whole_weights(self, *models: nn.Module) -> Iterator[None]:
        """Make each rank's weights whole for as long as it samples; ranks need not run the same calls meanwhile."""
        yield

    def call(self, module: LightningModule, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the module the way the strategy runs `training_step`, so that wrappers see the forward."""
        return getattr(module, method)(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Differentiate one pass of several inside `training_step`, adding to the gradients; nothing is reduced."""
        self.trainer.strategy.backward(loss, None)

    @contextlib.contextmanager
    def accumulating(self, module: LightningModule, *, last: bool) -> Iterator[None]:
        """Surround a pass, its forward and its backward: gradients are reduced over ranks in the last one only."""
        yield

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Norm of the gradients of all ranks' shards of some parameters, a scalar."""
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def scale(self, parameters: Sequence[nn.Parameter], factor: float) -> None:
        """Multiply gradients in place."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def drop(self, parameters: Sequence[nn.Parameter]) -> None:
        """Leave parameters out of the coming optimizer step: AdamW passes over what has no gradient."""
        for parameter in parameters:
            parameter.grad = None

    def full_state_dict(self, model: nn.Module) -> dict[str, Tensor] | None:
        """A model's whole state on the CPU of rank 0, None on the others. All ranks call it."""
        return dict(model.state_dict()) if self.trainer.is_global_zero else None


def support_of(trainer: Trainer) -> StrategySupport:
    """Pick what serves the Trainer's strategy.

    Raises:
        ValueError: If the strategy is none of those that are known to work.
    """
    return StrategySupport(trainer)
