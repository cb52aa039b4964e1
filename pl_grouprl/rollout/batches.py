"""Samples rollouts of many prompts in batches of limited size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pl_grouprl.media.inputs import media_key
from pl_grouprl.rollout.decode import DecodeBatch
from pl_grouprl.rollout.kept_caches import KeptCaches, KeptSequence
from pl_grouprl.rollout.limits import counts_padding
from pl_grouprl.rollout.prefill import NextTokenLogits, PrefixStore, PromptEncoder
from pl_grouprl.rollout.stopping import StopStrings
from pl_grouprl.types import Prompt, Rollout, SamplingConfig

_Sequence = tuple[int, int, int]
"""Index of its distinct prompt, index of its prompt, index of its rollout."""


class BatchedSampler:
    """Samples from a transformers decoder.

    Args:
        model: A transformers decoder with a language-model head, in evaluation mode.
        max_sequences: Most sequences decoded at once; None decodes all at once.
        max_prefill_tokens: Most prompt tokens in one forward pass, including padding.
    """

    def __init__(self, model: Any, max_sequences: int | None, max_prefill_tokens: int) -> None:
        self._model, self._max_sequences, self._max_prefill_tokens = model, max_sequences, max_prefill_tokens

    def sample(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        num_generations: int,
        seed: int,
        *,
        max_new_tokens: Sequence[int],
        end_ids: Sequence[int],
        stop: StopStrings,
        indices: Sequence[int] | None = None,
        kept: KeptCaches | None = None,
        **decoding: float,
    ) -> list[list[Rollout]]:
        """Sample completions of every prompt, without text.

        Args:
            prompts: The prompts; equal ones are encoded once.
            sampling: How to sample.
            num_generations: Rollouts per prompt.
            seed: Of the random streams.
            max_new_tokens: Most tokens of each prompt's rollouts.
            end_ids: Tokens that end a sequence.
            stop: Strings that end a sequence.
            indices: Index of each prompt that identifies its random streams; None for its index in `prompts`.
            kept: Caches that prompts continue if they can, and to which those of the rollouts are added.
            decoding: Further options of `DecodeBatch`.
        """
        distinct, continued, sequences = _arrange(prompts, num_generations, kept)
        logits = NextTokenLogits(self._model)
        longest = max((len(prompt.token_ids) for prompt in distinct), default=0) + max(max_new_tokens, default=0)
        padding = not counts_padding(self._model, longest)
        encoder = PromptEncoder(logits, distinct, self._max_prefill_tokens, kept=continued, padding=padding)
        del continued  # the encoder frees them
        store = PrefixStore(encoder)
        groups: list[list[Rollout]] = [[] for _ in prompts]
        for chunk, needed_later in self._chunks(distinct, sequences, padding):
            parts = store.select([key for key, _, _ in chunk], needed_later)
            names = [(prompt if indices is None else indices[prompt], number) for _, prompt, number in chunk]
            limits = [max_new_tokens[prompt] for _, prompt, _ in chunk]
            batch = DecodeBatch(
                parts,
                names,
                sampling,
                max_new_tokens=limits,
                end_ids=end_ids,
                stop=stop,
                seed=seed,
                keep=kept is not None,
                **decoding,
            )
            del parts  # the prompts' caches are copied by now
            for number, ((_, prompt, _), rollout) in enumerate(zip(chunk, batch.run(logits), strict=True)):
                groups[prompt].append(rollout)
                if kept is not None and not prompts[prompt].media:
                    kept.add([*prompts[prompt].token_ids, *rollout.token_ids[:-1]], batch.kept[number])
            del batch  # frees its cache before the next one
        return groups

    def _chunks(
        self, distinct: Sequence[Prompt], sequences: Sequence[_Sequence], padding: bool
    ) -> Iterator[tuple[Sequence[_Sequence], int]]:
        """Split the sequences into those decoded together, each with the first prompt that is needed later."""
        start, lengths = 0, [len(distinct[key].token_ids) for key, _, _ in sequences]
        while start < len(sequences):
            stop = min(start + (self._max_sequences or len(sequences)), len(sequences))
            if not padding:
                stop = next((place for place in range(start, stop) if lengths[place] != lengths[start]), stop)
            yield sequences[start:stop], sequences[stop][0] if stop < len(sequences) else len(distinct)
            start = stop


def _arrange(
    prompts: Sequence[Prompt], num_generations: int, kept: KeptCaches | None = None
) -> tuple[list[Prompt], list[KeptSequence | None], list[_Sequence]]:
    """List the distinct prompts, the sequences that they continue, and the sequences to decode, all in one order.

    Prompts that continue nothing come first. They are sorted by the number of tokens to run, then by length.
    """
    owners: dict[tuple[Any, ...], list[int]] = {}
    for index, prompt in enumerate(prompts):
        owners.setdefault((*prompt.token_ids, media_key(prompt.media)), []).append(index)
    together = list(owners.values())
    distinct = [prompts[indices[0]] for indices in together]
    continued = [None] * len(distinct) if kept is None else kept.claim(distinct)

    def place(number: int) -> tuple[bool, int, int]:
        sequence, length = continued[number], len(distinct[number].token_ids)
        return sequence is not None, length - (0 if sequence is None else sequence.num_tokens), length

    order = sorted(range(len(distinct)), key=place)
    sequences = [
        (key, index, generation)
        for key, number in enumerate(order)
        for index in together[number]
        for generation in range(num_generations)
    ]
    return [distinct[number] for number in order], [continued[number] for number in order], sequences
