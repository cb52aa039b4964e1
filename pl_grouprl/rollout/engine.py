"""The interface of rollout engines: bind a policy once, then turn prompts into groups of rollouts."""

from __future__ import annotations

import math
import operator
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import compress
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from pl_grouprl.distributed.checksum import SyncedSampler
from pl_grouprl.media.inputs import placeholder_ids
from pl_grouprl.types import FinishReason, Media, Rollout, SamplingConfig
from pl_grouprl.utilities.distributed import derive_seed

# Limits on requests from a model: sequence length, vocabulary, and whether prompts may be padded.


def length_limits(model: Any) -> dict[str, int]:
    """Maximum lengths of prompt plus completion, by the name of what sets each limit.

    Besides the model's positions, this includes the length beyond which rotary frequencies depend on the longest
    sequence of a call (dynamic scaling, LongRoPE). Beyond it, cached keys were rotated at the frequencies of their
    step, which no forward over the whole sequence reproduces, and frequencies would depend on other sequences in the
    batch.

    Args:
        model: A transformers decoder.

    Returns:
        Name and tokens of each limit; empty if there is none.
    """
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    limits = {} if positions is None else {"max_position_embeddings": int(positions)}
    for name, length in _rotary_limits(model):
        limits[name] = min(length, limits.get(name, length))
    return limits


def vocabulary(model: Any) -> int | None:
    """Size of the vocabulary for prompts; None if unknown."""
    size = getattr(model.config.get_text_config(decoder=True), "vocab_size", None)
    return None if size is None else max(size, *(token + 1 for token in (0, *placeholder_ids(model).values())))


def _rotary_limits(model: Any) -> Iterator[tuple[str, int]]:
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        for layer_type, kind in types.items() if isinstance(types, dict) else [(None, types)]:
            name = f"original_max_position_embeddings (its {kind} rotary frequencies change beyond it)"
            if isinstance(kind, str) and "dynamic" in kind:
                yield name, module.original_max_seq_len
            elif kind == "longrope":
                parameters = module.config.rope_parameters
                parameters = parameters if layer_type is None else parameters[layer_type]
                yield name, parameters["original_max_position_embeddings"]


# End tokens and stop strings, which end a completion before its length limit.


def end_token_ids(model: Any, tokenizer: Any, sampling: SamplingConfig) -> list[int]:
    """Collect every token that ends a completion.

    Args:
        model: Its `generation_config` names the end tokens, or else its `config`.
        tokenizer: Its `eos_token_id` is added; may be None.
        sampling: Its `stop_token_ids` are added.

    Returns:
        The token ids, ascending and unique. If empty, all completions run to the limit.
    """
    sources = [
        getattr(model, "generation_config", None) or getattr(model, "config", None),
        tokenizer,
    ]
    found = set(sampling.stop_token_ids)
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return sorted(found)


class StopStrings:
    """Detects whether the newest token completes a stop string.

    Only the last `window` tokens are decoded, with special tokens, so an end-of-turn marker can be a stop string. A
    token is at least one byte, so a window of one token per byte of the longest string contains all of it; the margin
    allows for decoders that treat the first token of a text differently, and for characters cut in the middle.

    Args:
        tokenizer: Decodes tokens.
        stop: The strings.
        lock: Held while the tokenizer decodes, if several threads share it.

    Raises:
        ValueError: If there are strings and no tokenizer, or if a string is empty.
    """

    MARGIN = 4

    def __init__(self, tokenizer: Any, stop: Sequence[str], lock: AbstractContextManager[Any] | None = None) -> None:
        if stop and tokenizer is None:
            raise ValueError(
                f"SamplingConfig.stop is {tuple(stop)!r} but the engine has no tokenizer to decode completions with; "
                "bind one, or use stop_token_ids."
            )
        if "" in stop:
            raise ValueError("SamplingConfig.stop has an empty string, which every completion contains; remove it.")
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self._lock = nullcontext() if lock is None else lock
        self.window = max((len(string.encode()) for string in stop), default=-self.MARGIN) + self.MARGIN

    def __bool__(self) -> bool:
        return bool(self.stop)

    def found(self, tail_ids: Sequence[Sequence[int]]) -> list[bool]:
        """Whether each completion's last `window` tokens contain a stop string.

        Args:
            tail_ids: The last tokens of each completion, up to `window`, the newest last.
        """
        with self._lock:
            tails = [self.tokenizer.decode(list(ids), skip_special_tokens=False) for ids in tail_ids]
        return [any(string in tail for string in self.stop) for tail in tails]


# The policy that an engine is bound to.


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


# The interface of rollout engines: bind a policy once, then turn prompts into groups of rollouts.
#
# An engine samples from the policy itself (`RolloutEngine`), or from its own copy of the weights, synced after updates
# (`SyncedRolloutEngine`).

LOGPROB_ROUNDING = 1e-2
"""How far above 0 a log-probability may be: a sampler may compute it in bfloat16."""


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
    - `varies_num_generations = True`: it may return another number of rollouts of a prompt than asked for.
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
    "varies_num_generations",
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


def checked_rollouts(
    engine: RolloutEngine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    *,
    num_generations: int,
    vocab_size: int | None,
    **options: Any,
) -> list[list[Rollout]]:
    """Call `RolloutEngine.generate`, refuse what it cannot have sampled, and convert its numbers to Python's.

    Args:
        engine: The engine, which errors name.
        prompts: Tokens of each prompt.
        sampling: How to sample.
        num_generations: Rollouts per prompt.
        vocab_size: Size of the policy's vocabulary; None if unknown.
        **options: Further arguments of `generate`.

    Raises:
        TypeError: If something is not of its type, such as a token id that is not an integer.
        ValueError: If a value is impossible.
    """
    name, limits = type(engine).__name__, prompt_limits(prompts, sampling, options.get("max_new_tokens"))
    rollouts = engine.generate(prompts, sampling, num_generations=num_generations, **options)
    if not isinstance(rollouts, Sequence) or len(rollouts) != len(limits):
        raise ValueError(f"{name}.generate returned no list of {len(limits)} groups, one for each prompt.")
    newest = None if declares(engine, "updates_in_flight") else getattr(engine, "version", None) or 0
    for index, (group, limit) in enumerate(zip(rollouts, limits, strict=True)):
        if not isinstance(group, Sequence) or not all(isinstance(rollout, Rollout) for rollout in group):
            raise TypeError(f"{name}.generate returned something else than Rollouts for prompt {index}.")
        episodes = {id(rollout) if rollout.episode is None else rollout.episode for rollout in group}
        if len(episodes) != num_generations and not declares(engine, "varies_num_generations"):
            raise ValueError(
                f"{name}.generate returned {len(episodes)} different rollouts of prompt {index} in a list of "
                f"{len(group)}, where {num_generations} were asked for."
            )
        for rollout in group:
            try:
                _make_plain(rollout)
                _check_rollout(rollout, None if rollout.episode is not None else limit, vocab_size, newest)
            except (TypeError, ValueError) as error:
                raise type(error)(
                    f"{name}.generate returned an impossible rollout of prompt {index}: {error}"
                ) from None
    made = [rollout for group in rollouts for rollout in group]
    if len(set(map(id, made))) < len(made):
        raise ValueError(
            f"{name}.generate returned the same Rollout object twice; rewards of one would be the other's."
        )
    sampled = [rollout.num_sampled_tokens for rollout in made]
    if any(rollout.token_ids for rollout in made) and not any(sampled):
        raise ValueError(f"{name}.generate returned {len(made)} rollouts that all have zeros for loss_mask.")
    if num_generations > 1 and sampled and max(sampled) > 1 and all(_are_equal(group) for group in rollouts):
        warnings.warn(
            f"{name}.generate returned the same rollout {num_generations} times for every prompt of a batch, which "
            "trains nothing; is it certain of each token, or does it reuse a seed?",
            stacklevel=2,
        )
    return rollouts


def _make_plain(rollout: Rollout) -> None:
    whole: Any = operator.index
    for name, kind in (("token_ids", whole), ("logprobs", float), ("loss_mask", whole), ("weight_versions", whole)):
        values = getattr(rollout, name)
        if values is not None:
            try:
                setattr(rollout, name, list(map(kind, values)))
            except TypeError as error:
                raise TypeError(f"{name}: {error}") from None


def _check_rollout(rollout: Rollout, limit: int | None, vocab_size: int | None, newest: int | None) -> None:
    rollout.__post_init__()  # an engine may have changed it since it was made
    tokens, mask, logprobs = rollout.token_ids, rollout.loss_mask, rollout.logprobs
    if rollout.finish_reason not in (None, *get_args(FinishReason)):
        raise ValueError(f"finish_reason is {rollout.finish_reason!r}; it is 'stop', 'length' or None")
    if not isinstance(rollout.text, str | None):
        raise TypeError(f"text is a {type(rollout.text).__name__}; it is a str or None")
    if mask is not None and not set(mask) <= {0, 1}:
        raise ValueError(f"loss_mask has the values {sorted(set(mask))[:5]}; it is 1 where a token is trained, else 0")
    if logprobs is not None and mask is not None:
        logprobs = list(compress(logprobs, mask))
    if limit is not None and rollout.num_sampled_tokens > limit:
        raise ValueError(f"{rollout.num_sampled_tokens} sampled tokens, where max_new_tokens is {limit}")
    if tokens and (min(tokens) < 0 or (vocab_size is not None and max(tokens) >= vocab_size)):
        raise ValueError(f"token ids from {min(tokens)} to {max(tokens)}, where vocab_size is {vocab_size}")
    if logprobs and not (math.isfinite(sum(logprobs)) and max(logprobs) <= LOGPROB_ROUNDING):
        raise ValueError(f"logprobs from {min(logprobs)} to {max(logprobs)}; they are finite and at most 0")
    versions = rollout.weight_versions
    if versions and newest is not None and max(versions) > newest:
        raise ValueError(f"weight_versions up to {max(versions)}, where the newest weights it was given are {newest}")


def _are_equal(rollouts: Sequence[Rollout]) -> bool:
    first = rollouts[0]
    return all(other.token_ids == first.token_ids for other in rollouts[1:])
