"""An engine that answers by a script instead of a model, for episodes of which every turn is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pl_grouprl.types import Rollout, SamplingConfig

Script = Callable[[list[int], int, int], "str | Sequence[int]"]
"""Maps a prompt's tokens, the index of the episode and its turn from 0 to the answer, as text or as tokens."""


@dataclass(frozen=True)
class Request:
    """What one call of `generate` asked for; `prompt_indices` and `limits` have an entry per prompt."""

    prompts: list[list[int]]
    num_generations: int
    seed: int
    prompt_indices: list[int]
    limits: list[int]


class ScriptedEngine:
    """Answers every prompt by a script, within the limits.

    An answer in text is encoded, and the tokenizer's end token appended. One in tokens is taken as it is: it ends at
    its first end token, and without one its finish reason is `length`. An answer longer than its limit is cut.

    A prompt that begins with the last prompt and answer of the same index is that episode's next turn; any other one
    is the first turn of a new episode. The index of generation g of prompt p is `p * num_generations + g`.

    Args:
        script: Gives the answers.
        tokenizer: Used where `bind` gets none; needed for answers in text.
    """

    takes_prompt_indices = True
    takes_limits = True

    def __init__(self, script: Script, tokenizer: Any = None) -> None:
        self.script = script
        self.tokenizer = tokenizer
        self.requests: list[Request] = []
        self.turns: dict[int, list[tuple[list[int], list[int]]]] = {}
        """Prompt and answer of each turn of the latest episode of each index."""

    def bind(self, model: Any, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer or self.tokenizer

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *,
        num_generations: int,
        seed: int,
        prompt_indices: Sequence[int] | None = None,
        max_new_tokens: Sequence[int] | None = None,
    ) -> list[list[Rollout]]:
        limits = [sampling.max_new_tokens] * len(prompts) if max_new_tokens is None else list(max_new_tokens)
        indices = list(range(len(prompts)) if prompt_indices is None else prompt_indices)
        assert len(limits) == len(indices) == len(prompts)
        assert min(limits, default=1) >= 1
        request = Request([list(prompt) for prompt in prompts], num_generations, seed, indices, limits)
        self.requests.append(request)
        return [
            [self._answer(prompt, index * num_generations + g, limit, sampling) for g in range(num_generations)]
            for prompt, index, limit in zip(request.prompts, indices, limits, strict=True)
        ]

    def _answer(self, prompt: list[int], index: int, limit: int, sampling: SamplingConfig) -> Rollout:
        turns = self.turns.get(index, [])
        if not turns or prompt[: sum(map(len, turns[-1]))] != [*turns[-1][0], *turns[-1][1]]:
            turns = self.turns[index] = []
        token_ids, ended = self._until_end(self.script(prompt, index, len(turns)), sampling)
        stops = ended and len(token_ids) <= limit
        token_ids = token_ids[:limit]
        turns.append((prompt, token_ids))
        return Rollout(token_ids, [logprob(token) for token in token_ids], finish_reason="stop" if stops else "length")

    def _until_end(self, answer: str | Sequence[int], sampling: SamplingConfig) -> tuple[list[int], bool]:
        """Tokens of an answer up to its first end token, and whether it has one."""
        end = getattr(self.tokenizer, "eos_token_id", None)
        if isinstance(answer, str):
            answer = [*self.tokenizer.encode(answer, add_special_tokens=False), end]
        ends = [place for place, token in enumerate(answer) if token in {end, *sampling.stop_token_ids}]
        return list(answer[: ends[0] + 1] if ends else answer), bool(ends)


def logprob(token: int) -> float:
    """Log-probability that the engine reports of a token: one that tells tokens apart."""
    return -(1 + token % 97) / 100
