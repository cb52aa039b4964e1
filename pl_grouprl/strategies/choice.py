"""Picks the support class for a Trainer's strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pl_grouprl.strategies.support import StrategySupport

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def support_of(trainer: Trainer | None) -> StrategySupport:
    """Pick the support for the Trainer's strategy.

    Raises:
        ValueError: If the strategy is not supported.
    """
    from lightning.pytorch.strategies import (
        DDPStrategy,
        DeepSpeedStrategy,
        FSDPStrategy,
        ModelParallelStrategy,
        SingleDeviceStrategy,
    )

    strategy = None if trainer is None else trainer.strategy
    if isinstance(strategy, DeepSpeedStrategy):  # also a DDPStrategy
        from pl_grouprl.strategies.deepspeed import DeepSpeedSupport

        return DeepSpeedSupport(trainer)
    if strategy is None or isinstance(strategy, SingleDeviceStrategy | DDPStrategy):
        return StrategySupport(trainer)
    if isinstance(strategy, ModelParallelStrategy):
        from pl_grouprl.strategies.fsdp2 import FSDP2Support

        return FSDP2Support(trainer)
    if isinstance(strategy, FSDPStrategy):
        from pl_grouprl.strategies.fsdp1 import FSDP1Support

        return FSDP1Support(trainer)
    raise ValueError(
        f"trainer.strategy is {type(strategy).__name__}, which is not supported here; use a single device, ddp, "
        "FSDPStrategy, ModelParallelStrategy or DeepSpeedStrategy (configs/strategy has a file for each)."
    )
