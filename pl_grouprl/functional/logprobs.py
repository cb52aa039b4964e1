"""Log-probabilities, entropy and scores of given tokens, from hidden states, without materializing all logits.

Legend: N response tokens (flat), D hidden size, V vocabulary, M tokens of one chunk, S size of a sketch.

At most about `chunk_size` * V logits exist at a time. Any head can run on chunks of `chunk_size` tokens; with gradient
enabled, all chunks but the last keep only their hidden states and recompute their logits in the backward pass. A plain
matrix head runs in blocks of the vocabulary, all tokens at once: see `linear_head`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pl_grouprl.functional.head_sketch import HeadSketch
from pl_grouprl.functional.linear_head import BLOCK, FrozenHeadScores, Head, LinearHeadScores
from pl_grouprl.functional.softmax_scores import LogitsScores, Outputs, ScoreOptions


class TokenScores(NamedTuple):
    """Scores of the response tokens, in float32 (float64 for float64 logits).

    Attributes:
        logprobs_N: Log-probability of each token, in nats, with gradient if enabled.
        entropy_N: Entropy of each token's distribution, in nats; None unless requested.
        score_norm_N: Squared norm of the log-probability's gradient with respect to the logits over the temperature,
            1 - 2 p_a + sum_v p_v^2, detached; None unless requested.
        sketch_NS: Random sketch of the log-probability's gradient with respect to the head's weights (see
            `HeadSketch`), shape [N, S], detached; None unless requested.
    """

    logprobs_N: Tensor
    entropy_N: Tensor | None = None
    score_norm_N: Tensor | None = None
    sketch_NS: Tensor | None = None

    def select(self, index: Tensor) -> TokenScores:
        """The scores of the tokens with these indices, shape [K], int64; a token may be there several times."""
        chosen = {name: score.index_select(0, index) for name, score in self._asdict().items() if score is not None}
        return TokenScores(**chosen)


def token_scores(
    hidden_ND: Tensor,
    targets_N: Tensor,
    logits_fn: Callable[[Tensor], Tensor],
    *,
    temperature: float = 1.0,
    chunk_size: int = 512,
    entropy: bool = False,
    entropy_grad: bool = False,
    score_norm: bool = False,
    sketch: HeadSketch | None = None,
    weight_VD: Tensor | None = None,
) -> TokenScores:
    """Score each target token under softmax(logits_fn(hidden) / temperature), chunk by chunk.

    Args:
        hidden_ND: The hidden states that predict the targets, shape [N, D]; N may be 0.
        targets_N: Token ids in [0, V), int64, shape [N].
        logits_fn: The model's head: hidden states [M, D] to logits [M, V], including soft caps, row by row. Called once
            per chunk, and once for N = 0, so its parameters are always in the graph.
        temperature: Divides the logits before the softmax. 0 (greedy decoding) is scored as 1.
        chunk_size: Maximum number of tokens with logits in memory at a time; does not change the result.
        entropy: Also return the entropy of each distribution.
        entropy_grad: Let gradients flow through the entropy (an entropy bonus); costs memory. Needs `entropy`.
        score_norm: Also return the score norm.
        sketch: Also return this sketch of the score.
        weight_VD: The head's weight, shape [V, D], if the head is exactly `hidden @ weight_VD.T`; `logits_fn` is then
            not called.
    """
    _check(hidden_ND, targets_N, temperature, chunk_size, entropy, entropy_grad)
    options = ScoreOptions(temperature or 1.0, entropy, entropy_grad, score_norm, sketch)
    if weight_VD is None:
        parts = _by_chunks(hidden_ND, targets_N, logits_fn, options, chunk_size)
    else:
        parts = _by_blocks(hidden_ND, targets_N, weight_VD, options, chunk_size * len(weight_VD))
    logprobs, entropies, score_norms, sketches = zip(*parts, strict=True)
    return TokenScores(
        torch.cat(logprobs),
        torch.cat(entropies) if entropy else None,
        torch.cat(score_norms) if score_norm else None,
        torch.cat(sketches) if sketch is not None else None,
    )


def _by_chunks(
    hidden_ND: Tensor,
    targets_N: Tensor,
    logits_fn: Callable[[Tensor], Tensor],
    options: ScoreOptions,
    chunk_size: int,
) -> Iterator[Outputs]:
    # split instead of slicing: its backward concatenates the gradients of all chunks once.
    chunks = list(zip(hidden_ND.split(chunk_size), targets_N.split(chunk_size), strict=True))
    for number, (hidden_MD, targets_M) in enumerate(chunks, start=1):
        if torch.is_grad_enabled() and number < len(chunks):  # backward starts with the last, so keep its logits
            yield checkpoint(_score_chunk, hidden_MD, targets_M, logits_fn, options, use_reentrant=False)
        else:
            yield _score_chunk(hidden_MD, targets_M, logits_fn, options)


def _score_chunk(
    hidden_MD: Tensor, targets_M: Tensor, logits_fn: Callable[[Tensor], Tensor], options: ScoreOptions
) -> Outputs:
    logits_MV = logits_fn(hidden_MD)
    if logits_MV.dim() != 2 or len(logits_MV) != len(hidden_MD):
        raise ValueError(
            f"logits_fn returned shape {tuple(logits_MV.shape)} for hidden states {tuple(hidden_MD.shape)}; "
            "it must return one row of logits per hidden state."
        )
    return LogitsScores.apply(logits_MV, targets_M, hidden_MD.detach(), options)


def _by_blocks(
    hidden_ND: Tensor, targets_N: Tensor, weight_VD: Tensor, options: ScoreOptions, max_logits: int
) -> Iterator[Outputs]:
    device = hidden_ND.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_ND.dtype
    height = max(max_logits // min(BLOCK, len(weight_VD)), 1)
    for start in range(0, max(len(hidden_ND), 1), height):
        part_MD, targets_M = hidden_ND[start : start + height], targets_N[start : start + height]
        if not torch.is_grad_enabled():
            yield Head(part_MD, weight_VD, dtype).scores(targets_M, options)[1]
        elif weight_VD.requires_grad or options.entropy_grad:
            # Backward starts with the last part, so only its logits are kept.
            max_kept = max_logits if start + height >= len(hidden_ND) else 0
            yield LinearHeadScores.apply(part_MD, weight_VD, targets_M, dtype, options, max_kept)
        else:
            yield FrozenHeadScores.apply(part_MD, weight_VD, targets_M, dtype, options)


def _check(
    hidden_ND: Tensor, targets_N: Tensor, temperature: float, chunk_size: int, entropy: bool, entropy_grad: bool
) -> None:
    if hidden_ND.dim() != 2 or targets_N.dim() != 1 or len(hidden_ND) != len(targets_N):
        raise ValueError(
            f"hidden_ND has shape {tuple(hidden_ND.shape)} and targets_N {tuple(targets_N.shape)}; "
            "pass one hidden state [N, D] per target [N]."
        )
    if targets_N.dtype != torch.int64:
        raise ValueError(f"targets_N has dtype {targets_N.dtype}; pass token ids as int64.")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature is {temperature}; it must be 0 (scored as 1) or larger.")
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; it must be at least 1.")
    if entropy_grad and not entropy:
        raise ValueError("entropy_grad=True needs entropy=True; set both or neither.")
