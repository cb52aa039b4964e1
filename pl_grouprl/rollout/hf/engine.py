"""Rollouts with a transformers decoder, in the trainer's process and on its weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from pl_grouprl.attention.support import counts_tokens_itself, find_decoder, takes_positions
from pl_grouprl.checks.sampling import LONGEST, LONGEST_CONTINUED, check_decoding, continues_exactly
from pl_grouprl.media.inputs import media_key, placeholder_ids
from pl_grouprl.models.router_replay import RouterReplay
from pl_grouprl.rollout.engine import PolicyEngine, SampleRequest, StopStrings, length_limits
from pl_grouprl.rollout.hf.attention import sharing_prompts
from pl_grouprl.rollout.hf.copied_batch import CopiedBatch
from pl_grouprl.rollout.hf.decode import DecodeRow
from pl_grouprl.rollout.hf.kept import KeptCaches
from pl_grouprl.rollout.hf.packed_linear import original_weights, packed_linears
from pl_grouprl.rollout.hf.prefill import NextTokenLogits, PromptEncoder, allows_padding, cache_argument
from pl_grouprl.rollout.hf.static_batch import StaticBatch, shares_prompts
from pl_grouprl.types import Prompt, Rollout, SamplingConfig
from pl_grouprl.utilities.device_defaults import free_memory, sequence_bytes, sequences_at_once
from pl_grouprl.utilities.modes import computing_in, evaluating, is_out_of_memory, naming_memory, uncompiled
from pl_grouprl.utilities.options import check_options


def sample_in_batches(
    model: Any,
    requests: Sequence[SampleRequest],
    sampling: SamplingConfig,
    seed: int,
    *,
    end_ids: Sequence[int],
    stop: StopStrings,
    max_sequences: int | None,
    max_prefill_tokens: int,
    kept: KeptCaches | None = None,
    min_saved_tokens: float | None = None,
    routers: RouterReplay | None = None,
) -> list[list[Rollout]]:
    """Sample the rollouts of every request in batches of limited size, without text.

    Args:
        model: A transformers decoder with a language-model head, in evaluation mode.
        requests: The requests; equal prompts are encoded once.
        sampling: How to sample; its `max_new_tokens` is not read.
        seed: Seed of the random streams.
        end_ids: Tokens that end a sequence.
        stop: Strings that end a sequence.
        max_sequences: See `HFRolloutEngine`; None decodes all at once.
        max_prefill_tokens: See `HFRolloutEngine`.
        kept: Caches for the prompts to continue; replaced by those of the rollouts.
        min_saved_tokens: See `static_batch.shares_prompts`.
        routers: Records the experts of all tokens; None if they are not recorded.
    """
    equal: dict[tuple[Any, ...], list[int]] = {}
    for number, request in enumerate(requests):
        equal.setdefault((*request.token_ids, media_key(request.media)), []).append(number)
    owners = list(equal.values())
    distinct = [requests[numbers[0]] for numbers in owners]
    continued = [None] * len(distinct) if kept is None else kept.claim(distinct)

    # Prompts that continue nothing come first; prompts are sorted by the number of tokens to run, then by length.
    lengths = [len(request.token_ids) for request in distinct]
    keys = [
        (cached is not None, length - (0 if cached is None else cached.num_tokens), length)
        for length, cached in zip(lengths, continued, strict=True)
    ]
    order = sorted(range(len(distinct)), key=keys.__getitem__)
    distinct, continued = [distinct[place] for place in order], [continued[place] for place in order]
    sequences = [
        (place, number, generation)
        for place, owner in enumerate(order)
        for number in owners[owner]
        for generation in range(requests[number].count)
    ]
    logits = NextTokenLogits(model, routers)
    lengths = [len(distinct[place].token_ids) for place, *_ in sequences]
    longest = max(lengths, default=0) + max((request.max_new_tokens for request in requests), default=0)
    padding = allows_padding(model, longest)
    encoder = PromptEncoder(logits, distinct, max_prefill_tokens, kept=continued, padding=padding)
    del continued  # so that the encoder can free them
    groups: list[list[Rollout]] = [[] for _ in requests]
    end = 0
    while end < len(sequences):
        start, end = end, min(end + (max_sequences or len(sequences)), len(sequences))
        if not padding:
            end = next((place for place in range(start, end) if lengths[place] != lengths[start]), end)
        chunk = sequences[start:end]
        needed_later = sequences[end][0] if end < len(sequences) else len(distinct)
        parts = encoder.select([place for place, *_ in chunk], needed_later)
        places = [(prefix, row) for prefix, rows in parts for row in rows]
        rows = [
            DecodeRow(
                *place,
                (requests[number].index, generation),
                requests[number].max_new_tokens,
                requests[number].token_ids,
            )
            for place, (_, number, generation) in zip(places, chunk, strict=True)
        ]
        kind = StaticBatch if shares_prompts(rows, min_saved_tokens) else CopiedBatch
        batch = kind(rows, sampling, end_ids=end_ids, stop=stop, seed=seed, keep=kept is not None)
        del parts, places, rows  # the prompts' caches are copied by now
        for place, ((_, number, _), rollout) in enumerate(zip(chunk, batch.run(logits), strict=True)):
            groups[number].append(rollout)
            if kept is not None and not requests[number].media:
                experts = None if rollout.routed_experts is None else rollout.routed_experts[:-1]
                cached = replace(batch.kept[place], routed_experts=experts)
                kept.add([*requests[number].token_ids, *rollout.token_ids[:-1]], cached)
        del batch  # frees its cache before the next one
    return groups


# Samples a few tokens from a model to check that decoding with its cache is exact.

COPIED, SHARED = math.inf, 0.0
"""Values of `min_saved_tokens`: never share prompts, and always share them if the model can."""


def probe_decoding(model: Any, kept: KeptCaches | None, **limits: Any) -> KeptCaches | None:
    """Check a model's decoding, once per model, with copied and with shared prompts.

    Args:
        model: A transformers decoder, in evaluation mode.
        kept: The caches that its next rollouts would continue.
        **limits: `max_sequences` and `max_prefill_tokens`.

    Returns:
        `kept`, or None if the model cannot continue caches, or cannot take the `LONGEST_CONTINUED` tokens of the check.

    Raises:
        ValueError: If decoding differs from scoring.
    """

    def sample(
        prompts: list[Prompt], sampling: SamplingConfig, count: int, min_saved: float, kept: KeptCaches | None = None
    ) -> list[list[Rollout]]:
        requests = [
            SampleRequest(prompt.token_ids, count, index, sampling.max_new_tokens)
            for index, prompt in enumerate(prompts)
        ]
        options: dict[str, Any] = {**limits, "end_ids": [], "stop": StopStrings(None, ())}
        return sample_in_batches(model, requests, sampling, 0, kept=kept, min_saved_tokens=min_saved, **options)

    def sample_both(prompts: list[Prompt], sampling: SamplingConfig) -> list[list[Rollout]]:
        copied, shared = (sample(prompts, sampling, 1, min_saved) for min_saved in (COPIED, SHARED))
        return [one + other for one, other in zip(copied, shared, strict=True)]

    def sample_turns(
        prompts: list[Prompt], results: list[list[int]], sampling: SamplingConfig
    ) -> list[tuple[list[int], Rollout]]:
        turns = []
        for min_saved in (COPIED, SHARED):
            own = KeptCaches()
            groups = sample(prompts, sampling, 2, min_saved, own)
            continued = [
                Prompt([*prompt.token_ids, *rollout.token_ids, *result])
                for prompt, group, result in zip(prompts, groups, results, strict=True)
                for rollout in group
            ]
            again = sample(continued, sampling, 1, min_saved, own)
            turns += [(prompt.token_ids, rollout) for prompt, (rollout,) in zip(continued, again, strict=True)]
        return turns

    limit = min(length_limits(model).values(), default=None)
    options: dict[str, Any] = {
        "placeholders": placeholder_ids(model).values(),
        "scoring": partial(original_weights, model),
    }
    if limit is None or limit >= LONGEST:
        check_decoding(model, sample_both, limit=limit, **options)
    if kept is None or (limit is not None and limit < LONGEST_CONTINUED):
        return None
    return kept if continues_exactly(model, sample_turns, **options) else None


# Rollouts with a transformers decoder, in the trainer's process and on its weights.

_DECODES_IN_BFLOAT16: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()


class HFRolloutEngine(PolicyEngine):
    """Samples from a transformers decoder; every distinct prompt is encoded once.

    Rollouts are decoded in a batch that sequences leave as soon as they end. If the model's layers allow it, rollouts
    of a prompt read its keys and values together, once per step; otherwise each gets a copy. Prompts of different
    lengths are batched, padded on the left, if the model allows it (`prefill.allows_padding`). Supports layers with
    full, sliding-window or chunked attention, with an indexer that selects tokens, and with a state of fixed size
    (linear attention, short convolutions). Images and videos are encoded once with their prompt.

    On a GPU the steps of rollouts that share prompts are replayed as a CUDA graph, if they can be captured
    (`step_graph`); this has not run on a GPU yet.

    On x86 CPUs the linear layers of a float32 model run on packed copies of their weights, which exist during each call
    of `generate` and take as much memory as the weights.

    Placeholder tokens of images and videos are never sampled, as the model would look for missing images.
    Log-probabilities, even greedy ones, exclude placeholders from the distribution. Scoring includes them, and so
    differs by the probability that the model gives to placeholders, which is negligible after training with images.

    Reproducible: each sequence draws from a random stream identified by (seed, index of the prompt in the call or in
    `prompt_indices`, index of the rollout). Results do not depend on `max_sequences` or on other prompts, except that
    rounding may differ between batch shapes and so, rarely, change a token. The same call gives the same bits on the
    same machine, if `max_sequences` is set or all sequences fit. Neither reads nor changes global random state.

    Args:
        model: The policy; may be set later by `bind`.
        tokenizer: Decodes completions and finds stop strings; optional.
        max_sequences: Maximum number of sequences decoded at once, which bounds the cache; None decodes as many as half
            of the free memory can hold, counted by the longest prompt and completion. A prompt whose rollouts are split
            is still encoded once.
        max_prefill_tokens: Maximum prompt tokens in one forward pass, including padding. Where a turn continues kept
            sequences, their cached tokens count too; raise it for episodes with long histories.
        dtype: Dtype to sample in. `auto` is bfloat16 on a GPU under `bf16-mixed`, if the model passes the decoding
            check in it; otherwise the dtype of the weights. In any other dtype, each call of `generate` samples from a
            temporary copy of the weights.
        router_replay: Record the experts that each token of a mixture gets, in prompts and completions
            (`Rollout.routed_experts`); a run then replays them in old log-probabilities and updates, so that rounding
            does not route tokens differently (R3, arXiv:2510.11370). A prompt that is encoded once is recorded once.
            Steps are not captured as CUDA graphs.

    Attributes:
        autocast_dtype: Dtype of the Trainer's autocast on a GPU, set by the run; None otherwise.

    Raises:
        ValueError: If a limit is below 1, or the model is not a decoder.
    """

    samples_from_copies = True
    keeps_caches = True

    def __init__(
        self,
        model: Any = None,
        tokenizer: Any = None,
        *,
        max_sequences: int | None = None,
        max_prefill_tokens: int = 8192,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        router_replay: bool = False,
    ) -> None:
        counts = {"max_sequences": max_sequences, "max_prefill_tokens": max_prefill_tokens}
        check_options({name: (count, count is None or count >= 1, "at least 1") for name, count in counts.items()})
        self.max_sequences = max_sequences
        self.max_prefill_tokens = max_prefill_tokens
        self.dtype, self.router_replay = dtype, router_replay
        self.autocast_dtype: torch.dtype | None = None
        self._kept: KeptCaches | None = None
        self._told = False
        if model is not None:
            self.bind(model, tokenizer)

    def bind(self, model: Any, tokenizer: Any = None) -> None:
        """Set the policy to sample from, in place of any earlier one.

        Args:
            model: A transformers decoder with a language-model head. Not copied.
            tokenizer: Its tokenizer; None returns rollouts without text.

        Raises:
            ValueError: If the model is an encoder-decoder, counts positions from the padding token's id on, or takes no
                cache.
        """
        if model is not self.model:
            if getattr(model.config, "is_encoder_decoder", False):
                raise ValueError(f"model is an encoder-decoder ({type(model).__name__}); pass a decoder-only model.")
            decoder = find_decoder(model)
            if takes_positions(decoder) and (reason := counts_tokens_itself(decoder)) is not None:
                raise ValueError(f"HFRolloutEngine pads prompts and needs to set their positions, but {reason}")
            cache_argument(model)
            if self._kept is not None:
                self._kept.clear()
        self.model, self.tokenizer = model, tokenizer

    def sample(self, requests: Sequence[SampleRequest], sampling: SamplingConfig, seed: int) -> list[list[Rollout]]:
        """Sample the rollouts of each request, without text; see `PolicyEngine.sample`.

        The model is in evaluation mode during the call; the mode of every submodule is restored afterwards.

        Raises:
            ValueError: If a request is invalid, a layer's state cannot be copied (`kept.gather_layer`), or the model's
                decoding differs from its scoring (`checks.sampling.check_decoding`, in the first call for a model).
            FloatingPointError: If the model's logits are not finite.
        """
        stop, end_ids = self.check(requests, sampling), self.end_ids(sampling)
        dtype = self._checked_dtype()
        most = self._sequences_at_once(requests, dtype)
        memory = naming_memory(
            f"a rollout with max_sequences={most} (None: all at once) and max_prefill_tokens="
            f"{self.max_prefill_tokens} of HFRolloutEngine",
            "lower max_sequences, which bounds the cache of keys and values, or max_prefill_tokens if the prompts "
            "alone do not fit",
        )
        limits: dict[str, Any] = {"max_sequences": most, "max_prefill_tokens": self.max_prefill_tokens}
        mode = _evaluating(self.model, dtype, max((request.max_new_tokens for request in requests), default=0))
        with memory, mode, sharing_prompts(self.model):
            kept = probe_decoding(self.model, self._kept, **limits)
            with RouterReplay(self.model) if self.router_replay else nullcontext() as routers:
                return sample_in_batches(
                    self.model,
                    requests,
                    sampling,
                    seed,
                    end_ids=end_ids,
                    stop=stop,
                    kept=kept,
                    routers=routers,
                    **limits,
                )

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype to sample in; None for the weights' dtype."""
        if self.dtype == "auto":  # float16 has too small a range for some models' activations, which autocast widens
            return torch.bfloat16 if self.autocast_dtype == torch.bfloat16 else None
        return getattr(torch, self.dtype)

    def _checked_dtype(self) -> torch.dtype | None:
        """`compute_dtype`, unless `auto` chose it and the model does not decode in it."""
        dtype = self.compute_dtype
        if dtype is None or self.dtype != "auto":
            return dtype
        if self.model not in _DECODES_IN_BFLOAT16:
            try:
                with _evaluating(self.model, dtype, 0), sharing_prompts(self.model):
                    probe_decoding(self.model, None, max_sequences=None, max_prefill_tokens=self.max_prefill_tokens)
                _DECODES_IN_BFLOAT16[self.model] = True
            except (RuntimeError, ValueError, FloatingPointError) as error:
                if is_out_of_memory(error):
                    raise
                rank_zero_info(
                    f"Rollouts are sampled in the dtype of the weights, because {str(dtype)[6:]} fails: {error}"
                )
                _DECODES_IN_BFLOAT16[self.model] = False
        return dtype if _DECODES_IN_BFLOAT16[self.model] else None

    def _sequences_at_once(self, requests: Sequence[SampleRequest], dtype: torch.dtype | None) -> int | None:
        """`max_sequences`, or what the free memory holds: caches of whole sequences, and logits with temporaries."""
        count = sum(request.count for request in requests)
        if self.max_sequences is not None or not count:
            return self.max_sequences
        config = self.model.config.get_text_config(decoder=True)
        tokens = max(len(request.token_ids) for request in requests)
        tokens += max(request.max_new_tokens for request in requests)
        width = (dtype or self.model.dtype).itemsize
        copied = sum(width * weight.numel() for weight in self.model.parameters() if dtype not in (None, weight.dtype))
        needed = sequence_bytes(config, tokens, width)
        device = next(self.model.parameters()).device
        most = sequences_at_once(count, needed, lambda: free_memory(device) - copied)
        if most < count and not self._told:
            self._told = True
            rank_zero_info(
                f"HFRolloutEngine samples {most} of {count} sequences at once: each may take {needed / 2**20:.0f} MiB, "
                "and caches get half of the free memory (max_sequences sets another number)."
            )
        return most if most < count else None

    @contextmanager
    def keep_caches(self) -> Iterator[None]:
        """Keep the cache of each sampled sequence for the next call of `generate`.

        A prompt of that call that begins with the tokens of such a sequence is encoded from where it ended. The caches
        take memory for the sequences' tokens, with a shared prompt stored once. Sequences that the next call
        does not continue are freed when it starts, and all of them when the context ends. The weights must not change
        inside it.

        Prompts with images or videos are encoded from the start. So are all prompts of a model that does not continue
        its cache exactly (`checks.sampling.continues_exactly`), or takes too few tokens to check that.

        The caches belong to this object; a copy of the engine starts without any.
        """
        self._kept = KeptCaches()
        try:
            yield
        finally:
            self._kept = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}


@contextmanager
def _evaluating(model: torch.nn.Module, dtype: torch.dtype | None, steps: int) -> Iterator[None]:
    """Evaluate without gradients, on copies of the weights in another dtype or packed ones.

    Switches inference mode off, even if the caller has it on (Lightning's validation): buffers that a forward pass
    replaces, such as rotary frequencies, would stay inference tensors, which cannot be written to (DDP's broadcast) or
    saved for a backward pass. Compiled layers run uncompiled, because each cache length and batch size could need its
    own graph.
    """
    copies, packed = computing_in(model, dtype), packed_linears(model, steps)
    with torch.inference_mode(False), evaluating(model), uncompiled(), copies, packed:
        yield
