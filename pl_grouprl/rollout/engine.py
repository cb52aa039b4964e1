"""The interface of rollout engines: bind a policy once, then turn prompts into groups of rollouts.

An engine samples from the policy itself (`RolloutEngine`), or from its own copy of the weights, which it receives after
updates (`SyncedRolloutEngine`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from pl_grouprl.sync.sampler import SyncedSampler
from pl_grouprl.types import Media, Rollout, SamplingConfig
from pl_grouprl.utilities.moved import moved

_MOVED = ("AdapterWeights", "SamplerLostError", "WeightsMismatchError")

__getattr__ = moved(__name__, {name: f"pl_grouprl.sync.sampler.{name}" for name in _MOVED})


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples completions from the policy.

    An engine declares what else it can do with attributes; a missing one means that it cannot (see `declares`):

    - `reserves_max_new_tokens = True`: it refuses prompts without room for `max_new_tokens`; a run then finds such
      prompts when it is set up.
    - `takes_prompt_indices = True`: `generate` takes `prompt_indices`.
    - `samples_from_copies = True`: a shallow copy of the engine, bound to a copy of the policy, may sample in another
      thread while the policy is updated (`rollout_ahead`).
    - `max_model_len`, an int: the longest sequence, prompt and completion together, that it is configured to serve.
    """

    def bind(self, model: Any, tokenizer: Any = None) -> None:
        """Name the policy to sample from. Called before the first `generate`; calling it again is harmless.

        Args:
            model: The policy. Later calls of `generate` see its weights as they are then.
            tokenizer: Decodes completions and knows the end token; None if only tokens are wanted.
        """
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *,
        num_generations: int,
        seed: int,
        media: Sequence[Media] | None = None,
        prompt_indices: Sequence[int] | None = None,
    ) -> list[list[Rollout]]:
        """Sample `num_generations` completions of every prompt.

        Args:
            prompts: Tokens of each prompt, at least one token each; lengths may differ.
            sampling: How to sample.
            num_generations: Rollouts per prompt, at least 1.
            seed: The same (weights, prompts, sampling, seed) give the same rollouts.
            media: Images and videos of each prompt, empty if it has none; None if no prompt has any. An engine that
                cannot serve them raises a ValueError.
            prompt_indices: The place of each prompt in the whole batch of all ranks, which names its random numbers
                together with the seed; None if the prompts are the whole batch. Passed only if there are several ranks
                and the engine declares `takes_prompt_indices`: it lets any number of ranks sample the same.

        Returns:
            For each prompt, in the caller's order, its rollouts with tokens, log-probabilities and finish reason.
        """
        ...


@runtime_checkable
class SyncedRolloutEngine(RolloutEngine, SyncedSampler, Protocol):
    """Samples from a copy of the policy's weights, which it receives after updates.

    All ranks call `bind`, `update_weights` and `generate` together, also a rank without prompts; see `SyncedSampler`.
    """


Capability = Literal["reserves_max_new_tokens", "takes_prompt_indices", "samples_from_copies"]


def declares(engine: object, capability: Capability) -> bool:
    """Whether an engine says that it can do something; see `RolloutEngine`."""
    return bool(getattr(engine, capability, False))


def check_request(
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    num_generations: int,
    *,
    limits: Mapping[str, int],
    vocab_size: int | None,
) -> None:
    """Refuse a request that no model could serve, before any work is done.

    Args:
        prompts: Tokens of each prompt.
        sampling: How to sample; `max_new_tokens` is read.
        num_generations: Rollouts per prompt.
        limits: Longest sequences that the model can serve, by the name of what sets each limit.
        vocab_size: Number of tokens that the model knows; None if unknown.

    Raises:
        ValueError: If a prompt is empty, too long, or holds an unknown token, or if `num_generations` is below 1.
    """
    if num_generations < 1:
        raise ValueError(f"num_generations is {num_generations}; it must be at least 1.")
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(
                f"prompts[{index}] is empty; the first token is predicted from the last token of the prompt, so pass "
                "at least one (a beginning-of-sequence token will do)."
            )
        for name, limit in limits.items():
            if len(prompt) + sampling.max_new_tokens > limit:
                raise ValueError(
                    f"prompts[{index}] has {len(prompt)} tokens, which with max_new_tokens={sampling.max_new_tokens} "
                    f"exceeds the model's {name}={limit}; shorten the prompt (max_prompt_length) or lower "
                    "max_new_tokens."
                )
        if vocab_size is not None and (min(prompt) < 0 or max(prompt) >= vocab_size):
            raise ValueError(
                f"prompts[{index}] holds token ids from {min(prompt)} to {max(prompt)}, but the model has vocab_size="
                f"{vocab_size}; use the tokenizer that belongs to the model."
            )
