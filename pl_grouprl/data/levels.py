"""Training on prompts of one level of difficulty at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pl_grouprl.data.loaders import TrainPromptLoader
from pl_grouprl.types import Prompt


class LevelSchedule:
    """The level of each rollout: 0 at first, then as set by `change_to`.

    A change takes effect at the first rollout whose level has not been queried yet, so rollouts sampled ahead keep
    theirs. The state contains all changes, so a resumed run has the same levels.
    """

    def __init__(self) -> None:
        self._changes = [(0, 0)]  # first rollout, level
        self._last_queried = -1

    @property
    def level(self) -> int:
        """The level after the last change."""
        return self._changes[-1][1]

    def at(self, rollout_number: int) -> tuple[int, int]:
        """The level of a rollout, and how many rollouts before it had the same level."""
        self._last_queried = max(self._last_queried, rollout_number)
        stretches = [(first, level) for first, level in self._changes if first <= rollout_number]
        ends = [first for first, _ in stretches[1:]] + [rollout_number]
        current = stretches[-1][1]
        before = sum(end - first for (first, level), end in zip(stretches, ends, strict=True) if level == current)
        return current, before

    def change_to(self, level: int) -> int:
        """Change the level; return the number of the first rollout that has the new one."""
        first = self._last_queried + 1
        self._changes.append((first, level))
        return first

    def state_dict(self) -> dict[str, Any]:
        """Return plain containers."""
        return {"changes": [list(change) for change in self._changes], "known": self._last_queried}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._changes = [(int(first), int(level)) for first, level in state["changes"]]
        self._last_queried = state["known"]


class LevelPromptLoader(TrainPromptLoader):
    """Yields batches of prompts of a single level, set by a schedule.

    Each pass over the prompts of a level has a new order; prompts that do not fill a batch are left out of that pass.
    An epoch is as long as without levels. A resumed run must have the same rows in use.

    Args:
        prompts: All prompts in use, of every level, the same on every rank.
        schedule: The level of each rollout.
        column: Column of the level: integers from 0.
        **options: Options of `TrainPromptLoader`.

    Raises:
        ValueError: If a prompt has no level, a level is missing or has too few prompts for a batch, or `drop_last` is
            False.
    """

    def __init__(self, prompts: Sequence[Prompt], *, schedule: LevelSchedule, column: str, **options: Any) -> None:
        super().__init__(prompts, **options)
        self._schedule = schedule
        self._settings |= {"level_column": column, "num_prompts_in_use": len(prompts)}
        levels = [_level(prompt, column) for prompt in prompts]
        self._counts = np.bincount(levels)  # prompts of each level
        self._levels = np.full(self._order.num_rows, -1)  # of each row; -1 for rows not in use
        self._levels[self._order.kept(np.arange(self._order.num_rows))] = levels
        self._check_levels()

    @property
    def num_levels(self) -> int:
        """Number of levels in the data."""
        return len(self._counts)

    def _rows_of(self, rollout_number: int) -> np.ndarray:
        level, number = self._schedule.at(rollout_number)
        pass_number, batch_index = divmod(number, self._num_batches(int(self._counts[level])))
        return self._batch(self._eligible(self._order.all_rows(pass_number), rollout_number), batch_index)

    def _eligible(self, rows: np.ndarray, rollout_number: int) -> np.ndarray:
        return rows[self._levels[rows] == self._schedule.at(rollout_number)[0]]

    def _check_levels(self) -> None:
        size = self._settings["batch_size"]
        if not self._settings["drop_last"]:
            raise ValueError("drop_last is False; a curriculum trains on full batches of one level, so set it to True.")
        if small := {level: int(count) for level, count in enumerate(self._counts) if count < size}:
            raise ValueError(
                f"The training data has {small} prompts of these levels, fewer than batch_size={size}; add rows, or "
                "lower batch_size."
            )


def _level(prompt: Prompt, column: str) -> int:
    level = prompt.columns.get(column)
    if isinstance(level, bool) or not isinstance(level, int) or level < 0:
        raise ValueError(
            f"{prompt.where}: column {column!r} is {level!r}; a curriculum needs the level of each row there, an "
            "integer from 0."
        )
    return level
