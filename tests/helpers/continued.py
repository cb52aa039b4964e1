"""Episodes of several turns on an engine, with and without caches kept between the turns."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from pl_grouprl.types import Rollout, SamplingConfig

Turns = list[list[list[Rollout]]]


def play(
    engine: Any,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    *,
    num_generations: int = 3,
    turns: int = 4,
    new_tokens: Callable[[random.Random], int] = lambda _: 3,
    max_new_tokens: Callable[[random.Random], int] = lambda _: 5,
    keep: bool,
) -> tuple[list[list[int]], Turns]:
    """Sample episodes: a turn of the model, then random tokens (a tool's result), and so on.

    From the third turn on, one episode has ended, another is there twice, and a prompt that continues nothing is in
    between. The order changes in every turn.

    Args:
        engine: The engine.
        prompts: Of the groups.
        sampling: Of the first turn.
        num_generations: Episodes of each prompt.
        turns: Turns of the model.
        new_tokens: Draws the number of tokens after a turn.
        max_new_tokens: Draws the limit of an episode's later turns.
        keep: Whether to keep caches.

    Returns:
        The tokens of each sequence at the end, and the rollouts of each turn.
    """
    numbers = random.Random(0)
    with engine.keep_caches() if keep else nullcontext():
        groups = engine.generate(prompts, sampling, num_generations=num_generations, seed=1)
        played = [groups]
        episodes = [[*prompt, *own.token_ids] for prompt, group in zip(prompts, groups, strict=True) for own in group]
        for turn in range(1, turns):
            episodes = [[*own, *(numbers.randrange(1, 24) for _ in range(new_tokens(numbers)))] for own in episodes]
            if turn == 2:
                episodes = [*episodes[1:], [5, 4, 3], episodes[-1]]
            numbers.shuffle(episodes)
            limits = [max_new_tokens(numbers) for _ in episodes]
            groups = engine.generate(episodes, sampling, num_generations=1, seed=1 + turn, max_new_tokens=limits)
            played.append(groups)
            episodes = [[*own, *group[0].token_ids] for own, group in zip(episodes, groups, strict=True)]
    return episodes, played


@contextmanager
def counted_tokens(model: Any) -> Iterator[list[int]]:
    """Record how many tokens each forward pass runs, padding included."""
    counts: list[int] = []
    embedding = model.get_input_embeddings()
    handle = embedding.register_forward_pre_hook(lambda module, args: counts.append(args[0].numel()))
    try:
        yield counts
    finally:
        handle.remove()
