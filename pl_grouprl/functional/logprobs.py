"""Log-probabilities, entropy and scores of given tokens, from hidden states, without materializing all logits.

At most about `chunk_size` * V logits exist at a time. Any head can run on chunks of `chunk_size` tokens; with gradient
enabled, all chunks but the last keep only their hidden states and recompute their logits in the backward pass. A plain
matrix head runs in blocks of the vocabulary, all tokens at once: see `Head`.

Legend: N response tokens (flat), D hidden size, V vocabulary, M tokens of one chunk, C columns (token ids) of one
block, S size of a sketch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from pl_grouprl.functional.softmax import (
    HeadSketch,
    LogitsScores,
    Outputs,
    ScoreOptions,
    Softmax,
    Sums,
    add_block,
    check_targets,
    finish,
    mark_detached,
)
from pl_grouprl.utilities.options import check_options

BLOCK = 4096
"""Token ids per block: enough for matrix products at full speed."""

DEVICE_LOGITS = 2**25
"""Logits per block on a GPU, at least `BLOCK` per token: enough to take longer than the launches of the kernels."""


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
            per chunk (again in the backward pass for all but the last), and once for N = 0, so its parameters are
            always in the graph.
        temperature: Divides the logits before the softmax. 0 (greedy decoding) is scored as 1.
        chunk_size: Maximum number of tokens with logits in memory at a time; does not change the result.
        entropy: Also return the entropy of each distribution.
        entropy_grad: Let gradients flow through the entropy (an entropy bonus); costs memory. Needs `entropy`.
        score_norm: Also return the score norm.
        sketch: Also return this sketch of the score.
        weight_VD: The head's weight, shape [V, D], if the head is exactly `hidden @ weight_VD.T`; `logits_fn` is then
            not called.
    """
    if hidden_ND.dim() != 2 or targets_N.dim() != 1 or len(hidden_ND) != len(targets_N):
        shapes = f"{tuple(hidden_ND.shape)} and targets_N {tuple(targets_N.shape)}"
        raise ValueError(f"hidden_ND has shape {shapes}; pass one hidden state [N, D] per target [N].")
    if entropy_grad and not entropy:
        raise ValueError("entropy_grad is True, but entropy is False; set both or neither.")
    check_options(
        {
            "temperature": (temperature, temperature >= 0, "0 (scored as 1) or larger"),
            "chunk_size": (chunk_size, chunk_size >= 1, "at least 1"),
        }
    )
    options = ScoreOptions(temperature or 1.0, entropy, entropy_grad, score_norm, sketch)
    parts: list[Outputs] = []
    if weight_VD is not None:  # as many tokens at a time as keep a block's logits within max_logits
        device, max_logits = hidden_ND.device.type, chunk_size * len(weight_VD)
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_ND.dtype
        height = max(max_logits // min(BLOCK, len(weight_VD)), 1)
        for start in range(0, max(len(hidden_ND), 1), height):
            part_MD, targets_M = hidden_ND[start : start + height], targets_N[start : start + height]
            width = block_width(device, len(part_MD), max_logits)
            if not torch.is_grad_enabled():
                parts.append(Head(part_MD, weight_VD, dtype, width).scores(targets_M, options)[1])
            elif weight_VD.requires_grad or entropy_grad:
                # Backward starts with the last part, so only its logits are kept.
                max_kept = max_logits if start + height >= len(hidden_ND) else 0
                parts.append(LinearHeadScores.apply(part_MD, weight_VD, targets_M, dtype, options, width, max_kept))
            else:
                parts.append(FrozenHeadScores.apply(part_MD, weight_VD, targets_M, dtype, options, width))
    else:
        # split instead of slicing: its backward concatenates the gradients of all chunks once.
        chunks = list(zip(hidden_ND.split(chunk_size), targets_N.split(chunk_size), strict=True))
        # Backward starts with the last chunk, so its logits are kept.
        num_recomputed = len(chunks) - 1 if torch.is_grad_enabled() else 0
        parts += [
            checkpoint(_score_chunk, *chunk, logits_fn, options, use_reentrant=False)
            for chunk in chunks[:num_recomputed]
        ]
        parts += [_score_chunk(*chunk, logits_fn, options) for chunk in chunks[num_recomputed:]]
    logprobs, *others = zip(*parts, strict=True)
    return TokenScores(torch.cat(logprobs), *[None if one[0] is None else torch.cat(one) for one in others])


def _score_chunk(
    hidden_MD: Tensor, targets_M: Tensor, logits_fn: Callable[[Tensor], Tensor], options: ScoreOptions
) -> Outputs:
    logits_MV = logits_fn(hidden_MD)
    if logits_MV.dim() != 2 or len(logits_MV) != len(hidden_MD):
        shapes = f"{tuple(logits_MV.shape)} for hidden states {tuple(hidden_MD.shape)}"
        raise ValueError(f"logits_fn returned shape {shapes}; it must return one row of logits per hidden state.")
    return LogitsScores.apply(logits_MV, targets_M, hidden_MD.detach(), options)


def block_width(device: str, tokens: int, max_logits: int) -> int:
    """Token ids per block of logits on a type of device: on a GPU, the fewer tokens, the wider."""
    limit = 0 if device == "cpu" else min(DEVICE_LOGITS, max_logits)
    return max(limit // max(tokens, 1) // BLOCK, 1) * BLOCK


class Head:
    """Computes logits from hidden states and the head's weight, one block of the vocabulary at a time.

    Args:
        hidden_ND: Hidden states, shape [N, D].
        weight_VD: The head's weight, shape [V, D].
        dtype: Of the matrix products and the logits.
        width: Token ids per block.
    """

    def __init__(self, hidden_ND: Tensor, weight_VD: Tensor, dtype: torch.dtype, width: int) -> None:
        self.hidden_ND, self.weight_VD, self.dtype, self.width = hidden_ND, weight_VD, dtype, width
        self.states_ND = hidden_ND.to(dtype)
        self.starts = range(0, len(weight_VD), width)
        self._buffer: Tensor | None = None

    def rows(self, start: int) -> Tensor:
        """Return the block's rows of the weight, shape [C, D]."""
        return self.weight_VD[start : start + self.width].to(self.dtype)

    def logits(self, start: int, *, new: bool = False) -> Tensor:
        """Return the block's logits, shape [N, C], in new memory or in a buffer that the next call overwrites."""
        rows_CD = self.rows(start)
        size = (len(self.states_ND), len(rows_CD))
        if new:
            out_NC = self.states_ND.new_empty(size)
        else:
            if self._buffer is None:
                self._buffer = self.states_ND.new_empty(size[0] * min(self.width, len(self.weight_VD)))
            out_NC = self._buffer[: size[0] * size[1]].view(size)
        return torch.mm(self.states_ND, rows_CD.T, out=out_NC)

    def scores(
        self,
        targets_N: Tensor,
        options: ScoreOptions,
        *,
        mean_row: bool = False,
        keep: Callable[[int, Tensor], None] | None = None,
        first_kept: int = 0,
    ) -> tuple[Softmax, Outputs, Sums]:
        """Sum over the vocabulary.

        Args:
            targets_N: Token ids, shape [N].
            options: The requested scores.
            mean_row: Also sum the rows of the weight.
            keep: Called with the first token id and the logits of each block from `first_kept` on.
            first_kept: First token id of the blocks to keep.

        Returns:
            Quantities for the gradient, the scores, and the sums over all tokens but the targets.
        """
        vocabulary = len(self.weight_VD)
        check_targets(targets_N, vocabulary)
        signs_VS = options.signs(self.states_ND, vocabulary)
        sums = None
        for start in self.starts:
            kept = keep is not None and start >= first_kept
            logits_NC = self.logits(start, new=kept)
            rows_CD = self.rows(start) if mean_row else None
            sums = add_block(sums, logits_NC, targets_N, options, start=start, signs_VS=signs_VS, rows_CD=rows_CD)
            if keep is not None and kept:
                keep(start, logits_NC)
        assert sums is not None  # vocabularies are not empty
        return *finish(sums, options, self.hidden_ND, targets_N, vocabulary), sums


class LinearHeadScores(torch.autograd.Function):
    """Scores of tokens under softmax(h W^T / temperature), with one block of logits [N, C] at a time.

    The backward pass recomputes the blocks of logits, except for the last ones, of which as many are kept as
    `max_kept` allows, and writes each row of the weight's gradient once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        dtype: torch.dtype,
        options: ScoreOptions,
        width: int,
        max_kept: int,
    ) -> Outputs:
        """Score the targets; see `Head` for `dtype` and `width`. At most `max_kept` logits are kept for backward."""
        head = Head(hidden_ND, weight_VD, dtype, width)
        blocks = max_kept // max(len(hidden_ND) * width, 1)
        first_kept = head.starts[-blocks] if 0 < blocks <= len(head.starts) else 0
        ctx.kept = {}
        keep = ctx.kept.__setitem__ if blocks else None
        softmax, outputs, _ = head.scores(targets_N, options, keep=keep, first_kept=first_kept)
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, *softmax)
        ctx.options, ctx.dtype, ctx.width = options, dtype, width
        mark_detached(ctx, outputs, options)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients with respect to hidden states and weight."""
        hidden_ND, weight_VD, targets_N, *saved = ctx.saved_tensors
        head = Head(hidden_ND, weight_VD, ctx.dtype, ctx.width)
        by_logits = Softmax(*saved).gradient(ctx.options.temperature, *gradients[:2])
        by_hidden_ND = torch.zeros_like(hidden_ND, dtype=by_logits.target_N.dtype) if ctx.needs_input_grad[0] else None
        by_weight_VD = torch.empty_like(weight_VD) if ctx.needs_input_grad[1] else None
        for start in head.starts:
            logits_NC = ctx.kept.pop(start, None)  # popped: it is overwritten
            if logits_NC is None:
                logits_NC = head.logits(start)
            by_logits.write(logits_NC, logits_NC, targets_N, start)
            if by_hidden_ND is not None and by_hidden_ND.dtype == logits_NC.dtype:
                by_hidden_ND.addmm_(logits_NC, head.rows(start))
            elif by_hidden_ND is not None:
                by_hidden_ND.add_(logits_NC @ head.rows(start))
            if by_weight_VD is not None:
                part_CD = by_weight_VD[start : start + head.width]
                if part_CD.dtype == logits_NC.dtype:
                    torch.mm(logits_NC.T, head.states_ND, out=part_CD)
                else:
                    part_CD.copy_(logits_NC.T @ head.states_ND)
        by_hidden = None if by_hidden_ND is None else by_hidden_ND.to(hidden_ND.dtype)
        return by_hidden, by_weight_VD, None, None, None, None, None


class FrozenHeadScores(torch.autograd.Function):
    """`LinearHeadScores` for a weight without gradient, whose backward pass needs no logits.

    The gradient with respect to a hidden state is the upstream gradient times (W_a - sum_v p_v W_v) / temperature. The
    forward pass sums that mean row, as FlashAttention (arXiv:2205.14135) sums values. A gradient of the entropy would
    need a second such sum, and is not supported.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        dtype: torch.dtype,
        options: ScoreOptions,
        width: int,
    ) -> Outputs:
        """See `LinearHeadScores.forward`."""
        head = Head(hidden_ND, weight_VD, dtype, width)
        softmax, outputs, others = head.scores(targets_N, options, mean_row=True)
        assert others.row_ND is not None
        # W_a - sum_v p_v W_v without the cancellation of W_a and p_a W_a
        mean_ND = others.row_ND.mul_((others.max_N - softmax.log_total_N).exp_()[:, None])
        target_rows_ND = weight_VD[targets_N].to(dtype)
        unit_ND = (target_rows_ND * softmax.other_N[:, None]).sub_(mean_ND).div_(options.temperature)
        ctx.save_for_backward(unit_ND.to(hidden_ND.dtype))
        mark_detached(ctx, outputs, options)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradient with respect to the hidden states."""
        (unit_ND,) = ctx.saved_tensors
        by_hidden_ND = None if gradients[0] is None else (unit_ND * gradients[0][:, None]).to(unit_ND.dtype)
        return by_hidden_ND, None, None, None, None, None
