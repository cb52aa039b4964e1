"""The interface of rollout engines: bind a policy once, then turn prompts into groups of rollouts.

An engine samples from the policy itself (`RolloutEngine`), or from its own copy of the weights, synced after updates
(`SyncedRolloutEngine`).
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

    An engine declares further capabilities as attributes; a missing one means that it lacks the capability (see
    `declares`):

    - `reserves_max_new_tokens = True`: it refuses prompts without room for `max_new_tokens`; a run then refuses such
      prompts at setup.
    - `takes_prompt_indices = True`: `generate` takes `prompt_indices`.
    - `samples_from_copies = True`: a shallow copy of the engine, bound to a copy of the policy, may sample in another
      thread while the policy is updated (`max_staleness`).
    - `updates_in_flight = True`: `update_weights` may be called while other threads are in `generate`; their sequences
      go on with the new weights or start again, and `Rollout.weight_versions` says which token has which. `generate`
      is then called by many threads, with one prompt each, is not collective, and raises if `close` is called.
    - `takes_limits = True`: `generate` takes `max_new_tokens`, a limit for each prompt.
    - `keeps_caches = True`: it has a method `keep_caches()`, a context manager. In it, a prompt that continues a
      rollout of the previous call is encoded from where that rollout ended (the turns of an episode), or from the last
      whole block of the cache before that.
    - `truncates_logprobs = True`: with top-k, top-p or min-p, `Rollout.logprobs` are those of the truncated
      distribution. They are then neither compared with the policy's nor corrected for.
    - `max_model_len`, an int: maximum length of prompt plus completion.
    - `autocast_dtype`, set by the run: on a GPU, dtype that the Trainer's precision computes in under autocast
      (`bf16-mixed`: bfloat16); None otherwise. `generate` is not called under autocast.
    """

    def bind(self, model: Any, tokenizer: Any = None) -> None:
        """Set the policy to sample from. Called before the first `generate`; may be called again.

        Args:
            model: The policy. `generate` uses its weights at the time of the call.
            tokenizer: Decodes completions and has the end token; None if only tokens are needed.
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
        max_new_tokens: Sequence[int] | None = None,
    ) -> list[list[Rollout]]:
        """Sample `num_generations` completions of every prompt.

        Args:
            prompts: Tokens of each prompt, at least one token each; lengths may differ.
            sampling: How to sample.
            num_generations: Rollouts per prompt, at least 1.
            seed: The same (weights, prompts, sampling, seed) give the same rollouts.
            media: Images and videos of each prompt, empty if it has none; passed only if a prompt has any, so an engine
                for text may leave the argument out.
            prompt_indices: Index of each prompt in the batch of all ranks, which together with the seed determines its
                random numbers; None if the prompts are the whole batch. Passed only with several ranks, to engines
                that declare `takes_prompt_indices`, so that any number of ranks samples the same rollouts, and for the
                later turns of episodes.
            max_new_tokens: Longest completion of each prompt, at least 1, in place of `sampling.max_new_tokens`; None
                uses that for all. Passed only to engines that declare `takes_limits`.

        Returns:
            For each prompt, in the caller's order, its rollouts. `token_ids` (with the end token, if there was one) and
            `finish_reason` are required. Without `logprobs`, sampler and trainer are not compared, and
            importance sampling is refused; without `text`, the run decodes the tokens.
        """
        ...


@runtime_checkable
class SyncedRolloutEngine(RolloutEngine, SyncedSampler, Protocol):
    """Samples from a copy of the policy's weights, synced after updates.

    `bind`, `update_weights` and `generate` are collective, even for a rank without prompts; see `SyncedSampler`.
    """


Capability = Literal[
    "reserves_max_new_tokens",
    "takes_prompt_indices",
    "samples_from_copies",
    "updates_in_flight",
    "takes_limits",
    "keeps_caches",
    "truncates_logprobs",
]


def declares(engine: object, capability: Capability) -> bool:
    """Whether an engine declares a capability; see `RolloutEngine`."""
    return bool(getattr(engine, capability, False))


def check_request(
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    num_generations: int,
    *,
    limits: Mapping[str, int],
    vocab_size: int | None,
    max_new_tokens: Sequence[int] | None = None,
) -> None:
    """Refuse an invalid request before doing any work.

    Args:
        prompts: Tokens of each prompt.
        sampling: How to sample; `max_new_tokens` is read, unless each prompt has its own.
        num_generations: Rollouts per prompt.
        limits: Maximum sequence lengths of the model, by the name of what sets each.
        vocab_size: Size of the model's vocabulary; None if unknown.
        max_new_tokens: Longest completion of each prompt; see `RolloutEngine.generate`.

    Raises:
        ValueError: If the request is invalid.
    """
    if num_generations < 1:
        raise ValueError(f"num_generations is {num_generations}; it must be at least 1.")
    longest = prompt_limits(prompts, sampling, max_new_tokens)
    for index, (prompt, new_tokens) in enumerate(zip(prompts, longest, strict=True)):
        if len(prompt) == 0:
            raise ValueError(
                f"prompts[{index}] is empty; the first token is predicted from the last token of the prompt, so pass "
                "at least one (a beginning-of-sequence token will do)."
            )
        for name, limit in limits.items():
            if len(prompt) + new_tokens > limit:
                raise ValueError(
                    f"prompts[{index}] has {len(prompt)} tokens, which with max_new_tokens={new_tokens} "
                    f"exceeds the model's {name}={limit}; shorten the prompt (max_prompt_length) or lower "
                    "max_new_tokens."
                )
        if vocab_size is not None and (min(prompt) < 0 or max(prompt) >= vocab_size):
            raise ValueError(
                f"prompts[{index}] has token ids from {min(prompt)} to {max(prompt)}, but the model has vocab_size="
                f"{vocab_size}; use the tokenizer that belongs to the model."
            )


def prompt_limits(
    prompts: Sequence[Sequence[int]], sampling: SamplingConfig, max_new_tokens: Sequence[int] | None
) -> list[int]:
    """Longest completion of each prompt.

    Args:
        prompts: Tokens of each prompt.
        sampling: Its `max_new_tokens` holds for all prompts where `max_new_tokens` is None.
        max_new_tokens: See `RolloutEngine.generate`.

    Raises:
        ValueError: If there is not one limit per prompt, or one is below 1.
    """
    if max_new_tokens is None:
        return [sampling.max_new_tokens] * len(prompts)
    if len(max_new_tokens) != len(prompts):
        raise ValueError(
            f"max_new_tokens has {len(max_new_tokens)} entries for {len(prompts)} prompts; pass one for each."
        )
    for index, limit in enumerate(max_new_tokens):
        if limit < 1:
            raise ValueError(f"max_new_tokens[{index}] is {limit}; it must be at least 1.")
    return list(max_new_tokens)
