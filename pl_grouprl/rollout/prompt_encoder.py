"""Encodes the distinct prompts of a call, each once, and frees them after their last rollout has begun."""

from __future__ import annotations

from collections.abc import Sequence

from pl_grouprl.rollout.continued_prefill import continue_sequences, plan_continuing
from pl_grouprl.rollout.kept_caches import KeptSequence
from pl_grouprl.rollout.kv_cache import has_states
from pl_grouprl.rollout.prefill import MAX_PADDING, NextTokenLogits, Prefix, new_cache, plan_prefill, prefill
from pl_grouprl.types import Prompt


class PromptEncoder:
    """Encodes the prompts of a call: from the start, or from where a kept sequence ends.

    Args:
        logits: The model.
        prompts: Distinct prompts: first those that continue nothing, sorted by length, then the others, sorted by the
            number of tokens to run, then by length.
        max_tokens: Most tokens of a forward pass.
        kept: The sequence that each prompt continues, None for those that are encoded from the start.
        padding: Whether prompts of different lengths may share a forward pass.

    Attributes:
        batches: Consecutive indices of the prompts that are encoded together.
    """

    def __init__(
        self,
        logits: NextTokenLogits,
        prompts: Sequence[Prompt],
        max_tokens: int,
        *,
        kept: Sequence[KeptSequence | None] = (),
        padding: bool = True,
    ) -> None:
        self._logits, self._prompts = logits, prompts
        continued = [sequence for sequence in kept if sequence is not None]
        self._kept, self._fresh = dict(enumerate(continued)), len(prompts) - len(continued)
        max_padding = MAX_PADDING if padding and not has_states(new_cache(logits.model)) else 0.0
        lengths = [len(prompt.token_ids) for prompt in prompts[self._fresh :]]
        continuing = plan_continuing(lengths, continued, max_tokens, padding=padding)
        self.batches = [
            *plan_prefill(prompts[: self._fresh], max_tokens, max_padding=max_padding),
            *(range(batch.start + self._fresh, batch.stop + self._fresh) for batch in continuing),
        ]

    def encode(self, batch: range) -> Prefix:
        """Encode one of the batches; each only once, as it frees the sequences that it continues."""
        prompts = self._prompts[batch.start : batch.stop]
        if batch.start < self._fresh:
            return prefill(self._logits, prompts)
        kept = [self._kept.pop(index - self._fresh) for index in batch]
        return continue_sequences(self._logits, prompts, kept)


class PrefixStore:
    """Encodes prompts on first use and frees them after their last.

    Args:
        encoder: Encodes them.
    """

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder = encoder
        self._ready: dict[int, Prefix] = {}

    def select(self, wanted: Sequence[int], needed_later: int) -> list[tuple[Prefix, list[int]]]:
        """Fetch prompts for a decode batch.

        Args:
            wanted: Prompt index of each sequence, ascending, with repetition.
            needed_later: The first prompt that later calls will need.

        Returns:
            Batches of encoded prompts, each with the row of every sequence in it; together in the order of `wanted`.
        """
        parts = []
        for number, batch in enumerate(self._encoder.batches):
            rows = [index - batch.start for index in wanted if index in batch]
            if rows:
                if number not in self._ready:
                    self._ready[number] = self._encoder.encode(batch)
                parts.append((self._ready[number], rows))
            if batch.stop <= needed_later:
                self._ready.pop(number, None)
        return parts
