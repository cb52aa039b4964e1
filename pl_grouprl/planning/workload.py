"""Tokens and operations of a step, from the prompt lengths of the data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pl_grouprl.models import ModelCost
from pl_grouprl.packing import Sharing
from pl_grouprl.rollout import HFRolloutEngine

_SAMPLE = 256
"""Number of prompts, evenly spaced by length, over which operations are averaged."""


@dataclass(frozen=True)
class Workload:
    """A step: one batch of rollouts and its updates. All responses are assumed to have the same length.

    Attributes:
        prompt_lengths: Tokens of each prompt of the training data, in ascending order.
        batch_size: Prompts per rollout, over all devices.
        processes: Devices.
        num_generations: Rollouts per prompt. Leaves of the largest tree for branching rollouts, each counted in full.
        response: Tokens of a response.
        num_mini_batches: Updates per pass over the rollouts.
        num_iterations: Passes over the rollouts.
        max_tokens: Token budget of a micro-batch; None for no limit.
        max_sequences: Sequences decoded at once on a device; None for all, or as many as the free memory holds.
        shares: Whether the run encodes a prompt once per group.
        caches: Whether the trainer's process holds the KV caches of rollouts.
    """

    prompt_lengths: Sequence[int]
    batch_size: int
    processes: int
    num_generations: int
    response: int
    num_mini_batches: int = 1
    num_iterations: int = 1
    max_tokens: int | None = None
    max_sequences: int | None = None
    shares: bool = True
    caches: bool = True

    @classmethod
    def of(cls, module: Any, data: Any, processes: int) -> Workload:
        """Read the options of a module, and the prompt lengths of a data module that is set up."""
        lengths = sorted(prompt.num_tokens for prompt in data.prompts["train"])
        return cls(
            prompt_lengths=lengths,
            batch_size=data.batch_size,
            processes=processes,
            num_generations=module.max_rollouts,
            response=module.sampling.max_new_tokens,
            num_mini_batches=module.num_mini_batches,
            num_iterations=module.num_iterations,
            max_tokens=module.max_tokens_per_micro_batch,
            max_sequences=getattr(module.engine, "max_sequences", None),
            shares=module.sharing == "shared",
            caches=isinstance(module.engine, HFRolloutEngine),
        )

    @property
    def mean_prompt(self) -> float:
        """Mean tokens of a prompt."""
        return sum(self.prompt_lengths) / len(self.prompt_lengths)

    def tokens(self, sharing: Sharing) -> float:
        """Mean number of tokens that a forward pass over a batch of rollouts encodes, on all devices."""
        copies = self.num_generations if sharing == "repeated" else 1
        return self.batch_size * (copies * self.mean_prompt + self.num_generations * self.response)

    @property
    def token_ratio(self) -> float:
        """Tokens with repeated prompts over those with shared ones."""
        return self.tokens("repeated") / self.tokens("shared")

    def operations(self, cost: ModelCost, sharing: Sharing) -> float:
        """Operations of one forward pass over a batch of rollouts, on all devices."""
        step = max(1, len(self.prompt_lengths) // _SAMPLE)
        lengths = self.prompt_lengths[step // 2 :: step]
        groups = [(length, [self.response] * self.num_generations) for length in lengths]
        return sum(cost.of_groups(groups, sharing)) * self.batch_size / len(lengths)

    def operations_ratio(self, cost: ModelCost) -> float:
        """How many times fewer operations a forward pass takes with shared prompts."""
        return self.operations(cost, "repeated") / self.operations(cost, "shared")

    @property
    def _groups_per_update(self) -> int:
        return math.ceil(math.ceil(self.batch_size / self.num_mini_batches) / self.processes)

    @property
    def longest_micro_batch(self) -> int:
        """Most tokens in a micro-batch on one device: a mini-batch of the longest prompts, or the budget."""
        copies = 1 if self.shares else self.num_generations
        longest = self.prompt_lengths[-1] * copies + self.num_generations * self.response
        everything = self._groups_per_update * longest
        return everything if self.max_tokens is None else min(self.max_tokens, everything)

    @property
    def smallest_budget(self) -> int:
        """The smallest `max_tokens_per_micro_batch` that this data allows."""
        longest = self.prompt_lengths[-1]
        return max(longest, self.response) if self.shares else longest + self.response

    @property
    def sequences(self) -> int:
        """Number of sequences that a device decodes at once."""
        everything = math.ceil(self.batch_size / self.processes) * self.num_generations
        return everything if self.max_sequences is None else min(self.max_sequences, everything)

    @property
    def bounds_itself(self) -> bool:
        """Whether the engine samples fewer sequences at once where the free memory asks for it."""
        return self.caches and self.max_sequences is None

    @property
    def cached_tokens(self) -> int:
        """Most tokens in a device's KV caches: each prompt once, and all response tokens of each sequence."""
        if not self.caches:
            return 0
        prompts = math.ceil(self.sequences / self.num_generations)
        return prompts * self.prompt_lengths[-1] + self.sequences * self.response

    def with_response(self, response: int) -> Workload:
        """The same step with responses of another length."""
        return replace(self, response=response)
