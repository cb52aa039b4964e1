"""What a checkpoint holds of a module beside weights, optimizer and position: listed, saved, restored in one place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pl_grouprl.algorithms.loading import LoadsCheckpoints
from pl_grouprl.algorithms.run_options import RecordsOptions
from pl_grouprl.training.resume import check_changed_options, fix_loop_counters
from pl_grouprl.training.run_state import ConsistencyCheck, PerRankState, Stateful
from pl_grouprl.utilities.distributed import gather_plain
from pl_grouprl.utilities.origin import lineage
from pl_grouprl.utilities.random_state import random_state, set_random_state
from pl_grouprl.utilities.run_options import Changes, changes_since, check_allowed

KEY = "pl_grouprl"
"""Where it is in a checkpoint."""


class SavedStateModule(RecordsOptions, LoadsCheckpoints):
    """A module whose state in checkpoints is what `saved_state` lists.

    Args:
        allow_changed: Options that may differ from the checkpoint's when a run is resumed.

    Attributes:
        starts_over: For parts of the state, the option with their initial value: if it is changed on purpose, the part
            starts there again.
    """

    starts_over: ClassVar[dict[str, str]] = {}

    def __init__(self, allow_changed: Sequence[str] = ()) -> None:
        super().__init__()
        self.allow_changed = tuple(allow_changed)
        self._random_states: list[dict[str, Any]] = []
        self._before_validation: dict[str, Any] | None = None
        self._begins_epoch = False

    def saved_state(self) -> dict[str, Stateful]:
        """Parts of the state by name, in the order in which they are loaded. A subclass adds its own.

        A part that an older checkpoint does not have is left as it is.
        """
        return {
            "module": ConsistencyCheck(lambda: lineage(self), lambda then, now: self.compare_origin(then)),
            "random_numbers": PerRankState(self, self._random_state, self._keep_random_states),
            "run_options": ConsistencyCheck(self.run_options),  # compared by `check_changed_options`, last
        }

    def setup(self, stage: str) -> None:
        """Verify checkpoints before loading, and refuse unknown names in `allow_changed`."""
        super().setup(stage)
        if stage == "fit":
            check_allowed(self.allow_changed, self.run_options(), self.free_options)

    @property
    def is_resumed(self) -> bool:
        """Whether what is loaded is to be trained on, not only looked at."""
        return self._trainer is not None and self.trainer.state.fn == "fit"

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save all parts."""
        checkpoint[KEY] = {name: part.state_dict() for name, part in self.saved_state().items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load all parts.

        Raises:
            ValueError: If another algorithm wrote it, a part refuses its state, or an option differs that may not.
        """
        datamodule = getattr(self._trainer, "datamodule", None) if self.is_resumed else None
        self._begins_epoch = fix_loop_counters(checkpoint, getattr(datamodule, "num_train_batches", None))
        state = checkpoint.get(KEY, {})
        changes = self._changes_since(state) if self.is_resumed else {}
        for name, part in self.saved_state().items():
            if name in state and self.starts_over.get(name) not in changes:
                part.load_state_dict(state[name])
        check_changed_options(changes, self.allow_changed)

    def _changes_since(self, state: dict[str, Any]) -> Changes:
        """Options that differ on any rank: each rank reads its files itself."""
        per_rank: list[Changes] = gather_plain(changes_since(state, self), self.trainer.strategy.root_device)
        return {name: change for own in per_rank for name, change in own.items()}

    # Random numbers.

    def _random_state(self) -> dict[str, Any]:
        return self._before_validation or random_state(self.device)

    def _keep_random_states(self, per_rank: list[dict[str, Any]]) -> None:
        self._random_states = per_rank

    def on_train_start(self) -> None:
        """Let a resumed run go on: with the next epoch, where one was complete, its data, and its random numbers.

        Lightning loses the position in the data if an epoch was complete, or if a schedule has asked for the number of
        steps, which sets up the loader before its state is known. Random states are restored last, because setup draws
        numbers too, and only on ranks that the saved run had.
        """
        loop = self.trainer.fit_loop
        states, loop._combined_loader_states_to_load = loop._combined_loader_states_to_load, []
        if states and loop._combined_loader is not None:
            loop._combined_loader._load_state_dicts(states)  # not too late: nothing is read before the first batch
        if self._begins_epoch:
            loop.epoch_loop.restarting = False
            self._begins_epoch = False
        states, self._random_states = self._random_states, []
        if self.global_rank < len(states):
            set_random_state(states[self.global_rank], self.device)

    def on_validation_start(self) -> None:
        """Note the random numbers: a validation within a run takes none of the training's.

        A run that is resumed from a checkpoint of the same step leaves that validation out.
        """
        self._before_validation = random_state(self.device)

    def on_validation_end(self) -> None:
        """Go on with them."""
        if self._before_validation is not None:
            set_random_state(self._before_validation, self.device)
        self._before_validation = None
