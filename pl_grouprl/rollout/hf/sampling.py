"""Samples a token from logits: repetition penalty, temperature, filters, random numbers, and the draw.

Shapes: B sequences that are decoded together, V vocabulary, T steps.

Every sequence has its own random stream, so its draws do not depend on the batch: its size, its other sequences, or
when these finish. The stream is Philox, a counter-based generator (Salmon et al., 2011): its key is (seed, prompt,
generation), its counter the step. Streams of different keys are independent, steps share no state, and no global
generator is touched.

One uniform number per step suffices: inverting the cumulative distribution gives the token. The cumulative sums are
integers (probabilities times 2^52) and so exact: they never decrease, a token of probability zero is never drawn, and
they do not depend on the order of summation, which differs between devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from pl_grouprl.types import SamplingConfig

_HAS_TRITON = find_spec("triton") is not None  # it comes with PyTorch for CUDA
_TRITON_DEVICE = "cuda"
_FIXED_POINT = 2.0**52
_BLOCK_SIZE = 512
_DRAWS_PER_COUNT = 4  # Philox4x64 yields four 64-bit words per counter value


def penalize(logits_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Divide positive logits of tokens that occurred by a penalty, and multiply negative ones.

    Args:
        logits_BV: Logits, shape [B, V], any floating dtype.
        seen_BV: Whether a token occurs in the prompt or the completion so far, bool [B, V].
        penalty: See `SamplingConfig.repetition_penalty`.

    Returns:
        Logits, float32, shape [B, V], as transformers' `RepetitionPenaltyLogitsProcessor` computes them.
    """
    scores_BV = logits_BV.float()
    return torch.where(seen_BV, torch.where(scores_BV < 0, scores_BV * penalty, scores_BV / penalty), scores_BV)


def filter_logits(logits_BV: Tensor, sampling: SamplingConfig) -> Tensor:
    """Apply temperature, then top-k, top-p and min-p; each filters the result of the previous one.

    Order and semantics are those of transformers' `LogitsProcessor` classes. Tokens that tie with the last one kept are
    kept too.

    Args:
        logits_BV: Logits, shape [B, V], any floating dtype.
        sampling: Its temperature must be above 0.

    Returns:
        Unnormalized logits of the distribution to sample from, float32, shape [B, V]; -inf for excluded tokens.
    """
    scores_BV = logits_BV.float()
    if sampling.temperature != 1.0:
        scores_BV = scores_BV / sampling.temperature
    if 0 < sampling.top_k < scores_BV.shape[-1]:
        kth_B1 = scores_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores_BV = scores_BV.masked_fill(scores_BV < kth_B1, -math.inf)
    if sampling.top_p < 1.0:
        scores_BV = _keep_top_p(scores_BV, sampling)
    if sampling.min_p > 0.0:
        threshold_B1 = scores_BV.amax(dim=-1, keepdim=True) + math.log(sampling.min_p)
        scores_BV = scores_BV.masked_fill(scores_BV < threshold_B1, -math.inf)
    return scores_BV


def _keep_top_p(scores_BV: Tensor, sampling: SamplingConfig) -> Tensor:
    """Keep the most likely tokens until their probability reaches `top_p`, at least one."""
    probs_BV = scores_BV.softmax(dim=-1)
    if 0 < sampling.top_k < scores_BV.shape[-1]:  # top-k left few tokens (ties aside), so no full sort
        sorted_BK = probs_BV.topk(sampling.top_k, dim=-1).values
    else:
        sorted_BK = probs_BV.sort(dim=-1, descending=True).values
    weights_BK = _fixed_point(sorted_BK)
    before_BK = weights_BK.cumsum(dim=-1) - weights_BK
    total_B1 = _fixed_point(probs_BV).sum(dim=-1, keepdim=True)
    kept_B1 = (before_BK < sampling.top_p * total_B1.double()).sum(dim=-1, keepdim=True).clamp(min=1)
    return scores_BV.masked_fill(probs_BV < sorted_BK.gather(-1, kept_B1 - 1), -math.inf)


def sample_tokens(
    logits_BV: Tensor, sampling: SamplingConfig, uniforms_B: Tensor | None, seen_BV: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one token per sequence.

    Args:
        logits_BV: Logits of the next token, shape [B, V], any floating dtype.
        sampling: How to sample. Temperature 0 takes the most likely token and ignores the filters.
        uniforms_B: Float64 in [0, 1), shape [B]; may be None for temperature 0.
        seen_BV: See `penalize`; needed for a repetition penalty.

    Returns:
        Tokens, int64 [B], and their log-probabilities at the temperature (1 for greedy tokens) with the penalty and
        without filters, float32 [B]. NaN logits give NaN log-probabilities.
    """
    if sampling.repetition_penalty != 1:
        assert seen_BV is not None
        logits_BV = penalize(logits_BV, seen_BV, sampling.repetition_penalty)
    if _HAS_TRITON and logits_BV.device.type == _TRITON_DEVICE:
        from pl_grouprl.rollout.hf.sampling_triton import sample_triton

        if not sampling.is_truncated:
            greedy = sampling.temperature == 0
            return sample_triton(logits_BV, sampling.temperature or 1.0, None if greedy else uniforms_B)
        tokens_B, _ = sample_triton(filter_logits(logits_BV, sampling), 1.0, uniforms_B)
        scores_BV = logits_BV.float() / sampling.temperature
        return tokens_B, scores_BV.gather(-1, tokens_B[:, None]).squeeze(-1) - scores_BV.logsumexp(dim=-1)
    if uniforms_B is None or sampling.temperature == 0:
        logprobs_BV = logits_BV.float().log_softmax(dim=-1)
        tokens_B1 = logprobs_BV.argmax(dim=-1, keepdim=True)
    else:
        logprobs_BV = filter_logits(logits_BV, SamplingConfig(temperature=sampling.temperature)).log_softmax(dim=-1)
        drawn_BV = filter_logits(logits_BV, sampling).log_softmax(dim=-1) if sampling.is_truncated else logprobs_BV
        tokens_B1 = _invert_cdf(drawn_BV.exp(), uniforms_B)
    return tokens_B1.squeeze(-1), logprobs_BV.gather(-1, tokens_B1).squeeze(-1)


def _invert_cdf(probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Find the first token whose cumulative probability exceeds the uniform number; shape [B, 1].

    With u < 1 of 53 bits and a total below 2^53, `u * total` stays below the total in float64, so the result is in the
    vocabulary. The clamp only matters for NaN, which the caller detects.

    A large vocabulary is searched in two steps, first for a block of tokens: block sums cost less than cumulative sums
    of all tokens, and give the same token, because integer sums are exact.
    """
    weights_BV, size = _fixed_point(probs_BV), _BLOCK_SIZE
    if weights_BV.shape[-1] <= size:
        cumulative_BV = weights_BV.cumsum(dim=-1)
        return _first_above(cumulative_BV, _scaled(cumulative_BV, uniforms_B))
    whole_BV, rest_BV = weights_BV.tensor_split([weights_BV.shape[-1] // size * size], dim=-1)
    blocks_BN = torch.cat([whole_BV.unflatten(-1, (-1, size)).sum(dim=-1), rest_BV.sum(dim=-1, keepdim=True)], dim=-1)
    cumulative_BN = blocks_BN.cumsum(dim=-1)
    target_B1 = _scaled(cumulative_BN, uniforms_B)
    block_B1 = _first_above(cumulative_BN, target_B1)
    tokens_BC = block_B1 * size + torch.arange(size, device=block_B1.device)
    tokens_BC = tokens_BC.clamp(max=weights_BV.shape[-1] - 1)  # past the last token, which is found first
    before_B1 = cumulative_BN.gather(-1, block_B1) - blocks_BN.gather(-1, block_B1)
    found_B1 = _first_above(weights_BV.gather(-1, tokens_BC).cumsum(dim=-1), target_B1 - before_B1)
    return tokens_BC.gather(-1, found_B1)


def _scaled(cumulative_BN: Tensor, uniforms_B: Tensor) -> Tensor:
    """The uniform number times the total, rounded down, shape [B, 1]."""
    return (uniforms_B.unsqueeze(-1) * cumulative_BN[:, -1:].double()).long()


def _first_above(cumulative_BN: Tensor, target_B1: Tensor) -> Tensor:
    return torch.searchsorted(cumulative_BN, target_B1, right=True).clamp(0, cumulative_BN.shape[-1] - 1)


def _fixed_point(probs: Tensor) -> Tensor:
    """Probabilities as integers, in units of 2^-52. Exact from 2^-29 up, where float32 has no finer bits."""
    return (probs * _FIXED_POINT).long()


def uniforms(seed: int, sequences: Sequence[tuple[int, int]], start: int, count: int) -> Tensor:
    """Random numbers of several sequences for consecutive steps.

    Args:
        seed: Any integer; taken modulo 2^64.
        sequences: (prompt index, generation index) of each, both from 0 to 2^32 - 1.
        start: First step, a multiple of 4.
        count: Number of steps.

    Returns:
        Float64 in [0, 1), shape [B, T] with T = count, on the CPU. A sequence's number at a step does not depend on
        `start`, `count` or other sequences.

    Raises:
        ValueError: If `start` is not a multiple of 4.
    """
    if start % _DRAWS_PER_COUNT:
        raise ValueError(f"start is {start}; it must be a multiple of {_DRAWS_PER_COUNT}.")
    numbers_BT = np.empty((len(sequences), count), dtype=np.float64)
    for row, (prompt, generation) in enumerate(sequences):
        key = np.array([seed % 2**64, (prompt << 32) + generation], dtype=np.uint64)
        stream = np.random.Generator(np.random.Philox(key=key, counter=start // _DRAWS_PER_COUNT))
        stream.random(out=numbers_BT[row])
    return torch.from_numpy(numbers_BT)
