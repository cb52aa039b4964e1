"""What the parts of a run need from it: `RLModule` provides it under a Trainer, `PlainRun` in a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from pl_grouprl.distributed.strategies import StrategySupport
from pl_grouprl.rollout.weight_sync import PolicyOwner

T = TypeVar("T")


class Run(PolicyOwner, Protocol):
    """A policy that is being trained on one rank of a run."""

    @property
    def global_rank(self) -> int:
        """The rank."""

    @property
    def global_step(self) -> int:
        """Optimizer steps so far."""

    def call(self, function: Callable[[], T]) -> T:
        """Call a function; strategies that wrap the forward enter the module here, by the name of this method."""


@dataclass
class PlainRun:
    """A run on one device without a Trainer.

    Attributes:
        policy: A transformers model.
        tokenizer: Its tokenizer.
        global_step: Optimizer steps so far; the loop counts them.
    """

    policy: Any
    tokenizer: Any = None
    global_step: int = 0
    global_rank: int = 0
    support: StrategySupport = field(default_factory=lambda: StrategySupport(None))

    @property
    def device(self) -> torch.device:
        """The policy's device."""
        return next(self.policy.parameters()).device

    def call(self, function: Callable[[], T]) -> T:
        """Call the function."""
        return function()


@dataclass
class Accumulation:
    """How the gradients of a mini-batch add up to an optimizer step.

    Attributes:
        mini_batches: Mini-batches per optimizer step (`accumulate_grad_batches` of the Trainer).
        is_last: Whether the step follows this mini-batch.
        scaler: Scales the loss under float16; no scaling if None.
    """

    mini_batches: int = 1
    is_last: bool = True
    scaler: Any = None

    @classmethod
    def of(cls, trainer: Any) -> Accumulation:
        """Read it from a Trainer."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        return cls(trainer.accumulate_grad_batches, not trainer.fit_loop._should_accumulate(), scaler)
