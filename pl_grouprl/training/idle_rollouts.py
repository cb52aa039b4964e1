"""Separates rollouts that no loss trains from those that one does, so that an update need not encode them."""

from __future__ import annotations

from pl_grouprl.functional.rows import to_rows
from pl_grouprl.training.rollout_buffer import RolloutBuffer


def trained_and_idle(buffer: RolloutBuffer, *, by_advantages: bool) -> tuple[RolloutBuffer, RolloutBuffer]:
    """Split a buffer: the rollouts of episodes with a token that a loss trains, and all others.

    Args:
        buffer: The rollouts. A token outside `loss_mask` is not trained.
        by_advantages: Whether a token whose advantage is 0 is not trained either.
    """
    trained_N = buffer.joined("loss_mask")
    if by_advantages:
        trained_N = trained_N & (buffer.joined("advantages") != 0)
    trained_E = to_rows(trained_N, buffer.episode_lengths).any(dim=1)
    trained_B = trained_E.repeat_interleave(buffer.rows_per_episode)
    return buffer.subset(trained_B), buffer.subset(~trained_B)
