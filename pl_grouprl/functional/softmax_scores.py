"""Computes log-probability, entropy, score norm and sketch from sums over the vocabulary, and the logits' gradient.

z is a logit divided by the temperature.

Legend: N tokens, V vocabulary, C token ids of a block, R tokens of a tile, D hidden size, S size of a sketch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pl_grouprl.functional.head_sketch import HeadSketch
from pl_grouprl.functional.running_softmax import (
    LOWEST,
    Sums,
    Targets,
    check_targets,
    fused,
    sum_block,
    tile_like,
    tiles,
)

Outputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


class ScoreOptions(NamedTuple):
    """Scores requested besides log-probabilities; see `token_scores`."""

    temperature: float = 1.0
    entropy: bool = False
    entropy_grad: bool = False
    score_norm: bool = False
    sketch: HeadSketch | None = None

    def sum_block(
        self, logits_NC: Tensor, targets: Targets, signs_VS: Tensor | None, start: int = 0, *, keep_exp: bool = False
    ) -> tuple[Sums, Tensor]:
        """Compute the sums that the scores need; see `running_softmax.sum_block`."""
        dtype = torch.promote_types(logits_NC.dtype, torch.float32)
        return sum_block(
            logits_NC,
            targets,
            self.temperature,
            square=self.score_norm,
            moment=self.entropy,
            signs_CS=None if signs_VS is None else signs_VS[start : start + logits_NC.shape[1]].to(dtype),
            keep_exp=keep_exp,
        )

    def signs(self, hidden_ND: Tensor, vocabulary: int) -> Tensor | None:
        """Return the signs of all token ids, shape [V, S], if a sketch is requested."""
        return None if self.sketch is None else self.sketch.signs(hidden_ND.shape[1], vocabulary, hidden_ND.device)[1]


class Softmax(NamedTuple):
    """What the gradient needs of each token's distribution.

    Attributes:
        log_total_N: Log of the sum of e^z over the vocabulary.
        logprobs_N: log p_a of the target a.
        other_N: 1 - p_a, the probability of all other token ids.
        entropy_N: H; None unless requested.
    """

    log_total_N: Tensor
    logprobs_N: Tensor
    other_N: Tensor
    entropy_N: Tensor | None

    def write_gradient(
        self,
        logits_NC: Tensor,
        result_NC: Tensor,
        targets: Targets,
        temperature: float,
        grad_N: Tensor | None,
        entropy_grad_N: Tensor | None,
    ) -> None:
        """Write the gradient with respect to a block of logits.

        With the upstream gradients g of the log-probability and k of the entropy H,
            dL/dlogit_v = (g (1[v = a] - p_v) - k p_v (log p_v + H)) / temperature

        Args:
            logits_NC: The block.
            result_NC: Output; may be `logits_NC`.
            targets: The block's targets.
            temperature: Divides the logits.
            grad_N: g; None is zero.
            entropy_grad_N: k; None is zero.
        """
        g_N1 = (torch.zeros_like(self.log_total_N) if grad_N is None else grad_N)[:, None] / temperature
        k_N1 = None if entropy_grad_N is None else entropy_grad_N[:, None] / temperature
        factor_N1 = -g_N1 if k_N1 is None else -g_N1 - k_N1 * self._entropy_N1()
        kernels = fused(logits_NC)
        if kernels is None:
            self._write_tiles(logits_NC, result_NC, temperature, factor_N1, None if k_N1 is None else -k_N1)
        else:
            entropy_factor_N = None if k_N1 is None else -k_N1.flatten()
            kernels.write_rows(
                logits_NC, result_NC, self.log_total_N, temperature, factor_N1.flatten(), entropy_factor_N
            )
        target_grad_N1 = g_N1 * self.other_N[:, None]
        if k_N1 is not None:
            logprobs_N1 = self.logprobs_N.clamp(min=LOWEST)[:, None]
            target_grad_N1 -= k_N1 * logprobs_N1.exp() * (logprobs_N1 + self._entropy_N1())
        targets.put(result_NC, target_grad_N1)

    def _write_tiles(
        self,
        logits_NC: Tensor,
        result_NC: Tensor,
        temperature: float,
        factor_N1: Tensor,
        entropy_factor_N1: Tensor | None,
    ) -> None:
        """Write the gradient tile by tile, as if no token id were a target."""
        spare_RC = None if entropy_factor_N1 is None else tile_like(logits_NC, self.log_total_N.dtype)
        for rows, z_RC in tiles(logits_NC, self.log_total_N.dtype, temperature):
            z_RC.sub_(self.log_total_N[rows, None])
            if entropy_factor_N1 is None or spare_RC is None:
                z_RC.exp_().mul_(factor_N1[rows])
            else:
                p_RC = torch.exp(z_RC.clamp_(min=LOWEST), out=spare_RC[: len(z_RC)])
                z_RC.mul_(entropy_factor_N1[rows]).add_(factor_N1[rows]).mul_(p_RC)
            result_NC[rows] = z_RC

    def _entropy_N1(self) -> Tensor:
        assert self.entropy_N is not None
        return self.entropy_N[:, None]


def finish(
    others: Sums,
    target_N: Tensor,
    options: ScoreOptions,
    hidden_ND: Tensor,
    targets_N: Tensor,
    vocabulary: int,
) -> tuple[Softmax, Outputs]:
    """Add the targets to the sums over all other token ids, and compute the scores.

    Args:
        others: The sums over all other token ids; overwritten.
        target_N: z of each target.
        options: The requested scores.
        hidden_ND: Hidden states, for the sketch.
        targets_N: Token ids.
        vocabulary: V.
    """
    others.scale_(torch.maximum(others.max_N, target_N))
    above_N = target_N - others.max_N
    exp_N = above_N.exp()
    total_N = others.exp_N + exp_N
    log_N = total_N.log()
    other_N = others.exp_N / total_N
    entropy_N = norm_N = sketch_NS = None
    if others.moment_N is not None:
        entropy_N = log_N - (others.moment_N + above_N.clamp(min=LOWEST) * exp_N) / total_N
    if others.square_N is not None:
        norm_N = other_N.square() + others.square_N / total_N.square()
    if options.sketch is not None and others.signed_NS is not None:
        mean_NS = others.signed_NS / total_N[:, None]
        sketch_NS = options.sketch.project(hidden_ND, targets_N, other_N, mean_NS, vocabulary)
    softmax = Softmax(others.max_N + log_N, above_N - log_N, other_N, entropy_N)
    return softmax, (softmax.logprobs_N, entropy_N, norm_N, sketch_NS)


def mark_detached(ctx: Any, outputs: Outputs, options: ScoreOptions) -> None:
    """Tell autograd which outputs of a function have no gradient."""
    ctx.set_materialize_grads(False)
    _, entropy_N, norm_N, sketch_NS = outputs
    detached = (None if options.entropy_grad else entropy_N, norm_N, sketch_NS)
    ctx.mark_non_differentiable(*[tensor for tensor in detached if tensor is not None])


class LogitsScores(torch.autograd.Function):
    """Scores of tokens from their logits [N, V]: one pass over them forward, one backward."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, hidden_ND: Tensor, options: ScoreOptions) -> Outputs:
        """Return log-probabilities, entropy, score norm and sketch; the last three None unless requested.

        Args:
            ctx: Autograd context.
            logits_NV: Logits before the temperature.
            targets_N: Token ids.
            hidden_ND: Hidden states, detached, for the sketch.
            options: The requested scores.
        """
        vocabulary = logits_NV.shape[1]
        check_targets(targets_N, vocabulary)
        signs_VS = options.signs(hidden_ND, vocabulary)
        others, target_N = options.sum_block(logits_NV, Targets(targets_N, 0, vocabulary), signs_VS)
        softmax, outputs = finish(others, target_N, options, hidden_ND, targets_N, vocabulary)
        ctx.save_for_backward(logits_NV, targets_N, *softmax)
        ctx.options = options
        mark_detached(ctx, outputs, options)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradient with respect to the logits."""
        logits_NV, targets_N, *saved = ctx.saved_tensors
        targets = Targets(targets_N, 0, logits_NV.shape[1])
        result_NV = torch.empty_like(logits_NV)
        Softmax(*saved).write_gradient(logits_NV, result_NV, targets, ctx.options.temperature, *gradients[:2])
        return result_NV, None, None, None
