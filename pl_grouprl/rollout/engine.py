"""The interface of rollout engines: bind a policy once, then turn prompts into groups of rollouts."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from torch import Tensor

from pl_grouprl.media.inputs import check_prompt_media, placeholder_ids
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
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        for layer_type, kind in types.items() if isinstance(types, dict) else [(None, types)]:
            name = f"original_max_position_embeddings (its {kind} rotary frequencies change beyond it)"
            if isinstance(kind, str) and "dynamic" in kind:
                length = module.original_max_seq_len
            elif kind == "longrope":
                parameters = module.config.rope_parameters
                parameters = parameters if layer_type is None else parameters[layer_type]
                length = parameters["original_max_position_embeddings"]
            else:
                continue
            limits[name] = min(length, limits.get(name, length))
    return limits


def vocabulary(model: Any) -> int | None:
    """Size of the vocabulary for prompts; None if unknown."""
    size = getattr(model.config.get_text_config(decoder=True), "vocab_size", None)
    return None if size is None else max(size, *(token + 1 for token in (0, *placeholder_ids(model).values())))


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
    found = set(sampling.stop_token_ids)
    for source in (getattr(model, "generation_config", None) or getattr(model, "config", None), tokenizer):
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
            raise ValueError(f"SamplingConfig.stop is {tuple(stop)!r}, but the engine has no tokenizer; bind one.")
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


# The interface of rollout engines: bind a policy once, then turn prompts into groups of rollouts.
#
# An engine samples from the policy itself (`RolloutEngine`), or from its own copy of the weights, synced after updates
# (`SyncedRolloutEngine`).

LOGPROB_ROUNDING = 1e-2
"""How far above 0 a log-probability may be: a sampler may compute it in bfloat16."""


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples completions from the policy.

    An engine declares further capabilities as attributes. If an attribute is missing, so is the capability (see
    `declares`):

    - `reserves_max_new_tokens = True`: it rejects prompts without room for `max_new_tokens`; a run then rejects such
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
    - `varies_num_generations = True`: it may return more or fewer rollouts of a prompt than requested.
    - `router_replay = True`: every rollout has `routed_experts`, which the run replays.
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
                for text may omit the argument.
            prompt_indices: Index of each prompt in the batch of all ranks, which together with the seed determines its
                random numbers; None if the prompts are the whole batch. Passed only to engines that declare
                `takes_prompt_indices`, so that any number of ranks samples the same rollouts.
            max_new_tokens: Maximum length of each prompt's completions, at least 1; defaults to
                `sampling.max_new_tokens` for all prompts. Passed only to engines that declare `takes_limits`.

        Returns:
            For each prompt, in the caller's order, its rollouts. `token_ids` (with the end token, if there was one) and
            `finish_reason` are required. Without `logprobs`, sampler and trainer are not compared, and importance
            sampling raises an error; without `text`, the run decodes the tokens.
        """
        ...


@dataclass(frozen=True)
class AdapterWeights:
    """A LoRA adapter to send to an engine, in the form in which PEFT saves it.

    Attributes:
        config: Contents of its `adapter_config.json`.
        weights: Names, as in its `adapter_model.safetensors`, and whole values; read after the other weights.
    """

    config: Mapping[str, Any]
    weights: Iterable[tuple[str, Tensor]]


class SamplerLostError(RuntimeError):
    """The sampler was restarted and lost the policy's weights: send them and sample again."""


@runtime_checkable
class SyncedRolloutEngine(RolloutEngine, Protocol):
    """Samples from a copy of the policy's weights, synced after updates.

    `bind`, `update_weights` and `generate` are collective, even for a rank without prompts. Ranks exchange errors
    afterwards, so an engine whose ranks wait for each other inside a method must release all of them before raising.
    `bind` reads the policy's config; the weights may be shards.

    Attributes:
        adapter: `merged`: takes weights with adapters merged; `separate`: takes the base once, then only the adapter.
            `bind` may change it.
        version: Version of the weights that it has, as far as this process knows; None if none were sent.
    """

    adapter: Literal["merged", "separate"]
    version: int | None

    def update_weights(
        self, weights: Iterable[tuple[str, Tensor]], *, version: int, adapter: AdapterWeights | None = None
    ) -> dict[str, float]:
        """Load new weights into the sampler, and verify that it has them.

        Args:
            weights: Names, as in a Hugging Face checkpoint, and whole values. Read once, in order; the caller exhausts
                the rest. A tensor may change once the next one is requested.
            version: Larger than any before.
            adapter: The adapter for these weights if `self.adapter` is `separate`. The first time, `weights` are the
                base; later they are empty, and the sampler keeps its base.

        Returns:
            Metrics, including `bytes`; the caller measures `seconds`.

        Raises:
            SamplerLostError: If the sampler was restarted in the meantime.
            WeightsMismatchError: If the sampler did not load exactly the weights sent.
        """
        ...

    def close(self) -> None:
        """Release the sampler; the next call of `update_weights` starts it again.

        Idempotent. A rank may call it alone, after an exception.
        """
        ...


Capability = Literal[
    "reserves_max_new_tokens",
    "takes_prompt_indices",
    "samples_from_copies",
    "updates_in_flight",
    "takes_limits",
    "keeps_caches",
    "varies_num_generations",
    "truncates_logprobs",
    "router_replay",
]


def declares(engine: object, capability: Capability) -> bool:
    """Whether an engine declares a capability; see `RolloutEngine`."""
    return bool(getattr(engine, capability, False))


@dataclass(frozen=True)
class SampleRequest:
    """Rollouts to sample of one prompt.

    Attributes:
        token_ids: The prompt.
        count: Number of rollouts.
        index: Index of the prompt in the batch of all ranks, which with the seed determines its random numbers.
        max_new_tokens: Maximum tokens of each rollout.
        media: Images and videos of the prompt.
    """

    token_ids: list[int]
    count: int
    index: int
    max_new_tokens: int
    media: Media = field(default_factory=dict)

    def seeds(self, seed: int) -> list[int]:
        """A seed in [0, 2^63) for each rollout, from the seed of the call."""
        return [derive_seed(seed, self.index, number) for number in range(self.count)]


class PolicyEngine:
    """Base class of the engines of this package; a subclass implements `sample`.

    Attributes:
        model: The policy, a transformers decoder; its weights may be shards. None before `bind`.
        tokenizer: Its tokenizer, or None.
        max_model_len: Maximum length of prompt plus completion, besides the model's; None if there is none.
    """

    reserves_max_new_tokens = True
    takes_prompt_indices = True
    takes_limits = True

    model: Any = None
    tokenizer: Any = None
    max_model_len: int | None = None
    _decoding: AbstractContextManager[Any] = nullcontext()  # held while the tokenizer decodes

    def bind(self, model: Any, tokenizer: Any = None) -> None:
        """Set the policy to sample from; see `RolloutEngine.bind`."""
        self.model, self.tokenizer = model, tokenizer

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
        """Sample completions; see `RolloutEngine.generate`.

        Returns:
            For each prompt, in the caller's order, `num_generations` rollouts: tokens including the end token,
            log-probabilities, finish reason, and text if there is a tokenizer.

        Raises:
            ValueError: If no policy is bound, or the request cannot be served.
            FloatingPointError: If the model's logits are not finite.
        """
        if self.model is None:
            raise ValueError(f"{type(self).__name__} has no model; call bind(model, tokenizer).")
        limits = [sampling.max_new_tokens] * len(prompts) if max_new_tokens is None else max_new_tokens
        given = [{} for _ in prompts] if media is None else media
        indices = range(len(prompts)) if prompt_indices is None else prompt_indices
        requests = [
            SampleRequest([operator.index(token) for token in prompt], num_generations, int(index), limit, images)
            for prompt, index, limit, images in zip(prompts, indices, limits, given, strict=True)
        ]
        groups = self.sample(requests, sampling, seed)
        if self.tokenizer is not None:
            with self._decoding:
                for rollout in (rollout for group in groups for rollout in group):
                    rollout.text = self.tokenizer.decode(rollout.token_ids, skip_special_tokens=True)
        return groups

    def sample(self, requests: Sequence[SampleRequest], sampling: SamplingConfig, seed: int) -> list[list[Rollout]]:
        """Sample the rollouts of each request, without text.

        Args:
            requests: What to sample, not checked yet.
            sampling: How to sample; each request has its own `max_new_tokens`.
            seed: The same (weights, request, sampling, seed) give the same rollouts.
        """
        raise NotImplementedError

    def check(self, requests: Sequence[SampleRequest], sampling: SamplingConfig) -> StopStrings:
        """Check requests before doing any work; returns what finds the stop strings.

        Raises:
            ValueError: If a request cannot be served.
        """
        limits, vocab_size = length_limits(self.model), vocabulary(self.model)
        if self.max_model_len is not None:
            limits["max_model_len"] = self.max_model_len
        for number, request in enumerate(requests):
            length, tokens = len(request.token_ids), request.token_ids
            if request.max_new_tokens < 1:
                raise ValueError(f"max_new_tokens[{number}] is {request.max_new_tokens}; it must be at least 1.")
            if not tokens:
                raise ValueError(f"prompts[{number}] is empty; pass at least one token, such as BOS.")
            for name, limit in limits.items():
                if length + request.max_new_tokens > limit:
                    raise ValueError(
                        f"prompts[{number}] has {length} tokens, which with max_new_tokens={request.max_new_tokens} "
                        f"exceeds the model's {name}={limit}; shorten the prompt (max_prompt_length) or lower "
                        "max_new_tokens."
                    )
            if vocab_size is not None and (min(tokens) < 0 or max(tokens) >= vocab_size):
                raise ValueError(
                    f"prompts[{number}] has token ids from {min(tokens)} to {max(tokens)}, but the model has "
                    f"vocab_size={vocab_size}; use the tokenizer that belongs to the model."
                )
        check_prompt_media(
            self.model, [request.token_ids for request in requests], [request.media for request in requests]
        )
        return StopStrings(self.tokenizer, sampling.stop, self._decoding)

    def end_ids(self, sampling: SamplingConfig) -> list[int]:
        """Tokens that end a completion, restricted to the model's vocabulary."""
        size = vocabulary(self.model)
        ids = end_token_ids(self.model, self.tokenizer, sampling)
        return [token for token in ids if size is None or token < size]


def checked_rollouts(
    engine: RolloutEngine,
    requests: Sequence[SampleRequest],
    sampling: SamplingConfig,
    *,
    seed: int,
    vocab_size: int | None,
) -> list[list[Rollout]]:
    """Call `RolloutEngine.generate`, reject what it cannot have sampled, and convert its numbers to Python's.

    Args:
        engine: The engine, which errors name. Arguments that it does not take are omitted. Without `max_new_tokens`, it
            may exceed a request's limit, up to the largest.
        requests: What to sample, of one `count`.
        sampling: How to sample; each request has its own `max_new_tokens`.
        seed: Seed of the call.
        vocab_size: Size of the policy's vocabulary; None if unknown.

    Raises:
        TypeError: If something is not of its type, such as a token id that is not an integer.
        ValueError: If a value is impossible.
    """
    name, limits = type(engine).__name__, [request.max_new_tokens for request in requests]
    longest = max(limits, default=sampling.max_new_tokens)
    num_generations = max((request.count for request in requests), default=1)
    options: dict[str, Any] = {"num_generations": num_generations, "seed": seed}
    if any(request.media for request in requests):  # engines for text need not take it
        options["media"] = [dict(request.media) for request in requests]
    if declares(engine, "takes_prompt_indices"):
        options["prompt_indices"] = [request.index for request in requests]
    if declares(engine, "takes_limits"):
        options["max_new_tokens"] = list(limits)
    else:
        limits = [longest] * len(limits)
    prompts = [list(request.token_ids) for request in requests]
    rollouts = engine.generate(prompts, replace(sampling, max_new_tokens=longest), **options)
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
                _check_rollout(rollout, None if rollout.episode is not None else limit, vocab_size, newest)
            except (TypeError, ValueError) as error:
                raise type(error)(
                    f"{name}.generate returned an impossible rollout of prompt {index}: {error}"
                ) from None
    made = [rollout for group in rollouts for rollout in group]
    if len(set(map(id, made))) < len(made):
        raise ValueError(f"{name}.generate returned the same Rollout object twice, so rewards of one would be both's.")
    sampled = [rollout.num_sampled_tokens for rollout in made]
    if any(rollout.token_ids for rollout in made) and not any(sampled):
        raise ValueError(f"{name}.generate returned {len(made)} rollouts that all have zeros for loss_mask.")
    same = all(other.token_ids == group[0].token_ids for group in rollouts for other in group[1:])
    if num_generations > 1 and sampled and max(sampled) > 1 and same:
        warnings.warn(
            f"{name}.generate returned the same rollout {num_generations} times for every prompt of a batch, which "
            "trains nothing; is it certain of each token, or does it reuse a seed?",
            stacklevel=2,
        )
    return rollouts


def _check_rollout(rollout: Rollout, limit: int | None, vocab_size: int | None, newest: int | None) -> None:
    for name in ("token_ids", "logprobs", "loss_mask", "weight_versions"):
        values = getattr(rollout, name)
        if values is not None:
            to_plain: Any = float if name == "logprobs" else operator.index
            try:
                setattr(rollout, name, list(map(to_plain, values)))
            except TypeError as error:
                raise TypeError(f"{name}: {error}") from None
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
