"""Samples rollouts of many prompts in batches of limited size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pl_grouprl.media.inputs import media_key
from pl_grouprl.rollout.decode import DecodeBatch
from pl_grouprl.rollout.kept_caches import KeptCaches, KeptSequence
from pl_grouprl.rollout.limits import allows_padding
from pl_grouprl.rollout.prefill import NextTokenLogits
from pl_grouprl.rollout.prompt_encoder import PrefixStore, PromptEncoder
from pl_grouprl.rollout.stopping import StopStrings
from pl_grouprl.types import Prompt, Rollout, SamplingConfig


class _Sequence(NamedTuple):
    """A sequence to decode: indices of its distinct prompt, of its prompt, and of its rollout."""

    distinct: int
    prompt: int
    rollout: int


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
            seed: Seed of the random streams.
            max_new_tokens: Most tokens of each prompt's rollouts.
            end_ids: Tokens that end a sequence.
            stop: Strings that end a sequence.
            indices: Index of each prompt, for its random streams; None for its index in `prompts`.
            kept: Caches for the prompts to continue; replaced by those of the rollouts.
            decoding: Further options of `DecodeBatch`.
        """
        distinct, continued, sequences = _arrange(prompts, num_generations, kept)
        logits = NextTokenLogits(self._model)
        longest = max((len(prompt.token_ids) for prompt in distinct), default=0) + max(max_new_tokens, default=0)
        padding = allows_padding(self._model, longest)
        encoder = PromptEncoder(logits, distinct, self._max_prefill_tokens, kept=continued, padding=padding)
        del continued  # so that the encoder can free them
        store = PrefixStore(encoder)
        groups: list[list[Rollout]] = [[] for _ in prompts]
        for chunk, needed_later in self._chunks(distinct, sequences, padding):
            parts = store.select([sequence.distinct for sequence in chunk], needed_later)
            streams = [(seq.prompt if indices is None else indices[seq.prompt], seq.rollout) for seq in chunk]
            batch = DecodeBatch(
                parts,
                streams,
                sampling,
                max_new_tokens=[max_new_tokens[sequence.prompt] for sequence in chunk],
                end_ids=end_ids,
                stop=stop,
                seed=seed,
                keep=kept is not None,
                **decoding,
            )
            del parts  # the prompts' caches are copied by now
            for number, (sequence, rollout) in enumerate(zip(chunk, batch.run(logits), strict=True)):
                groups[sequence.prompt].append(rollout)
                prompt = prompts[sequence.prompt]
                if kept is not None and not prompt.media:
                    kept.add([*prompt.token_ids, *rollout.token_ids[:-1]], batch.kept[number])
            del batch  # frees its cache before the next one
        return groups

    def _chunks(
        self, distinct: Sequence[Prompt], sequences: Sequence[_Sequence], padding: bool
    ) -> Iterator[tuple[Sequence[_Sequence], int]]:
        """Split the sequences into batches; yields each with the first distinct prompt that later batches need."""
        start, lengths = 0, [len(distinct[sequence.distinct].token_ids) for sequence in sequences]
        while start < len(sequences):
            stop = min(start + (self._max_sequences or len(sequences)), len(sequences))
            if not padding:
                stop = next((index for index in range(start, stop) if lengths[index] != lengths[start]), stop)
            yield sequences[start:stop], sequences[stop].distinct if stop < len(sequences) else len(distinct)
            start = stop


def _arrange(
    prompts: Sequence[Prompt], num_generations: int, kept: KeptCaches | None = None
) -> tuple[list[Prompt], list[KeptSequence | None], list[_Sequence]]:
    """List the distinct prompts, the kept sequences that they continue, and the sequences to decode, in matching order.

    Prompts that continue nothing come first. They are sorted by the number of tokens to run, then by length.
    """
    owners: dict[tuple[Any, ...], list[int]] = {}
    for index, prompt in enumerate(prompts):
        owners.setdefault((*prompt.token_ids, media_key(prompt.media)), []).append(index)
    equal = list(owners.values())
    distinct = [prompts[indices[0]] for indices in equal]
    continued = [None] * len(distinct) if kept is None else kept.claim(distinct)

    def sort_key(number: int) -> tuple[bool, int, int]:
        sequence, length = continued[number], len(distinct[number].token_ids)
        return sequence is not None, length - (0 if sequence is None else sequence.num_tokens), length

    order = sorted(range(len(distinct)), key=sort_key)
    sequences = [
        _Sequence(place, index, generation)
        for place, number in enumerate(order)
        for index in equal[number]
        for generation in range(num_generations)
    ]
    return [distinct[number] for number in order], [continued[number] for number in order], sequences
