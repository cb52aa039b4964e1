"""Scores of tokens from sums over the vocabulary, and their gradients.

With z the logits over the temperature and m their maximum so far, the sums over token ids of e^(z-m), of its square and
of (z-m) e^(z-m) give log-probability, score norm and entropy. A vocabulary in blocks has one set of sums per block;
two sets are scaled to the larger maximum and added (online softmax: Milakov and Gimelshein, arXiv:1805.02867). The sums
exclude the target until the end, because 1 - p_a and what depends on it would cancel for p_a near 1.

Blocks are processed in tiles of a few rows, which fit into the processor's cache, in float32 (float64 for float64
logits).

Legend: N tokens, V vocabulary, C columns (token ids) of one block, R rows of one tile, D hidden size, S size of a
sketch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_TILE = 2**18  # elements per CPU thread
_HAS_TRITON = find_spec("triton") is not None
LOWEST = -1e30  # instead of -inf: its exponential is 0, and 0 * LOWEST is 0, not NaN


class HeadSketch:
    """Compresses the gradient (e_a - p) h^T, a matrix [V, D] per token, into S numbers that preserve inner products.

        phi_j = (r_j . h) * (s_j . (e_a - p)) / sqrt(S)

    with independent signs r_j over the hidden size and s_j over the vocabulary (Kar and Karnick, AISTATS 2012; bounds
    by Meister, Sarlos and Woodruff, NeurIPS 2019). The expectation of phi(x) . phi(y) over the signs is the
    inner product of the two gradients, and its standard deviation falls as 1 / sqrt(S). Like the score norm, it omits
    the factor 1 / temperature and treats the head as linear in h.

    The seed determines the signs, on every device. They are created on first use and cached, one byte each.

    Args:
        dim: S, at least 1.
        seed: Seed of the signs.

    Raises:
        ValueError: If dim is less than 1.
    """

    def __init__(self, dim: int = 64, seed: int = 0) -> None:
        if dim < 1:
            raise ValueError(f"dim is {dim}; it must be at least 1.")
        self.dim = dim
        self.seed = seed
        self._signs: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor]] = {}

    def signs(self, hidden_size: int, vocabulary: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return r, shape [D, S], and s, shape [V, S], both of 1 and -1 in int8."""
        key = (hidden_size, vocabulary, torch.device(device))
        if key not in self._signs:
            generator = torch.Generator().manual_seed(self.seed)
            r_DS, s_VS = (
                torch.randint(0, 2, (rows, self.dim), generator=generator, dtype=torch.int8, device="cpu")
                .mul_(2)
                .sub_(1)
                for rows in (hidden_size, vocabulary)
            )
            self._signs[key] = (r_DS.to(device), s_VS.to(device))
        return self._signs[key]

    def project(
        self, hidden_ND: Tensor, targets_N: Tensor, other_N: Tensor, mean_NS: Tensor, vocabulary: int
    ) -> Tensor:
        """Sketch the scores of some tokens.

        Args:
            hidden_ND: Hidden states, the head's input, shape [N, D].
            targets_N: Token ids, shape [N].
            other_N: Sum of p_v over all v but the target: 1 - p_a, without its cancellation for p_a near 1.
            mean_NS: Sum of p_v s_v over the same v, shape [N, S].
            vocabulary: V.

        Returns:
            phi, shape [N, S], in the dtype of the probabilities.
        """
        r_DS, s_VS = self.signs(hidden_ND.shape[1], vocabulary, mean_NS.device)
        residual_NS = s_VS[targets_N].to(mean_NS.dtype) * other_N[:, None] - mean_NS
        with torch.autocast(hidden_ND.device.type, enabled=False):
            signed_NS = hidden_ND.to(mean_NS.dtype) @ r_DS.to(mean_NS.dtype)
        return signed_NS.mul_(residual_NS).div_(self.dim**0.5)


Outputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Log-probabilities, entropy, score norm and sketch; the last three None unless requested."""


class ScoreOptions(NamedTuple):
    """Scores requested besides log-probabilities; see `token_scores`."""

    temperature: float = 1.0
    entropy: bool = False
    entropy_grad: bool = False
    score_norm: bool = False
    sketch: HeadSketch | None = None

    def signs(self, hidden_ND: Tensor, vocabulary: int) -> Tensor | None:
        """Return the signs of all token ids, shape [V, S], if a sketch is requested."""
        return None if self.sketch is None else self.sketch.signs(hidden_ND.shape[1], vocabulary, hidden_ND.device)[1]


@dataclass
class Sums:
    """Sums over some token ids, for each token.

    Attributes:
        target_N: z of the target; -inf if it is not among these token ids.
        max_N: m, the largest z of the others, at least -1e30.
        exp_N: Sum of e^(z-m).
        square_N: Sum of e^2(z-m); None unless requested, like the rest.
        moment_N: Sum of (z-m) e^(z-m).
        signed_NS: Sum of e^(z-m) times the token id's signs in a sketch.
        row_ND: Sum of e^(z-m) times the token id's row of the head's weight.
    """

    target_N: Tensor
    max_N: Tensor
    exp_N: Tensor
    square_N: Tensor | None = None
    moment_N: Tensor | None = None
    signed_NS: Tensor | None = None
    row_ND: Tensor | None = None

    def scale_(self, max_N: Tensor) -> Sums:
        """Rescale the sums to another maximum, which is not smaller."""
        below_N = self.max_N - max_N
        scale_N = below_N.exp()
        self.max_N = max_N
        if self.moment_N is not None:
            self.moment_N.addcmul_(below_N, self.exp_N).mul_(scale_N)
        if self.square_N is not None:
            self.square_N.mul_(scale_N).mul_(scale_N)
        for vector in (self.signed_NS, self.row_ND):
            if vector is not None:
                vector.mul_(scale_N[:, None])
        self.exp_N.mul_(scale_N)
        return self

    def add_(self, other: Sums) -> Sums:
        """Add the sums over other token ids; consumes `other`."""
        self.target_N = torch.maximum(self.target_N, other.target_N)
        max_N = torch.maximum(self.max_N, other.max_N)
        self.scale_(max_N)
        other.scale_(max_N)
        for name in ("exp_N", "square_N", "moment_N", "signed_NS", "row_ND"):
            if getattr(self, name) is not None:
                getattr(self, name).add_(getattr(other, name))
        return self


def check_targets(targets_N: Tensor, vocabulary: int) -> None:
    """Raise a ValueError for token ids outside the vocabulary; on CUDA by an asynchronous assertion."""
    valid = ((targets_N >= 0) & (targets_N < vocabulary)).all()
    message = f"targets_N has token ids outside the head's vocabulary; pass ids from 0 to {vocabulary - 1}."
    if targets_N.device.type != "cpu":
        torch._assert_async(valid, message)
    elif not valid:
        raise ValueError(message)


class Targets:
    """The targets' positions in a block.

    Args:
        targets_N: Token ids.
        start: The block's first token id.
        width: C.
    """

    def __init__(self, targets_N: Tensor, start: int, width: int) -> None:
        local_N = targets_N - start
        self.inside_N1 = ((local_N >= 0) & (local_N < width))[:, None]
        self.column_N1 = local_N.clamp(0, width - 1)[:, None]

    def get(self, block_NC: Tensor) -> Tensor:
        """Return the entry of each row's target, shape [N, 1]; arbitrary if it is in another block."""
        return block_NC.gather(1, self.column_N1)

    def put(self, block_NC: Tensor, value_N1: Tensor) -> None:
        """Write the entry of each row's target if it is in this block."""
        entry_N1 = torch.where(self.inside_N1, value_N1.to(block_NC.dtype), self.get(block_NC))
        block_NC.scatter_(1, self.column_N1, entry_N1)


def add_block(
    sums: Sums | None,
    logits_NC: Tensor,
    targets_N: Tensor,
    options: ScoreOptions,
    *,
    start: int = 0,
    signs_VS: Tensor | None = None,
    rows_CD: Tensor | None = None,
) -> Sums:
    """Add a block to the sums that the scores need. On CUDA this takes one kernel launch, unless a sketch is requested.

    Args:
        sums: The sums over earlier blocks, overwritten; None for the first block.
        logits_NC: The block, shape [N, C]; overwritten if `rows_CD` is given.
        targets_N: Token ids.
        options: The requested scores.
        start: The block's first token id.
        signs_VS: Signs of all token ids, if a sketch is requested.
        rows_CD: The block's rows of the head's weight, to sum them, too.
    """
    kernels = fused(logits_NC)
    if kernels is None or signs_VS is not None:
        block = sum_block(logits_NC, Targets(targets_N, start, logits_NC.shape[1]), options, signs_VS, start, rows_CD)
        return block if sums is None else sums.add_(block)
    if sums is None:
        target_N, max_N, *more = logits_NC.new_zeros(5, len(targets_N), dtype=torch.float32).unbind()
        sums = Sums(target_N.fill_(-torch.inf), max_N.fill_(LOWEST), *more)
        sums.square_N = sums.square_N if options.score_norm else None
        sums.moment_N = sums.moment_N if options.entropy else None
    scale_N = None if rows_CD is None else torch.empty_like(sums.max_N)
    running = (sums.target_N, sums.max_N, sums.exp_N, sums.square_N, sums.moment_N)
    kernels.add_rows(logits_NC, targets_N, start, options.temperature, *running, scale_N)
    if rows_CD is not None and scale_N is not None:
        row_ND = (logits_NC @ rows_CD).to(scale_N.dtype)
        sums.row_ND = row_ND if sums.row_ND is None else sums.row_ND.mul_(scale_N[:, None]).add_(row_ND)
    return sums


def sum_block(
    logits_NC: Tensor,
    targets: Targets,
    options: ScoreOptions,
    signs_VS: Tensor | None,
    start: int,
    rows_CD: Tensor | None,
) -> Sums:
    """Compute the sums over a block by PyTorch's operators; see `add_block`."""
    square, moment, temperature = options.score_norm, options.entropy, options.temperature
    dtype = torch.promote_types(logits_NC.dtype, torch.float32)
    own_N1 = targets.get(logits_NC).to(dtype) / temperature
    signs_CS = None if signs_VS is None else signs_VS[start : start + logits_NC.shape[1]].to(dtype)
    without_N1 = own_N1.masked_fill(targets.inside_N1, -torch.inf)
    max_N, exp_N, square_N, moment_N = own_N1.new_empty(4, len(own_N1)).unbind()
    signed_NS = None if signs_CS is None else own_N1.new_empty(len(own_N1), signs_CS.shape[1])
    spare_RC = tile_like(logits_NC, dtype) if moment else None
    for rows, z_RC in tiles(logits_NC, dtype, temperature):
        z_RC.scatter_(1, targets.column_N1[rows], without_N1[rows])
        max_R = torch.amax(z_RC, 1, out=max_N[rows]).clamp_(min=LOWEST)
        z_RC.sub_(max_R[:, None])
        if spare_RC is None:
            e_RC = z_RC.exp_()
        else:
            e_RC = torch.exp(z_RC.clamp_(min=LOWEST), out=spare_RC[: len(z_RC)])
            torch.sum(z_RC.mul_(e_RC), 1, out=moment_N[rows])
        torch.sum(e_RC, 1, out=exp_N[rows])
        if square:
            torch.linalg.vector_norm(e_RC, dim=1, out=square_N[rows]).square_()
        if signed_NS is not None and signs_CS is not None:
            torch.mm(e_RC, signs_CS, out=signed_NS[rows])
        if rows_CD is not None:
            logits_NC[rows] = e_RC
    row_ND = None if rows_CD is None else (logits_NC @ rows_CD).to(dtype)
    target_N = own_N1.masked_fill(~targets.inside_N1, -torch.inf).squeeze(1)
    return Sums(target_N, max_N, exp_N, square_N if square else None, moment_N if moment else None, signed_NS, row_ND)


def fused(block_NC: Tensor) -> ModuleType | None:
    """Return the Triton kernels for blocks on CUDA, if Triton is installed (it comes with PyTorch for CUDA)."""
    fits = block_NC.is_cuda and block_NC.dtype != torch.float64 and block_NC.stride(1) == 1
    if not fits or not _HAS_TRITON:
        return None
    from pl_grouprl.functional import softmax_triton

    return softmax_triton


def tile_like(block_NC: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocate a tile for the rows of the block that are processed together, shape [R, C]."""
    rows, width = block_NC.shape
    if block_NC.device.type == "cpu":
        rows = min(rows, max(_TILE * torch.get_num_threads() // max(width, 1), 1))
    return block_NC.new_empty(rows, width, dtype=dtype)


def tiles(logits_NC: Tensor, dtype: torch.dtype, temperature: float) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows of the block and a copy divided by the temperature; each copy overwrites the previous one."""
    tile_RC = tile_like(logits_NC, dtype)
    height = max(len(tile_RC), 1)
    for start in range(0, len(logits_NC), height):
        rows = slice(start, min(start + height, len(logits_NC)))
        z_RC = tile_RC[: rows.stop - start].copy_(logits_NC[rows])
        yield rows, z_RC if temperature == 1.0 else z_RC.div_(temperature)


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

    def gradient(self, temperature: float, grad_N: Tensor | None, entropy_grad_N: Tensor | None) -> LogitsGradient:
        """Return the gradient with respect to the logits.

        With the upstream gradients g of the log-probability and k of the entropy H,
            dL/dlogit_v = (g (1[v = a] - p_v) - k p_v (log p_v + H)) / temperature

        Args:
            temperature: Divides the logits.
            grad_N: g; zero if None.
            entropy_grad_N: k; zero if None.
        """
        g_N = (torch.zeros_like(self.log_total_N) if grad_N is None else grad_N) / temperature
        target_N, factor_N, entropy_factor_N = g_N * self.other_N, -g_N, None
        if entropy_grad_N is not None and self.entropy_N is not None:
            k_N = entropy_grad_N / temperature
            logprobs_N = self.logprobs_N.clamp(min=LOWEST)
            target_N -= k_N * logprobs_N.exp() * (logprobs_N + self.entropy_N)
            factor_N, entropy_factor_N = -g_N - k_N * self.entropy_N, -k_N
        return LogitsGradient(self.log_total_N, temperature, target_N, factor_N, entropy_factor_N)


class LogitsGradient(NamedTuple):
    """The gradient with respect to the logits: p (alpha + beta log p), p = e^(z - log_total), except for the target.

    Attributes:
        log_total_N: Log of the sum of e^z over the vocabulary.
        temperature: Divides the logits.
        target_N: The gradient with respect to the target's logit.
        factor_N: alpha.
        entropy_factor_N: beta; zero if None.
    """

    log_total_N: Tensor
    temperature: float
    target_N: Tensor
    factor_N: Tensor
    entropy_factor_N: Tensor | None

    def write(self, logits_NC: Tensor, result_NC: Tensor, targets_N: Tensor, start: int = 0) -> None:
        """Write the gradient with respect to a block of logits, whose first token id is `start`, to `result_NC`.

        `result_NC` may be `logits_NC`. On CUDA this takes one kernel launch.
        """
        kernels, dtype = fused(logits_NC), self.log_total_N.dtype
        if kernels is not None:
            kernels.write_rows(logits_NC, result_NC, targets_N, start, *self)
            return
        # First as if no token id were a target; the targets' entries are overwritten below.
        spare_RC = None if self.entropy_factor_N is None else tile_like(logits_NC, dtype)
        for rows, z_RC in tiles(logits_NC, dtype, self.temperature):
            z_RC.sub_(self.log_total_N[rows, None])
            if self.entropy_factor_N is None or spare_RC is None:
                z_RC.exp_().mul_(self.factor_N[rows, None])
            else:
                p_RC = torch.exp(z_RC.clamp_(min=LOWEST), out=spare_RC[: len(z_RC)])
                z_RC.mul_(self.entropy_factor_N[rows, None]).add_(self.factor_N[rows, None]).mul_(p_RC)
            result_NC[rows] = z_RC
        Targets(targets_N, start, logits_NC.shape[1]).put(result_NC, self.target_N[:, None])


def finish(
    others: Sums, options: ScoreOptions, hidden_ND: Tensor, targets_N: Tensor, vocabulary: int
) -> tuple[Softmax, Outputs]:
    """Add the targets to the sums over all other token ids, and compute the scores.

    Args:
        others: The sums over all other token ids; overwritten.
        options: The requested scores.
        hidden_ND: Hidden states, for the sketch.
        targets_N: Token ids.
        vocabulary: V.
    """
    others.scale_(torch.maximum(others.max_N, others.target_N))
    below_N = others.target_N - others.max_N
    exp_N = below_N.exp()
    total_N = others.exp_N + exp_N
    log_N = total_N.log()
    other_N = others.exp_N / total_N
    entropy_N = norm_N = sketch_NS = None
    if others.moment_N is not None:
        entropy_N = log_N - (others.moment_N + below_N.clamp(min=LOWEST) * exp_N) / total_N
    if others.square_N is not None:
        norm_N = other_N.square() + others.square_N / total_N.square()
    if options.sketch is not None and others.signed_NS is not None:
        mean_NS = others.signed_NS / total_N[:, None]
        sketch_NS = options.sketch.project(hidden_ND, targets_N, other_N, mean_NS, vocabulary)
    softmax = Softmax(others.max_N + log_N, below_N - log_N, other_N, entropy_N)
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
        """Score logits before the temperature; the hidden states, detached, are for the sketch."""
        vocabulary = logits_NV.shape[1]
        check_targets(targets_N, vocabulary)
        signs_VS = options.signs(hidden_ND, vocabulary)
        sums = add_block(None, logits_NV, targets_N, options, signs_VS=signs_VS)
        softmax, outputs = finish(sums, options, hidden_ND, targets_N, vocabulary)
        ctx.save_for_backward(logits_NV, targets_N, *softmax)
        ctx.options = options
        mark_detached(ctx, outputs, options)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradient with respect to the logits."""
        logits_NV, targets_N, *saved = ctx.saved_tensors
        result_NV = torch.empty_like(logits_NV)
        Softmax(*saved).gradient(ctx.options.temperature, *gradients[:2]).write(logits_NV, result_NV, targets_N)
        return result_NV, None, None, None
