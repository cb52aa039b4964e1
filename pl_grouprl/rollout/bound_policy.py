"""The policy that an engine is bound to."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from pl_grouprl.media.inputs import placeholder_ids
from pl_grouprl.rollout.engine import check_request
from pl_grouprl.rollout.limits import length_limits, vocabulary
from pl_grouprl.rollout.stopping import StopStrings, end_token_ids
from pl_grouprl.types import Rollout, SamplingConfig
from pl_grouprl.utilities.distributed import derive_seed


class BoundPolicy:
    """A policy and its tokenizer, with what engines need to know about them. Several threads may use it.

    Args:
        model: A transformers decoder; its weights may be shards.
        tokenizer: Its tokenizer, or None.

    Attributes:
        never: Tokens that are never sampled: placeholders of images and videos.
    """

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._decoding = threading.Lock()
        self.never = sorted(placeholder_ids(model).values())

    def check(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        num_generations: int,
        max_model_len: int | None = None,
        *,
        max_new_tokens: Sequence[int] | None = None,
    ) -> None:
        """Refuse a request that cannot be served; see `check_request`."""
        limits = length_limits(self.model)
        if max_model_len is not None:
            limits["max_model_len"] = max_model_len
        check_request(
            prompts,
            sampling,
            num_generations,
            limits=limits,
            vocab_size=vocabulary(self.model),
            max_new_tokens=max_new_tokens,
        )

    def end_ids(self, sampling: SamplingConfig) -> list[int]:
        """Tokens that end a completion, restricted to the model's vocabulary."""
        size = vocabulary(self.model)
        ids = end_token_ids(self.model, self.tokenizer, sampling)
        return [token for token in ids if size is None or token < size]

    def stop(self, sampling: SamplingConfig) -> StopStrings:
        """Strings that end a completion."""
        return StopStrings(self.tokenizer, sampling.stop, self._decoding)

    def decode(self, rollouts: Iterable[Rollout]) -> None:
        """Set the text of rollouts, if there is a tokenizer."""
        if self.tokenizer is not None:
            with self._decoding:
                for rollout in rollouts:
                    rollout.text = self.tokenizer.decode(rollout.token_ids, skip_special_tokens=True)


class HoldsPolicy:
    """An engine that keeps its policy as a `BoundPolicy`."""

    _policy: BoundPolicy | None = None

    @property
    def policy(self) -> BoundPolicy:
        """The bound policy.

        Raises:
            ValueError: If none is bound.
        """
        if self._policy is None:
            raise ValueError(f"{type(self).__name__} has no model; call bind(model, tokenizer).")
        return self._policy


def sequence_seeds(
    seed: int, num_prompts: int, num_generations: int, prompt_indices: Sequence[int] | None
) -> list[list[int]]:
    """Derive a seed for each sequence from the prompt's index and the rollout's number.

    Args:
        seed: Seed of the call.
        num_prompts: P.
        num_generations: G.
        prompt_indices: The prompts' indices in the batch of all ranks; None if they are the whole batch.

    Returns:
        P lists of G seeds in [0, 2^63).

    Raises:
        ValueError: If there is not one index per prompt.
    """
    if prompt_indices is not None and len(prompt_indices) != num_prompts:
        raise ValueError(
            f"prompt_indices has {len(prompt_indices)} entries for {num_prompts} prompts; pass one for each."
        )
    places = range(num_prompts) if prompt_indices is None else prompt_indices
    return [[derive_seed(seed, int(place), number) for number in range(num_generations)] for place in places]
