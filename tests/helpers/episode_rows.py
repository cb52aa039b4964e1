"""Groups of random rollouts, and the same tokens as rows of episodes."""

import random
from dataclasses import replace

from pl_grouprl.types import Rollout, RolloutGroup


def random_groups(seed: int, num_groups: int = 3, *, token_rewards: bool = False) -> list[RolloutGroup]:
    """Groups of two to four rollouts of 0 to 9 tokens, with masks, rewards and log-probabilities."""
    rng = random.Random(f"episodes {seed}")

    def rollout() -> Rollout:
        length = rng.choice((0, 1, 3, 6, 9))
        steps = [rng.choice((None, rng.uniform(-1, 1))) for _ in range(length)]
        return Rollout(
            [rng.randrange(32) for _ in range(length)],
            logprobs=[rng.uniform(-3, -1) for _ in range(length)],
            loss_mask=[int(rng.random() < 0.8) for _ in range(length)],
            finish_reason=rng.choice(("stop", "length")),
            reward=rng.uniform(-1, 1),
            token_rewards=steps if token_rewards else None,
        )

    return [
        RolloutGroup([number + 1, 2], [rollout() for _ in range(rng.randint(2, 4))], number)
        for number in range(num_groups)
    ]


def cut_into_rows(groups: list[RolloutGroup], seed: int = 0) -> list[RolloutGroup]:
    """The same tokens with each rollout cut into one to three rows of one episode; some of them empty."""
    rng = random.Random(f"rows {seed}")
    return [
        replace(group, rollouts=[row for n, rollout in enumerate(group.rollouts) for row in _rows(rollout, n, rng)])
        for group in groups
    ]


def _rows(rollout: Rollout, number: int, rng: random.Random) -> list[Rollout]:
    length = len(rollout.token_ids)
    cuts = sorted(rng.randint(0, length) for _ in range(rng.randint(0, 2)))
    spans = [slice(*span) for span in zip([0, *cuts], [*cuts, length], strict=True)]
    return [
        replace(
            rollout,
            token_ids=rollout.token_ids[span],
            logprobs=rollout.logprobs[span],
            loss_mask=rollout.loss_mask[span],
            token_rewards=rollout.token_rewards and rollout.token_rewards[span],
            finish_reason=rollout.finish_reason if span is spans[-1] else "length",
            episode=number,
        )
        for span in spans
    ]
