"""Rollouts that share a beginning, with its branch point, from an engine that knows nothing of branches."""

from collections.abc import Callable
from typing import Any

from pl_grouprl.types import Rollout, SamplingConfig


class BranchingEngine:
    """Puts the same tokens before some rollouts of each prompt; the others continue the prompt alone.

    Args:
        engine: Samples what follows.
        split: How many rollouts of a prompt share a beginning.
        tells: Whether rollouts say where they branch.
    """

    varies_num_generations = True

    def __init__(self, engine: Any, split: Callable[[list[int]], int] = lambda prompt: 2, tells: bool = True) -> None:
        self.engine, self.split, self.tells = engine, split, tells

    def bind(self, model: Any, tokenizer: Any = None) -> None:
        """Bind the engine."""
        self.engine.bind(model, tokenizer)

    def generate(
        self, prompts: list[list[int]], sampling: SamplingConfig, *, num_generations: int, seed: int
    ) -> list[list[Rollout]]:
        """Sample, and put the common tokens first."""
        groups = self.engine.generate(prompts, sampling, num_generations=num_generations, seed=seed)
        for prompt, rollouts in zip(prompts, groups, strict=True):
            for number, rollout in enumerate(rollouts):
                shares = number < self.split(prompt)
                if shares:
                    rollout.token_ids = [5, 14, *rollout.token_ids]
                    rollout.logprobs = None if rollout.logprobs is None else [-3.0] * len(rollout.token_ids)
                if self.tells:
                    rollout.branch_points = (2,) if shares else ()
                    rollout.branch_path = (0, number) if shares else (number,)
        return groups
