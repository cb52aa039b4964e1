"""Lengths of prompts and rollouts as runs have them: most are short, a few are several times longer."""

from __future__ import annotations

import math
import random


def log_normal_groups(
    rng: random.Random,
    *,
    groups: int = 64,
    rollouts: int = 8,
    prompt: int = 512,
    rollout: int = 400,
    sigma: float = 0.6,
) -> list[tuple[int, list[int]]]:
    """A prompt length and rollout lengths for each group, log-normal about their medians `prompt` and `rollout`."""

    def length(median: int) -> int:
        return max(1, round(rng.lognormvariate(math.log(median), sigma)))

    return [(length(prompt), [length(rollout) for _ in range(rollouts)]) for _ in range(groups)]
