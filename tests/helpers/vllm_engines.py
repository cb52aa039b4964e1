"""Engines of vLLM in this process, compared with greedy decoding by transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from helpers.engines import new_engine
from helpers.rollouts import PROMPTS, greedily, ids

from pl_grouprl.types import Rollout, SamplingConfig

LONG = [[(7 * place + first) % 24 for place in range(200)] for first in (1, 2)]
"""Beyond the 128 tokens of a block, so that they go into the prefix cache."""


def sample(engine: Any, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[list[Rollout]]:
    return engine.generate(prompts, SamplingConfig(**{"max_new_tokens": 8, **options}), num_generations=1, seed=0)


def assert_greedy(engine: Any, model: Any, prompts: list[list[int]] = PROMPTS, count: int = 8) -> list[list[list[int]]]:
    groups = sample(engine, prompts, max_new_tokens=count, temperature=0.0)
    assert ids(groups) == [[greedily(model, prompt, count)] for prompt in prompts]
    return ids(groups)


@contextmanager
def started(sync: Any, **defaults: Any) -> Iterator[Any]:
    """A function that starts engines, binds a policy and syncs its weights; they are closed in the end."""
    engines: list[Any] = []

    def start(model: Any, **options: Any) -> Any:
        engines.append(new_engine("vllm", **{**defaults, **options}))
        engines[-1].bind(model)
        sync(engines[-1], model)
        return engines[-1]

    try:
        yield start
    finally:
        for engine in engines:
            engine.close()


def nudged(weight: torch.Tensor) -> torch.Tensor:
    """A copy whose last entry is the number next to it."""
    other = weight.clone()
    last = other.view(-1)[-1:]
    last.copy_(torch.nextafter(last, torch.tensor([9.0])))
    return other
