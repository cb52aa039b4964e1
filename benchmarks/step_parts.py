"""Times the parts of a training step from outside: functions of the package are wrapped during a fit.

Parts in `MODEL_WORK` are what the arithmetic needs: sampling, decoder and head forward, backward, the optimizer. All
others are the trainer's overhead. Time counts for the innermost part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer import call as hooks

from benchmarks.measure import now
from pl_grouprl.algorithms import group_ppo, ppo
from pl_grouprl.rewards import PendingRewards
from pl_grouprl.training import collector, micro_batches
from pl_grouprl.training.buffer import RolloutBuffer
from pl_grouprl.training.metrics import StepTimer
from pl_grouprl.training.objective import LossAccumulator

MODEL_WORK = ("rollouts", "scoring", "values", "forward", "backward", "optimizer")

TOKEN_GROUPS = "token groups"  # noqa: S105 (of a response, not of a login)

OVERHEAD = (
    "rewards",
    "packing",
    "advantages",
    TOKEN_GROUPS,
    "loss",
    "gradient norm",
    "metrics",
    "logging",
    "callbacks",
    "other",
)
"""`other` is Lightning's loop and anything that is in no other part."""


class StepParts(Callback):
    """Times the parts of every training step; put it first among the callbacks.

    A step lasts from one `on_train_batch_start` to the next, so work between steps belongs to a step too.

    Args:
        clock: One of `measure.CLOCKS`. The GPU is synchronized at the start and end of each part, so each has the time
            of its own kernels.

    Attributes:
        steps: For each step, the seconds of each part.
    """

    def __init__(self, clock: str) -> None:
        self.steps: list[dict[str, float]] = []
        self._clock = StepTimer(functools.partial(now, clock))
        self._before: dict[str, float] = {}
        self._patches = ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wrap the functions to time."""
        for owner, name, part in timed_functions(trainer, pl_module):
            self._patch(owner, name, self._timed(getattr(owner, name), part))
        (optimizer,) = trainer.optimizers
        self._patch(optimizer, "step", self._timed_step(optimizer.step))
        self._patch(optimizer, "zero_grad", self._timed(optimizer.zero_grad, "optimizer"))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """End a step and begin the next."""
        self._end_step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the last step, and restore the functions."""
        self._end_step()
        self._patches.close()

    def _end_step(self) -> None:
        self._clock.mark()
        total = self._clock.seconds
        if self._before:
            self.steps.append({part: total[part] - self._before.get(part, 0.0) for part in total})
        self._before = total

    def _patch(self, owner: Any, name: str, wrapped: Any) -> None:
        self._patches.enter_context(mock.patch.object(owner, name, wrapped))

    def _timed(self, function: Callable[..., Any], part: str | tuple[str, str]) -> Callable[..., Any]:
        """Charge a function to a part; of a pair, to the first with gradient, to the second without."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._clock.enter(part if isinstance(part, str) else part[not torch.is_grad_enabled()])
            try:
                return function(*args, **kwargs)
            finally:
                self._clock.leave()

        return timed

    def _timed_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Time an optimizer's step without the closure, in which Lightning runs forward and backward."""
        timed = self._timed(step, "optimizer")

        @functools.wraps(step)
        def with_closure(closure: Callable[[], Any] | None = None) -> Any:
            return timed(None if closure is None else self._timed(closure, "other"))

        return with_closure


def timed_functions(trainer: Trainer, module: Any) -> list[tuple[Any, str, str | tuple[str, str]]]:
    """The functions to wrap: owner, name, and the part to charge."""
    functions: list[tuple[Any, str, str | tuple[str, str]]] = [
        (module.engine, "generate", "rollouts"),
        (module, "score", ("forward", "scoring")),
        (torch.Tensor, "backward", "backward"),
        (module.rewarder, "start", "rewards"),
        (PendingRewards, "wait", "rewards"),
        (micro_batches, "lay_out", "packing"),
        (micro_batches.MicroBatchSchedule, "__init__", "packing"),
        (micro_batches.MicroBatchSchedule, "_micro_batch", "packing"),
        (RolloutBuffer, "__init__", "packing"),
        (RolloutBuffer, "select", "packing"),
        (RolloutBuffer, "in_order", "packing"),
        (RolloutBuffer, "put", "packing"),
        (module, "prepare_updates", "advantages"),
        (module.objective, "loss", "loss"),
        (module.optimization, "divide", "loss"),
        (module, "on_before_optimizer_step", "gradient norm"),
        (module, "configure_gradient_clipping", "gradient norm"),
        (collector, "summarize", "metrics"),
        (collector, "rollout_metrics", "metrics"),
        (LossAccumulator, "add", "metrics"),
        (LossAccumulator, "reduced", "metrics"),
        (module, "log", "logging"),
        (module, "log_dict", "logging"),
        (trainer._logger_connector, "log_metrics", "logging"),
        (trainer._logger_connector, "update_train_step_metrics", "logging"),
        (hooks, "_call_callback_hooks", "callbacks"),
    ]
    if isinstance(module, ppo.PPO):
        functions += [
            (module.critic, "values", ("forward", "values")),
            (ppo, "hidden_states", ("forward", "values")),
            (ppo, "truncate_rollouts", "packing"),
            (module, "_value_loss", "loss"),
        ]
    if isinstance(module, group_ppo.GroupPPO):
        functions += [
            (group_ppo, "find_token_groups", TOKEN_GROUPS),
            (group_ppo, "token_group_advantages", TOKEN_GROUPS),
        ]
    return functions
