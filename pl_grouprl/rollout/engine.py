"""What every rollout engine does: a policy is bound once, then prompts go in and groups of rollouts come out.

An engine samples from the policy itself (`RolloutEngine`), or from a copy of its weights that it is given after updates
(`SyncedRolloutEngine`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from pl_grouprl.types import Media, Rollout, SamplingConfig


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples completions from the policy.

    An engine that refuses prompts without room for `max_new_tokens` declares so with the class attribute
    `reserves_max_new_tokens = True`; a run then finds such prompts when it is set up.
    """

    def bind(self, model: Any, tokenizer: Any = None) -> None:
        """Name the policy to sample from. Called before the first `generate`; calling it again is harmless.

        Args:
            model: The policy. Later calls of `generate` see its weights as they are then.
            tokenizer: Decodes completions and knows the end token; None where only tokens are wanted.
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
            media: Images and videos of each prompt, empty where it has none; None where no prompt has any. An engine
                that cannot serve them raises a ValueError.
            prompt_indices: The place of each prompt in the whole batch of all ranks, which names its random numbers
                beside the seed; None where the prompts are the whole batch. Only given where there are several ranks,
                and only to engines that take it: it lets any number of ranks sample the same.

        Returns:
            For each prompt, in the caller's order, its rollouts with tokens, log-probabilities and finish reason.
        """
        ...


@dataclass(frozen=True)
class AdapterWeights:
    """A LoRA adapter on its way to a sampler, as PEFT would save it.

    Attributes:
        config: What its `adapter_config.json` would hold.
        weights: Name, as in its `adapter_model.safetensors`, and whole value of each; read like the other weights, and
            after them.
    """

    config: Mapping[str, Any]
    weights: Iterable[tuple[str, Tensor]]


@runtime_checkable
class SyncedRolloutEngine(RolloutEngine, Protocol):
    """Samples from a copy of the policy's weights, which it is given after updates.

    All ranks call `bind`, `update_weights` and `generate` together, a rank without prompts too. They tell each other
    afterwards what was raised, so an engine whose ranks wait for each other inside of a method lets them all go before
    it raises there. `bind` reads the policy's config; its weights may be shards.

    Attributes:
        adapter: How it is given a policy with an adapter: `merged` into the weights, or `separate`, the adapter alone
            once the base is there.
        version: Of the weights that the sampler has, as far as this process knows; None where it has none of ours.
    """

    adapter: Literal["merged", "separate"]
    version: int | None

    def update_weights(
        self, weights: Iterable[tuple[str, Tensor]], *, version: int, adapter: AdapterWeights | None = None
    ) -> dict[str, float]:
        """Give the sampler new weights, and see that it has them.

        Args:
            weights: Name, as in a checkpoint in Hugging Face format, and whole value of each. Read once, in order; what
                is left unread is gathered all the same, by the caller. A tensor may change once the next one is asked
                for.
            version: Larger than any before.
            adapter: The adapter on those weights, where `self.adapter` is `separate`. The first time `weights` are the
                base; later they are empty, and the base that the sampler has stays.

        Returns:
            Figures for the log, `bytes` among them. (`seconds`, of gathering too, are taken by the caller.)

        Raises:
            SamplerLostError: If the sampler was restarted meanwhile.
            WeightsMismatchError: If the weights that the sampler computes with are not those.
        """
        ...

    def close(self) -> None:
        """Let go of the sampler; the next call of `update_weights` starts it again.

        Calling it again is harmless. A rank may call it alone, after an exception.
        """
        ...


class SamplerLostError(RuntimeError):
    """The sampler was restarted, so it has none of the policy's weights: give it them and sample again."""


class WeightsMismatchError(RuntimeError):
    """The sampler has other weights than the policy; what it samples is not to be trained."""


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
        limits: Longest sequences that the model can serve, and what sets each limit.
        vocab_size: Number of tokens the model knows; None where that is not known.

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
