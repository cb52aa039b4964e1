"""What the parts of a run need from it: `RLModule` provides it under a Trainer, `PlainRun` in a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from pl_grouprl.distributed.strategies import StrategySupport
from pl_grouprl.rollout.branching import Branching
from pl_grouprl.rollout.weight_sync import PolicyOwner
from pl_grouprl.types import Prompt, RolloutGroup, SamplingConfig

T = TypeVar("T")


def by_name(owner: Any, method: str) -> Callable[..., Any]:
    """A method looked up when called: one set on the instance later is used, and a deep copy calls its own."""
    return partial(_call, owner, method)


def _call(owner: Any, method: str, *args: Any) -> Any:
    return getattr(owner, method)(*args)


class Run(PolicyOwner, Protocol):
    """A policy that is being trained on one rank of a run."""

    @property
    def global_rank(self) -> int:
        """The rank."""

    @property
    def global_step(self) -> int:
        """Optimizer steps so far."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        num_generations: int,
        *,
        seed: Sequence[int | str],
        branching: Branching | None = None,
    ) -> list[RolloutGroup]:
        """Sample rollouts of each prompt."""

    def call_wrapped(self, function: Callable[[], T]) -> T:
        """Call a function that runs a model's forward, wrapped by the strategy as `training_step` is."""


@dataclass
class Accumulation:
    """How the gradients of this mini-batch add up to an optimizer step.

    Attributes:
        mini_batches: Mini-batches per optimizer step (`accumulate_grad_batches` of the Trainer).
        is_last: Whether the step follows this mini-batch.
        scaler: Scales the loss under float16; None is no scaling.
    """

    mini_batches: int = 1
    is_last: bool = True
    scaler: Any = None

    @property
    def loss_scale(self) -> float:
        """Factor of the loss; waits for the GPU under float16."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    @classmethod
    def of(cls, trainer: Any) -> Accumulation:
        """Read it from a Trainer."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        return cls(trainer.accumulate_grad_batches, not trainer.fit_loop._should_accumulate(), scaler)


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
    sample: Callable[..., list[RolloutGroup]] | None = None

    @property
    def device(self) -> torch.device:
        """The policy's device."""
        return next(self.policy.parameters()).device

    def generate(self, *args: Any, **kwargs: Any) -> list[RolloutGroup]:
        """Sample with the function that was passed as `sample`."""
        if self.sample is None:
            raise RuntimeError("PlainRun has no sample function; set run.sample, such as Sampler(run).generate.")
        return self.sample(*args, **kwargs)

    def call_wrapped(self, function: Callable[[], T]) -> T:
        """Call the function."""
        return function()
