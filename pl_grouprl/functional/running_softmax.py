"""Softmax over a vocabulary in blocks: the sums from which scores of tokens are computed.

Legend: N tokens, C columns (token ids) of one block, R rows of one tile, S size of a sketch.

With z the logits over the temperature and m their maximum so far, the sums over token ids of e^(z-m), of its square and
of (z-m) e^(z-m) give log-probability, score norm and entropy. Each block is summed separately; two sets of sums are
scaled to the larger maximum and added (online softmax: Milakov and Gimelshein, arXiv:1805.02867). The sums exclude the
target until the end, because 1 - p_a and what depends on it would cancel for p_a near 1.

Blocks are processed in tiles of a few rows, which fit into the processor's cache, in float32 (float64 for float64
logits).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

_TILE = 2**18  # elements per CPU thread
LOWEST = -1e30  # instead of -inf: its exponential is 0, and 0 * LOWEST is 0, not NaN


@dataclass
class Sums:
    """Sums over some token ids, for each token.

    Attributes:
        max_N: m, the largest z, at least -1e30.
        exp_N: Sum of e^(z-m).
        square_N: Sum of e^2(z-m); None unless requested, like the rest.
        moment_N: Sum of (z-m) e^(z-m).
        signed_NS: Sum of e^(z-m) times the token id's signs in a sketch.
        row_ND: Sum of e^(z-m) times the token id's row of the head's weight.
    """

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
        max_N = torch.maximum(self.max_N, other.max_N)
        self.scale_(max_N)
        other.scale_(max_N)
        for name in ("exp_N", "square_N", "moment_N", "signed_NS", "row_ND"):
            if getattr(self, name) is not None:
                getattr(self, name).add_(getattr(other, name))
        return self


def check_targets(targets_N: Tensor, vocabulary: int) -> None:
    """Refuse token ids outside the vocabulary; on CUDA by an asynchronous assertion.

    Raises:
        ValueError: If there are any.
    """
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


def sum_block(
    logits_NC: Tensor,
    targets: Targets,
    temperature: float,
    *,
    square: bool = False,
    moment: bool = False,
    signs_CS: Tensor | None = None,
    keep_exp: bool = False,
) -> tuple[Sums, Tensor]:
    """Sum over a block, excluding the targets.

    Args:
        logits_NC: The block, shape [N, C].
        targets: The block's targets.
        temperature: Divides the logits.
        square: Whether to sum the squares.
        moment: Whether to sum (z-m) e^(z-m).
        signs_CS: Signs of the block's token ids in a sketch, in the dtype of the sums, shape [C, S].
        keep_exp: Leave e^(z-m) in `logits_NC`, 0 in the target's place.

    Returns:
        The sums, and z of each target, arbitrary if the target is in another block.
    """
    dtype = torch.promote_types(logits_NC.dtype, torch.float32)
    own_N1 = targets.get(logits_NC).to(dtype) / temperature
    kernels = fused(logits_NC)
    if kernels is not None and signs_CS is None:
        column_N = torch.where(targets.inside_N1, targets.column_N1, -1).squeeze(1)
        max_N, exp_N, square_N, moment_N = kernels.sum_rows(logits_NC, column_N, temperature, keep_exp)
        return Sums(max_N, exp_N, square_N if square else None, moment_N if moment else None), own_N1.squeeze(1)
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
        if keep_exp:
            logits_NC[rows] = e_RC
    return Sums(max_N, exp_N, square_N if square else None, moment_N if moment else None, signed_NS), own_N1.squeeze(1)


def fused(block_NC: Tensor) -> ModuleType | None:
    """Return the Triton kernels for blocks on CUDA, if Triton is installed (it comes with PyTorch for CUDA)."""
    fits = block_NC.is_cuda and block_NC.dtype != torch.float64 and block_NC.stride(1) == 1
    if not fits or not _has_triton():
        return None
    from pl_grouprl.functional import softmax_triton

    return softmax_triton


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


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
