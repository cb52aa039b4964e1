"""The global random number generators of a run: saved, restored, and unaffected by validation."""

from __future__ import annotations

from typing import Any

import torch

from pl_grouprl.training.run import Run
from pl_grouprl.utilities.distributed import gather_plain
from pl_grouprl.utilities.random_state import random_state, set_random_state


class RandomNumbers:
    """Python's, NumPy's and torch's generators on each rank, as part of a checkpoint.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._per_rank: list[dict[str, Any]] = []
        self._earlier: dict[str, Any] | None = None

    @property
    def _device(self) -> torch.device:
        return self._run.device

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states of all ranks; while some are set aside, those."""
        return gather_plain(self._earlier or random_state(self._device), self._device)

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Keep the states until `restore`."""
        self._per_rank = state

    def restore(self) -> None:
        """Restore the loaded state, on ranks that the saved run had; called last, because setup draws numbers too."""
        states, self._per_rank, self._earlier = self._per_rank, [], None
        if self._run.global_rank < len(states):
            set_random_state(states[self._run.global_rank], self._device)

    def set_aside(self) -> None:
        """Remember the state before what a resumed run skips (validation) or repeats (rollouts that failed)."""
        self._earlier = random_state(self._device)

    def keep(self) -> None:
        """Forget the state that was set aside."""
        self._earlier = None

    def continue_training(self) -> None:
        """Restore the state that was set aside."""
        if self._earlier is not None:
            set_random_state(self._earlier, self._device)
        self._earlier = None
