"""Random groups whose rollouts branch: from each other, at any token, with copies, prefixes and empty ones."""

import random

from pl_grouprl.types import Rollout, RolloutGroup


def branched_rollouts(rng: random.Random, count: int, longest: int, vocabulary: int) -> list[list[int]]:
    """Token ids of rollouts, each new or continuing a beginning of an earlier one."""
    found: list[list[int]] = []
    for _ in range(count):
        beginning = rng.choice(found) if found and rng.random() < 0.7 else []
        kept = beginning[: rng.randint(0, len(beginning))]
        own = [rng.randrange(vocabulary) for _ in range(rng.choice((0, 0, 1, 2, longest // 2, longest)))]
        found.append(kept + own)
    rng.shuffle(found)
    return found


def branched_groups(
    seed: int, num_groups: int = 2, *, most: int = 6, longest: int = 8, vocabulary: int = 32, common: int = 0
) -> list[RolloutGroup]:
    """Groups of one to `most` rollouts with masks and without; prompts begin with `common` equal tokens."""
    rng = random.Random(f"branched {seed}")
    system = [rng.randrange(vocabulary) for _ in range(common)]
    groups = []
    for _ in range(num_groups):
        prompt = system + [rng.randrange(vocabulary) for _ in range(rng.randint(0 if common else 1, 6))]
        rollouts = [
            Rollout(ids, reward=0.0, loss_mask=[rng.randint(0, 1) for _ in ids] if rng.random() < 0.5 else None)
            for ids in branched_rollouts(rng, rng.randint(1, most), longest, vocabulary)
        ]
        groups.append(RolloutGroup(prompt, rollouts))
    return groups
