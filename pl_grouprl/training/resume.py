"""Runs that go on amid an epoch or amid the updates of their rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from pl_grouprl.training.rollout_buffer import RolloutBuffer
from pl_grouprl.utilities.distributed import gather_plain, num_ranks
from pl_grouprl.utilities.run_options import Changes, changed_options, refused_changes, remedy


def fix_loop_counters(checkpoint: dict[str, Any], num_batches: int | None = None) -> bool:
    """Let the counters of a checkpoint say where the run stood, at whatever moment of its loops it was saved.

    Lightning counts an epoch as done before it saves the last checkpoint of a run, also where the run only stopped in
    it, by `max_steps` for one; going on from there would skip the rest of the epoch. And where a run has stopped at the
    end of an epoch, Lightning 2.6 takes the next one for finished as well if there is a `max_steps`.

    Args:
        checkpoint: What Lightning has loaded and is about to restore; changed in place.
        num_batches: Batches per epoch now, if known. An epoch that has already had that many is complete, even if
            epochs were longer when the checkpoint was saved.

    Returns:
        Whether an epoch was complete, so that the next one begins.
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


def restore_rollouts(per_rank: Sequence[Any], rank: int, num_mini_batches: int) -> RolloutBuffer | None:
    """Rebuild this rank's rollouts from a checkpoint.

    Args:
        per_rank: What each rank's buffer had to save; None from those that had no updates to come.
        rank: This rank.
        num_mini_batches: Into how many parts a pass over the rollouts is cut now.

    Returns:
        The rollouts; None where no updates were to come.

    Raises:
        ValueError: If the rollouts were cut into another number of mini-batches.
    """
    if per_rank[0] is None:
        return None
    state = per_rank[rank] if len(per_rank) == num_ranks() else redistribute(per_rank, rank, num_ranks())
    buffer = RolloutBuffer.from_state_dict(state)
    if buffer.num_mini_batches != num_mini_batches:
        raise ValueError(
            f"num_mini_batches is {num_mini_batches}, but the checkpoint has unfinished rollouts, trained in "
            f"{buffer.num_mini_batches}; keep that number, or resume where a batch of rollouts ends."
        )
    return buffer


def redistribute(per_rank: Sequence[dict[str, Any]], rank: int, num_ranks: int) -> dict[str, Any]:
    """Deal the rollouts of all ranks to another number of ranks; each group stays in its mini-batch.

    Nothing is sampled or estimated again, so what moves once per batch of rollouts (the KL coefficient, the threshold
    of token groups) does not move twice.

    Args:
        per_rank: The state of each rank's buffer.
        rank: Whose share is wanted.
        num_ranks: How many ranks there are now.

    Returns:
        The state of a buffer. A rank for which no group is left holds one without a trained token.
    """
    places = [
        (state["mini_batches"][index], group["group_id"], owner, index)
        for owner, state in enumerate(per_rank)
        for index, group in enumerate(state["groups"])
        if state["mini_batches"][index] >= 0  # not one that only fills a rank
    ]
    places.sort(key=lambda place: place[:2])
    own = places[rank::num_ranks]
    numbers = [number for number, *_ in own]
    tokens = {
        name: [per_rank[owner]["tokens"][name][index] for *_, owner, index in own or places[:1]]
        for name in per_rank[0]["tokens"]
    }
    if not own:
        numbers = [-1]
        tokens["loss_mask"] = [torch.zeros_like(tokens["loss_mask"][0])]
    groups = [per_rank[owner]["groups"][index] for *_, owner, index in own or places[:1]]
    return {**per_rank[0], "groups": groups, "mini_batches": numbers, "tokens": tokens}


def compare_adapters(then: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]) -> None:
    """Refuse adapters that act otherwise than the checkpoint's, though their weights may have the same shapes.

    Args:
        then: In the checkpoint, by the part that has them (`policy`, `critic`), as `adapter_options` gives them.
        now: The same of this run. Parts that are in one of both alone are left out.

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
                f"the {part} has another adapter than in the checkpoint: {', '.join(differing)}; restore its options, "
                "or start a new run."
            )


def compare_options(then: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse options that differ from those the checkpoint's unfinished rollouts were made with.

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
        ValueError: If an option differs that may not.
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
    """Refuse options of the optimizer that the state in the checkpoint would overrule.

    Args:
        then: In the checkpoint, by name, such as `policy.learning_rate`.
        now: The same of this run.

    Raises:
        ValueError: If one differs.
    """
    differences = refused_changes(changed_options(then, now), ())
    if differences:
        raise ValueError(
            f"the optimizer has other options than in the checkpoint, whose state brings its own: "
            f"{'; '.join(differences)}. Restore them, or start a new run from the exported policy."
        )


def compare_reference(then: float | None, now: float | None, source: Any) -> None:
    """Refuse another base model than the checkpoint's.

    Args:
        then: Fingerprint in the checkpoint.
        now: Fingerprint of this run's.
        source: Where it came from, for the error.

    Raises:
        ValueError: If they differ.
    """
    if then is not None and now is not None and abs(then - now) > 1e-6 * abs(then):
        raise ValueError(
            f"policy={source!r} gives another model (sum of absolute weights {now}) than the checkpoint was trained "
            f"with ({then}), so the reference, or the base of its adapter, would differ; restore it or start a new run."
        )


class UnfinishedRollouts:
    """The rollouts of every rank, as part of a checkpoint, if some of their updates are still to come.

    Args:
        module: Has `last_rollouts` and `updates_per_rollout`.
        num_mini_batches: Mini-batches of one pass over the rollouts.

    Attributes:
        restored: Whether rollouts were loaded.
    """

    def __init__(self, module: Any, num_mini_batches: int) -> None:
        self._module = module
        self._num_mini_batches = num_mini_batches
        self.restored = False

    def state_dict(self) -> list[dict[str, Any] | None]:
        """Gather them; all ranks call it."""
        buffer = self._module.last_rollouts
        finished = buffer is None or buffer.updates_done >= self._module.updates_per_rollout
        return gather_plain(None if finished else buffer.state_dict(), self._module.device)

    def load_state_dict(self, state: list[dict[str, Any] | None]) -> None:
        """Restore this rank's."""
        rollouts = restore_rollouts(state, self._module.global_rank, self._num_mini_batches)
        self._module.last_rollouts = rollouts or self._module.last_rollouts
        self.restored = rollouts is not None


def restore_loaders(trainer: Any, *, begins_epoch: bool) -> None:
    """Restore the position in the data, which Lightning loses in two cases; call before the first batch is read.

    They are: the epoch was complete, or a schedule asked for the number of steps, which sets up the loader before its
    state is known.

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
