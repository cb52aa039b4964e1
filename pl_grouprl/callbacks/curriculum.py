"""A curriculum whose level of difficulty follows the reward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from pl_grouprl.data.loaders import LevelSchedule
from pl_grouprl.utilities.distributed import gather_plain
from pl_grouprl.utilities.options import check_fields


@dataclass(eq=False, repr=False)
class Curriculum(Callback):
    """Trains on prompts of one level of difficulty at a time, and moves up when the reward is high enough.

    A column of the rows has their level, from 0 (`ReasoningGym` writes it). Training begins at level 0. When the mean
    reward of the last `window` batches of rollouts at the current level exceeds `threshold`, the next batch comes from
    the next level; when it is below `fall_below`, from the previous one. The mean then starts over. Logs
    `curriculum/level`, the mean level of the groups that are trained.

    With `max_staleness`, prompts that are already queued keep their level. A batch with groups of several levels does
    not count for the mean.

    Validation uses the prompts of all levels. Checkpoints contain the level and the rewards that decide it, so a
    resumed run continues exactly. It may have another `threshold`, `fall_below` or `window`, but not other rows.

    Attributes:
        threshold: Mean reward above which the level rises.
        window: Number of batches of rollouts in the mean.
        fall_below: Mean reward below which the level falls; never if None.
        metric: The logged metric to take as the reward, such as `rewards/exact/mean`.
        column: Column of the level.

    Raises:
        ValueError: If an option is out of range.
    """

    threshold: float = 0.75
    window: int = 10
    fall_below: float | None = None
    metric: str = "reward"
    column: str = "level"

    def __post_init__(self) -> None:
        lower = self.fall_below is None or self.fall_below < self.threshold
        check_fields(
            self,
            threshold=(True, "a finite number"),
            window=(self.window >= 1, "at least 1"),
            fall_below=(lower, f"below threshold={self.threshold}, or None"),
        )
        self._num_levels = 1
        self._start_over()

    def _start_over(self) -> None:
        self._schedule = LevelSchedule()
        self._rewards: list[float] = []
        self._last_rollout = -1
        self._levels_of: int | None = None  # the rollout batch whose groups, on all ranks, have `_levels`
        self._levels: list[int] = []

    @property
    def level(self) -> int:
        """The level of the next rollouts to be sampled."""
        return self._schedule.level

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let the data module, a `PromptDataModule`, yield one level at a time.

        Raises:
            ValueError: If its rows have no levels.
        """
        if stage != "fit":
            return
        if trainer.global_step == 0:  # a checkpoint is loaded later
            self._start_over()
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        self._num_levels = data.train_by_level(self._schedule, self.column)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Count the reward of a new batch of rollouts, before any callback can save a checkpoint of the step."""
        rollouts: Any = pl_module.last_rollouts
        if rollouts.rollout_number != self._levels_of:
            self._levels_of = rollouts.rollout_number
            scheduled, _ = self._schedule.at(rollouts.rollout_number)  # rollouts of a checkpoint have no columns
            of_rank = [int(group.columns.get(self.column, scheduled)) for group in rollouts.groups]
            self._levels = [level for levels in gather_plain(of_rank, pl_module.device) for level in levels]
        pl_module.log("curriculum/level", math.fsum(self._levels) / len(self._levels), batch_size=1)
        if rollouts.rollout_number <= self._last_rollout:
            return
        self._last_rollout = rollouts.rollout_number
        if self.metric not in rollouts.metrics:
            raise ValueError(f"Curriculum.metric is {self.metric!r}; rollouts have {sorted(rollouts.metrics)}.")
        reward = float(rollouts.metrics[self.metric])
        if set(self._levels) != {self.level} or not math.isfinite(reward):
            return
        self._rewards = [*self._rewards, reward][-self.window :]
        if len(self._rewards) < self.window:
            return
        mean, level = math.fsum(self._rewards) / self.window, self.level
        if mean > self.threshold and level + 1 < self._num_levels:
            level += 1
        elif self.fall_below is not None and mean < self.fall_below and level > 0:
            level -= 1
        if level != self.level:
            first = self._schedule.change_to(level)
            self._rewards = []
            rank_zero_info(
                f"Curriculum: level {level} from rollout {first} on (mean {self.metric} {mean:.3f} over {self.window} "
                "batches of rollouts)"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the levels so far, and the rewards that decide the next one."""
        return {
            "schedule": self._schedule.state_dict(),
            "rewards": list(self._rewards),
            "last_rollout": self._last_rollout,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._schedule.load_state_dict(state_dict["schedule"])
        self._rewards = list(state_dict["rewards"])
        self._last_rollout = state_dict["last_rollout"]
