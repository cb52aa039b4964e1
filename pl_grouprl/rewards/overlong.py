"""Penalty for completions that come close to the length limit."""

from __future__ import annotations

import math
from typing import Any

from pl_grouprl.rewards.completion_text import written_ids
from pl_grouprl.utilities.arguments import checked_arguments
from pl_grouprl.utilities.options import check_options


@checked_arguments
class OverlongPenalty:
    """Soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13). Has TRL's signature.

    With y tokens in a completion, L = `max_length` and C = `overlong_buffer`::

        0                                y <= L - C
        penalty * ((L - C) - y) / C      L - C < y <= L
        -penalty                         y > L

    In an episode, only tokens that the model wrote count. Combine it with a reward for correctness; alone, it only
    teaches brevity. TRL's `get_soft_overlong_punishment(max_completion_len, soft_punish_cache)` and verl's
    `overlong_buffer_cfg` (`len`, `penalty_factor`, with `max_resp_len`) give the same numbers.

    Args:
        max_length: L, in tokens; usually the sampler's `max_completion_length`.
        overlong_buffer: C, in tokens, from 0 (no slope, only the drop beyond L) to `max_length`.
        penalty: Size of the penalty, positive.
    """

    def __init__(self, max_length: int, overlong_buffer: int, penalty: float = 1.0) -> None:
        check_options({"OverlongPenalty.max_length": (max_length, max_length >= 1, "at least 1 token")})
        if not 0 <= overlong_buffer <= max_length:
            raise ValueError(
                f"OverlongPenalty.overlong_buffer is {overlong_buffer}; it must be between 0 and "
                f"max_length={max_length} tokens."
            )
        if not (math.isfinite(penalty) and penalty > 0):
            raise ValueError(
                f"OverlongPenalty.penalty is {penalty}; it must be positive (the reward is its negative): "
                f"set {abs(penalty) if penalty < 0 else 1.0}."
            )
        self.max_length = max_length
        self.overlong_buffer = overlong_buffer
        self.penalty = penalty

    def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]],
        completion_mask: list[list[int]] | None = None,
        **columns: list[Any],
    ) -> list[float]:
        """Return the penalty of each completion, from -penalty to 0."""
        return [self._score(len(ids)) for ids in written_ids(completion_ids, completion_mask)]

    def _score(self, length: int) -> float:
        free = self.max_length - self.overlong_buffer
        if length <= free:
            return 0.0
        if length > self.max_length:
            return -self.penalty
        return (free - length) / self.overlong_buffer * self.penalty
