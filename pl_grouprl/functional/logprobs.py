"""Log-probabilities, entropy and scores of given tokens, from hidden states, without a matrix of all logits.

Legend: N response tokens (flat), D hidden size, V vocabulary, M tokens of one chunk, S size of a sketch.

The logits exist for `chunk_size` tokens at a time. With gradient enabled a chunk keeps only its hidden states, and its
logits are computed again in the backward pass; so at any time about three tensors [M, V] are alive, in both passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pl_grouprl.functional.head_sketch import HeadSketch


class TokenScores(NamedTuple):
    """What one pass over the response tokens gives, each in float32 (float64 for float64 logits).

    Attributes:
        logprobs_N: Log-probability of each token, in nats, with gradient where it is enabled.
        entropy_N: Entropy of the distribution that each token was drawn from, in nats; None unless asked for.
        score_norm_N: Squared norm of the gradient of the log-probability with respect to the logits divided by the
            temperature, 1 - 2 p_a + sum_v p_v^2, detached; None unless asked for.
        sketch_NS: Random sketch of the gradient of the log-probability with respect to the head's weights (see
            `HeadSketch`), shape [N, S], detached; None unless asked for.
    """

    logprobs_N: Tensor
    entropy_N: Tensor | None = None
    score_norm_N: Tensor | None = None
    sketch_NS: Tensor | None = None


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
) -> TokenScores:
    """Score each target token under softmax(logits_fn(hidden) / temperature), chunk by chunk.

    Args:
        hidden_ND: The hidden states that predict the targets, shape [N, D]; N may be 0.
        targets_N: Token ids in [0, V), int64, shape [N].
        logits_fn: The model's head: hidden states [M, D] to logits [M, V], soft-capping included. It is called once
            per chunk, once for N = 0 too, so that its parameters are always part of the graph.
        temperature: Divides the logits before the softmax. 0 (greedy decoding) is scored as 1.
        chunk_size: Tokens per chunk; changes memory, not the result.
        entropy: Also return the entropy of each distribution.
        entropy_grad: Let gradients flow through the entropy (an entropy bonus); costs memory. Needs `entropy`.
        score_norm: Also return the score norm.
        sketch: Also return this sketch of the score.

    Returns:
        The scores; the softmax is taken in float32 whatever the dtype of the logits.

    Raises:
        ValueError: If shapes or dtypes do not fit, or an option is out of range.
    """
    _check(hidden_ND, targets_N, temperature, chunk_size, entropy, entropy_grad)
    options = _Options(temperature or 1.0, entropy, entropy_grad, score_norm, sketch)
    recompute = torch.is_grad_enabled()
    chunks = []
    # split, not slices: its backward pass joins the gradients of all chunks once.
    for hidden_MD, targets_M in zip(hidden_ND.split(chunk_size), targets_N.split(chunk_size), strict=True):
        if recompute:
            scores = checkpoint(_score_chunk, hidden_MD, targets_M, logits_fn, options, use_reentrant=False)
        else:
            scores = _score_chunk(hidden_MD, targets_M, logits_fn, options)
        chunks.append(scores)
    logprobs, entropies, score_norms, sketches = zip(*chunks, strict=True)
    return TokenScores(
        torch.cat(logprobs),
        torch.cat(entropies) if entropy else None,
        torch.cat(score_norms) if score_norm else None,
        torch.cat(sketches) if sketch is not None else None,
    )


class _Options(NamedTuple):
    temperature: float
    entropy: bool
    entropy_grad: bool
    score_norm: bool
    sketch: HeadSketch | None


def _score_chunk(
    hidden_MD: Tensor, targets_M: Tensor, logits_fn: Callable[[Tensor], Tensor], options: _Options
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    logits_MV = logits_fn(hidden_MD)
    if logits_MV.dim() != 2 or len(logits_MV) != len(hidden_MD):
        raise ValueError(
            f"logits_fn returned shape {tuple(logits_MV.shape)} for hidden states {tuple(hidden_MD.shape)}; "
            "it must return one row of logits per hidden state."
        )
    logits_MV = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32))
    if options.temperature != 1.0:
        logits_MV = logits_MV / options.temperature
    all_logprobs_MV = logits_MV.log_softmax(dim=-1)
    del logits_MV
    logprobs_M = all_logprobs_MV.gather(-1, targets_M[:, None]).squeeze(-1)
    entropy_M = _entropy_with_gradient(all_logprobs_MV) if options.entropy_grad else None
    # The detached quantities come last: recomputation for the backward pass stops before them.
    scored = options.score_norm or options.sketch is not None
    if not scored and (options.entropy_grad or not options.entropy):
        return logprobs_M, entropy_M, None, None
    with torch.no_grad():
        probs_MV = all_logprobs_MV.exp()
        score_norm_M, sketch_MS = _score(hidden_MD, probs_MV, targets_M, options) if scored else (None, None)
        if options.entropy and entropy_M is None:
            # A logit of -inf has p = 0 and contributes 0 * -inf, which is 0 here. A NaN logit stays NaN in logprobs_M.
            entropy_M = -probs_MV.mul_(all_logprobs_MV).nan_to_num_(nan=0.0).sum(dim=-1)
    return logprobs_M, entropy_M, score_norm_M, sketch_MS


def _entropy_with_gradient(all_logprobs_MV: Tensor) -> Tensor:
    finite_MV = all_logprobs_MV.clamp(min=-1e30)  # 0 * -inf is NaN; 0 * -1e30 is 0, in the gradient too
    return -(all_logprobs_MV.exp() * finite_MV).sum(dim=-1)


def _score(
    hidden_MD: Tensor, probs_MV: Tensor, targets_M: Tensor, options: _Options
) -> tuple[Tensor | None, Tensor | None]:
    """Score norm and sketch, as asked for; both from the other tokens' p_v, as 1 - p_a cancels where p_a is near 1."""
    column = targets_M[:, None]
    target_probs = probs_MV.gather(-1, column)
    probs_MV.scatter_(-1, column, 0.0)
    norm_M = _score_norm(probs_MV) if options.score_norm else None
    sketch_MS = None if options.sketch is None else options.sketch.project(hidden_MD, probs_MV, targets_M)
    probs_MV.scatter_(-1, column, target_probs)
    return norm_M, sketch_MS


def _score_norm(others_MV: Tensor) -> Tensor:
    """Return (sum of the other p_v)^2 + sum of the other p_v^2, which is 1 - 2 p_a + sum_v p_v^2."""
    return others_MV.sum(dim=-1).square() + torch.linalg.vector_norm(others_MV, dim=-1).square()


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
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; it must be 0 (scored as 1) or larger.")
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; it must be at least 1.")
    if entropy_grad and not entropy:
        raise ValueError("entropy_grad=True needs entropy=True; set both or neither.")
