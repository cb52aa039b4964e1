"""Resuming mid-epoch, or between the updates of a batch of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from pl_grouprl.training.optimizer import ADDED_OPTIONS
from pl_grouprl.training.rollout_buffer import RolloutBuffer
from pl_grouprl.utilities.distributed import gather_plain, num_ranks
from pl_grouprl.utilities.run_options import Changes, changed_options, refused_changes, remedy


def fix_loop_counters(checkpoint: dict[str, Any], num_batches: int | None = None) -> bool:
    """Correct the loop counters of a checkpoint, so that they describe the position at which the run was saved.

    Lightning gets two cases wrong. It counts an epoch as complete in the last checkpoint of a run that `max_steps`
    ended mid-epoch, so a resumed run would skip the rest of that epoch. And if the run ended with an epoch, Lightning
    2.6 skips the next epoch when `max_steps` is set.

    Args:
        checkpoint: What Lightning has loaded and is about to restore; changed in place.
        num_batches: Batches per epoch now, if known. An epoch that has had that many is complete, even if epochs were
            longer when the checkpoint was saved.

    Returns:
        Whether the epoch was complete, so that the run resumes with the next one.
    """
    loop = checkpoint.get("loops", {}).get("fit_loop")
    if loop is None:
        return False
    epochs, batches = loop["epoch_progress"], loop["epoch_loop.batch_progress"]
    too_many = num_batches is not None and batches["current"]["ready"] >= num_batches
    at_end = batches["is_last_batch"] = bool(batches["is_last_batch"] or too_many)
    for counts in (epochs["current"], epochs["total"]):
        if at_end:
            counts["ready"] = counts["processed"] = counts["completed"] = counts["started"]
        else:
            for name in ("processed", "completed"):
                counts[name] = min(counts[name], max(counts["ready"] - 1, 0))
    if at_end:
        for counts in (batches["current"], batches["total"]):
            counts["completed"] = counts["ready"]
        steps = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]["completed"]
        loop["epoch_loop.state_dict"]["_batches_that_stepped"] = steps
    return at_end


def batches_to_repeat(trainer: Any) -> int:
    """How many batches have begun since the last optimizer step; a checkpoint saved now has nothing of them."""
    loop, accumulated = trainer.fit_loop.epoch_loop, trainer.accumulate_grad_batches
    counts = loop.batch_progress.current
    if counts.processed == counts.ready and not loop._should_accumulate():
        return 0
    return int(counts.ready - counts.processed // accumulated * accumulated)


def rewind(checkpoint: dict[str, Any], batches: int) -> None:
    """Move a checkpoint's position in the data back, to before some batches of its epoch.

    Args:
        checkpoint: What Lightning is about to save; changed in place.
        batches: How many.
    """
    loop = checkpoint["loops"]["fit_loop"]
    progress = loop["epoch_loop.batch_progress"]
    for counts in (progress["current"], progress["total"]):
        counts.update(dict.fromkeys(counts, counts["ready"] - batches))
    progress["is_last_batch"] = False
    for state in loop["state_dict"].get("combined_loader", ()):
        state["position"] -= batches


def restore_rollouts(per_rank: Sequence[Any], rank: int, num_mini_batches: int) -> RolloutBuffer | None:
    """Rebuild this rank's rollouts from a checkpoint.

    Args:
        per_rank: The saved state of each rank's buffer, or None if its updates were finished.
        rank: This rank.
        num_mini_batches: Mini-batches per pass over the rollouts in this run.

    Returns:
        The rollouts, or None if their updates were finished.

    Raises:
        ValueError: If the saved run divided the rollouts into a different number of mini-batches.
    """
    if per_rank[0] is None:
        return None
    state = per_rank[rank] if len(per_rank) == num_ranks() else redistribute(per_rank, rank, num_ranks())
    buffer = RolloutBuffer.from_state_dict(state)
    if buffer.num_mini_batches != num_mini_batches:
        raise ValueError(
            f"num_mini_batches is {num_mini_batches}, but the checkpoint has unfinished rollouts, split into "
            f"{buffer.num_mini_batches}; keep that number, or resume where a batch of rollouts ends."
        )
    return buffer


def redistribute(per_rank: Sequence[dict[str, Any]], rank: int, num_ranks: int) -> dict[str, Any]:
    """Distribute the rollouts of all saved ranks over a different number of ranks; groups keep their mini-batch.

    Nothing is sampled or estimated again, so controllers that are updated once per batch of rollouts (the KL
    coefficient, the threshold of token groups) are not updated twice.

    Args:
        per_rank: The saved state of each rank's buffer.
        rank: This rank.
        num_ranks: Number of ranks now.

    Returns:
        The state of this rank's buffer. If there are fewer groups than ranks, some ranks get a dummy group, with no
        trained token.
    """
    places = [
        (state["mini_batches"][index], group["group_id"], owner, index)
        for owner, state in enumerate(per_rank)
        for index, group in enumerate(state["groups"])
        if state["mini_batches"][index] >= 0  # not a dummy
    ]
    places.sort(key=lambda place: place[:2])
    assigned = places[rank::num_ranks]
    numbers = [number for number, *_ in assigned]
    tokens = {
        name: [per_rank[owner]["tokens"][name][index] for *_, owner, index in assigned or places[:1]]
        for name in per_rank[0]["tokens"]
    }
    if not assigned:
        numbers = [-1]
        tokens["loss_mask"] = [torch.zeros_like(tokens["loss_mask"][0])]
    groups = [per_rank[owner]["groups"][index] for *_, owner, index in assigned or places[:1]]
    return {**per_rank[0], "groups": groups, "mini_batches": numbers, "tokens": tokens}


def compare_adapters(then: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]) -> None:
    """Refuse adapters whose options differ from the checkpoint's, even if the weights have the same shapes.

    Args:
        then: Options in the checkpoint, by part (`policy`, `critic`), from `adapter_options`.
        now: The same for this run. Only parts in both are compared.

    Raises:
        ValueError: If an option differs.
    """
    for part in (part for part in then if part in now):
        before, after = then[part], now[part]
        differing = [
            f"{name} is {after.get(name)!r} (was {before.get(name)!r})"
            for name in sorted(before.keys() | after.keys())
            if before.get(name) != after.get(name)
        ]
        if differing:
            raise ValueError(
                f"the {part} has a different adapter from the one in the checkpoint: {', '.join(differing)}; restore "
                "its options, or start a new run."
            )


def compare_options(then: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse options that differ from those with which the checkpoint's unfinished rollouts were made.

    Raises:
        ValueError: If one differs.
    """
    for name, (before, after) in changed_options(then, now).items():
        raise ValueError(
            f"{name} is {after!r}, but the checkpoint has unfinished rollouts made with {before!r}; keep that "
            "value, or resume where a batch of rollouts ends."
        )


def check_changed_options(changes: Changes, allowed: Sequence[str]) -> None:
    """Refuse options that differ from the checkpoint's, and report those that may.

    Args:
        changes: By name, the value in the checkpoint and the value in this run.
        allowed: Options that may differ, by name or dotted prefix.

    Raises:
        ValueError: If any other option differs.
    """
    refused = refused_changes(changes, allowed)
    if refused:
        raise ValueError(
            f"the checkpoint is of a run with other options: {'; '.join(refused)}. Restore them; "
            f"{remedy(changes, allowed)}; or start a new run from the exported policy."
        )
    for name, (before, after) in changes.items():
        rank_zero_info(f"allow_changed: {name} is {after!r} from here on; the checkpoint was made with {before!r}.")


def compare_optimizers(then: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse changed optimizer options, because the optimizer state in the checkpoint would override them.

    Args:
        then: In the checkpoint, by name, such as `policy.learning_rate`.
        now: The same of this run.

    Raises:
        ValueError: If one differs.
    """
    added = {name: ADDED_OPTIONS[option] for name in now if (option := name.rpartition(".")[2]) in ADDED_OPTIONS}
    differences = refused_changes(changed_options(added | then, now), ())
    if differences:
        raise ValueError(
            f"the optimizer's options differ from those in the checkpoint, whose state would override them: "
            f"{'; '.join(differences)}. Restore them, or start a new run from the exported policy."
        )


def warn_of_other_evaluation(then: dict[str, Any], now: dict[str, Any]) -> None:
    """Warn if a checkpoint is evaluated with other options than the run that saved it."""
    differing = refused_changes(changed_options(then, now), ())
    if differing:
        rank_zero_warn(
            f"Evaluation options differ from those of the checkpoint's run, which a checkpoint does not restore: "
            f"{'; '.join(differing)}. Metrics of the two are not comparable; pass the run's options for those that are."
        )


def compare_reference(
    then: float | None,
    now: float | None,
    source: Any,
    option: str = "policy",
    role: str = "reference, or the base of its adapter,",
) -> None:
    """Refuse a different frozen model.

    Args:
        then: Fingerprint in the checkpoint.
        now: Fingerprint in this run.
        source: Where the model comes from, for the error.
        option: The option that sets it.
        role: Role of the model in the run, for the error.

    Raises:
        ValueError: If they differ.
    """
    if then is not None and now is not None and abs(then - now) > 1e-6 * abs(then):
        raise ValueError(
            f"{option}={source!r} is a different model (sum of absolute weights {now}) than the checkpoint was trained "
            f"with ({then}), so the {role} would differ; restore it or start a new run."
        )


class UnfinishedRollouts:
    """Checkpoint part: the rollouts of every rank, while they have updates left.

    Args:
        module: Has `last_rollouts` and `updates_per_rollout`.
        num_mini_batches: Mini-batches per pass over the rollouts.

    Attributes:
        restored: Whether rollouts were loaded.
        to_repeat: How many of the last updates a resumed run repeats.
    """

    def __init__(self, module: Any, num_mini_batches: int) -> None:
        self._module = module
        self._num_mini_batches = num_mini_batches
        self.restored = False
        self.to_repeat = 0

    def state_dict(self) -> list[dict[str, Any] | None]:
        """Gather them. Collective."""
        buffer = self._module.last_rollouts
        done = 0 if buffer is None else max(buffer.updates_done - self.to_repeat, 0)
        finished = buffer is None or done >= self._module.updates_per_rollout
        state = None if finished else buffer.state_dict() | {"updates_done": done}
        return gather_plain(state, self._module.device)

    def load_state_dict(self, state: list[dict[str, Any] | None]) -> None:
        """Restore this rank's rollouts."""
        rollouts = restore_rollouts(state, self._module.global_rank, self._num_mini_batches)
        self._module.last_rollouts = rollouts or self._module.last_rollouts
        self.restored = rollouts is not None


def restore_loaders(trainer: Any, *, begins_epoch: bool) -> None:
    """Restore the position in the data where Lightning loses it; call before the first batch is read.

    Lightning loses it if the epoch was complete, or if a learning rate schedule asked for the number of steps, which
    sets up the loader before its state is restored.

    Args:
        trainer: The Trainer.
        begins_epoch: What `fix_loop_counters` returned.
    """
    loop = trainer.fit_loop
    states, loop._combined_loader_states_to_load = loop._combined_loader_states_to_load, []
    if states and loop._combined_loader is not None:
        loop._combined_loader._load_state_dicts(states)
    if begins_epoch:
        loop.epoch_loop.restarting = False
