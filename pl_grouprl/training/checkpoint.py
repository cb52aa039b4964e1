"""The run's part of a Lightning checkpoint: what it saves, and what a resumed run must match."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pl_grouprl.models.adapters import adapter_options
from pl_grouprl.training.optimizer import saved_options
from pl_grouprl.training.resume import (
    UnfinishedRollouts,
    batches_to_repeat,
    check_changed_options,
    compare_adapters,
    compare_optimizers,
    compare_options,
    compare_reference,
    fix_loop_counters,
    restore_loaders,
    rewind,
    warn_of_other_evaluation,
)
from pl_grouprl.training.run_options import evaluation_options
from pl_grouprl.training.run_state import Attributes, ConsistencyCheck, Stateful, load_parts, save_parts
from pl_grouprl.training.trainer_options import accumulation_schedule
from pl_grouprl.utilities.distributed import gather_plain
from pl_grouprl.utilities.origin import compare_lineage, describe_misfit, lineage
from pl_grouprl.utilities.run_options import Changes, changes_since

CHECKPOINT_KEY = "pl_grouprl"


class RunCheckpoint:
    """Saves and loads what Lightning does not, such as random number generators and rollouts with updates left.

    Args:
        module: The `RLModule`.
        num_mini_batches: Updates in each pass over the rollouts.

    Attributes:
        reference_fingerprint: Fingerprint of the reference policy, or of an adapter's frozen base; None without either.
    """

    def __init__(self, module: Any, num_mini_batches: int) -> None:
        self._module = module
        self._unfinished = UnfinishedRollouts(module, num_mini_batches)
        self._lineage: Sequence[str] | None = None
        self._begins_epoch = False
        self.reference_fingerprint: float | None = None

    @property
    def _is_resumed(self) -> bool:
        """Whether a fit continues from the checkpoint, rather than an evaluation of its weights."""
        trainer = self._module._trainer
        return trainer is not None and trainer.state.fn == "fit"

    def standard_parts(self) -> dict[str, Stateful]:
        """The parts that every algorithm saves, by name, in loading order."""
        module = self._module
        optimized = {} if module.policy is None else module.optimized_parts()
        adapters = {name: adapter_options(part) for name, (part, _) in optimized.items()}
        rollouts_differ = self._compare_rollout_options
        return {
            "module": ConsistencyCheck(lambda: lineage(module), lambda then, now: self.compare_origin(then)),
            "random_numbers": module.random_numbers,
            "run_options": ConsistencyCheck(module.run_options),  # compared last, by `check_changed_options`
            "reference_fingerprint": ConsistencyCheck(lambda: self.reference_fingerprint, self._compare_reference),
            "adapters": ConsistencyCheck(lambda: adapters, compare_adapters),
            "optimizer": ConsistencyCheck(
                lambda: saved_options(optimized), compare_optimizers if self._is_resumed else None
            ),
            "steps": Attributes(module.optimization, "nonfinite_steps"),
            "unrewarded": Attributes(module.rewarder, "unrewarded_batches"),
            "tokens": Attributes(module, "num_tokens"),
            "rollouts": self._unfinished,
            "rollout_queue": module.collector.ahead_state,
            "options": ConsistencyCheck(module.rollout_options, rollouts_differ),
            "evaluation": ConsistencyCheck(
                lambda: evaluation_options(module), None if self._is_resumed else warn_of_other_evaluation
            ),
            "kl_controller": module.kl_penalty.controller,
        }

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Save all parts; all ranks call it. Within a batch, save the position before it: a resumed run repeats it.

        Raises:
            RuntimeError: If a resumed run could not repeat the batch.
        """
        trainer = self._module._trainer
        repeated = self._unfinished.to_repeat = 0 if trainer is None else batches_to_repeat(trainer)
        if repeated:
            self._check_repeatable(repeated)
            rewind(checkpoint, repeated)
        checkpoint[CHECKPOINT_KEY] = save_parts(self._module.saved_state())

    def _check_repeatable(self, batches: int) -> None:
        module = self._module
        accumulated, updates = module.trainer.accumulate_grad_batches, module.updates_per_rollout
        for reason, applies in {
            "the optimizer's step has begun": module.is_stepping,
            "rollouts have left the queue": module.max_staleness and module.last_rollouts is None,
            "gradients are accumulating over several batches of rollouts": batches > 1 and updates % accumulated,
        }.items():
            if applies:
                raise RuntimeError(
                    f"no checkpoint is saved within this batch, because a resumed run could not repeat it: {reason}; "
                    "resume from an earlier one."
                )

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Load all parts.

        Raises:
            ValueError: If another algorithm wrote it, a part rejects its state, or an option changed that must not.
        """
        module = self._module
        datamodule = getattr(module._trainer, "datamodule", None) if self._is_resumed else None
        self._begins_epoch = fix_loop_counters(checkpoint, getattr(datamodule, "num_train_batches", None))
        state, changes = checkpoint.get(CHECKPOINT_KEY, {}), {}
        if self._is_resumed:  # per rank, since each reads its own data files
            per_rank: list[Changes] = gather_plain(changes_since(state, module), module.trainer.strategy.root_device)
            changes = {name: change for of_rank in per_rank for name, change in of_rank.items()}
        parts = module.saved_state()
        load_parts(parts, state, {name for name in parts if module.starts_over.get(name) in changes})
        check_changed_options(changes, module.allow_changed)

    def continue_training(self) -> None:
        """Continue a resumed run at its position in the data, with its random numbers."""
        trainer = self._module.trainer
        restore_loaders(trainer, begins_epoch=self._begins_epoch)
        schedule = accumulation_schedule(trainer)  # which Lightning looks up at the beginning of an epoch alone
        trainer.accumulate_grad_batches = schedule[max(epoch for epoch in schedule if epoch <= trainer.current_epoch)]
        self._begins_epoch = False
        self._module.random_numbers.restore()

    def compare_origin(self, then: Sequence[str] | None, what: str = "the checkpoint") -> None:
        """Refuse a checkpoint of another algorithm.

        Args:
            then: The `lineage` that it records, or None.
            what: What the error calls it.
        """
        compare_lineage(self._module, then, what)
        self._lineage = then

    def describe_misfit(self, reason: str) -> str:
        """Error text for weights that do not fit the module: which module wrote them, then torch's reason."""
        return describe_misfit(self._module, self._lineage, reason)

    def _compare_reference(self, then: float | None, now: float | None) -> None:
        compare_reference(then, now, self._module.policy_source)

    def _compare_rollout_options(self, then: dict[str, Any], now: dict[str, Any]) -> None:
        if self._is_resumed and self._unfinished.restored:
            compare_options(then, now)
