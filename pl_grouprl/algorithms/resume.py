"""Runs that go on amid an epoch or amid the updates of their rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from pl_grouprl.algorithms.rollout_buffer import RolloutBuffer
from pl_grouprl.utilities.distributed import num_ranks


def mark_epoch_unfinished(checkpoint: dict[str, Any]) -> None:
    """Take back that an epoch was completed where the run only stopped in it, by `max_steps` for one.

    Lightning counts the epoch as done before it saves the last checkpoint of a run. A run that goes on from there would
    skip the rest of the epoch, or do nothing at all under `max_epochs: 1`. After this the checkpoint says what one
    says that was saved at the same step amid the epoch.

    Args:
        checkpoint: What Lightning is about to save; changed in place.
    """
    loop = checkpoint.get("loops", {}).get("fit_loop")
    if loop is None or loop["epoch_loop.batch_progress"]["is_last_batch"]:
        return
    progress = loop["epoch_progress"]
    for counts in (progress["current"], progress["total"]):
        for name in ("processed", "completed"):
            if counts[name] == counts["ready"] > 0:
                counts[name] -= 1
    checkpoint["epoch"] = progress["current"]["processed"]


def restore_rollouts(per_rank: Sequence[Any], rank: int, num_mini_batches: int) -> RolloutBuffer | None:
    """Rebuild this rank's rollouts from a checkpoint.

    Args:
        per_rank: What each rank's buffer had to save; None from those that had no updates to come.
        rank: This rank.
        num_mini_batches: Into how many parts a pass over the rollouts is cut now.

    Returns:
        The rollouts; None where no updates were to come, and, with a warning, where there were more or fewer ranks.

    Raises:
        ValueError: If the rollouts were cut into another number of mini-batches.
    """
    if per_rank[0] is None:
        return None
    if len(per_rank) != num_ranks():
        rank_zero_warn(
            f"the checkpoint holds rollouts of {len(per_rank)} ranks and this run has {num_ranks()}; the prompts of "
            "that batch are sampled again for its remaining updates."
        )
        return None
    buffer = RolloutBuffer.from_state_dict(per_rank[rank])
    if buffer.num_mini_batches != num_mini_batches:
        raise ValueError(
            f"num_mini_batches is {num_mini_batches}, but the checkpoint is amid rollouts that are trained in "
            f"{buffer.num_mini_batches}; keep that number, or resume where a batch of rollouts ends."
        )
    return buffer


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
            f"{name} is {after.get(name)!r} (there {before.get(name)!r})"
            for name in sorted(before.keys() | after.keys())
            if before.get(name) != after.get(name)
        ]
        if differing:
            raise ValueError(
                f"the {part} has another adapter than in the checkpoint: {', '.join(differing)}; restore its options, "
                "or start a new run."
            )


def compare_options(then: dict[str, Any], now: dict[str, Any], *, amid_rollouts: bool) -> None:
    """Refuse other options than the checkpoint's amid rollouts; elsewhere warn of them.

    Raises:
        ValueError: If an option differs and updates of the checkpoint's rollouts are still to come.
    """
    for name in (name for name in then if name in now and then[name] != now[name]):
        if amid_rollouts:
            raise ValueError(
                f"{name} is {now[name]!r}, but the checkpoint is amid rollouts made with {then[name]!r}; keep that "
                "value, or resume where a batch of rollouts ends."
            )
        rank_zero_warn(f"{name} is {now[name]!r} from here on; the checkpoint was made with {then[name]!r}.")
