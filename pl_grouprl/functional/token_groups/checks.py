"""Argument checks of the functions that split a response into token groups.

Legend: B rollouts, T length of the longest row, S size of a sketch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pl_grouprl.functional.masked import bool_mask

_NEGATIVE = 1e-2  # computed in bfloat16, 1 - 2 p + sum p^2 may be this far below 0


def check_arguments(
    td_errors: Tensor,
    score_norms: Tensor,
    mask: Tensor,
    forced_ends: Tensor | None,
    threshold: float,
    max_size: int,
    epsilon: float,
) -> Tensor:
    """Check the arguments of `find_token_groups`; see there for their meaning.

    Returns:
        The mask as bool, shape [B, T].

    Raises:
        ValueError: Names the argument, its value and the remedy.
    """
    check_shapes(td_errors, score_norms, mask, forced_ends)
    if forced_ends is not None and forced_ends.dtype != torch.bool:
        raise ValueError(f"forced_ends has dtype {forced_ends.dtype}; pass bool, such as forced_ends.bool().")
    if not (threshold > 0 and math.isfinite(threshold)):
        raise ValueError(
            f"threshold is {threshold}; it must be a finite number above 0 (up to 1, every token ends a group)."
        )
    check_max_size("max_size", max_size)
    if not 0 <= epsilon < math.inf:
        raise ValueError(f"epsilon is {epsilon}; it must be a finite number, 0 or larger.")
    mask_BT = bool_mask(mask)
    negative_BT = mask_BT & (score_norms < -_NEGATIVE) if score_norms.dim() == 2 else mask_BT[:0]
    if negative_BT.any():
        raise ValueError(
            f"score_norms has the entry {score_norms[negative_BT][0].item()}; pass squared norms, 0 or larger, such as "
            "score_norms.clamp(min=0)."
        )
    return mask_BT


def check_max_size(name: str, max_size: int) -> None:
    """Refuse a maximum group size that is not a positive integer.

    Raises:
        ValueError: Gives the name and the value.
    """
    if not (1 <= max_size < math.inf and max_size == int(max_size)):
        raise ValueError(f"{name} is {max_size}; it must be a whole number of tokens, at least 1.")


def check_shapes(td_errors: Tensor, score_norms: Tensor, mask: Tensor, forced_ends: Tensor | None = None) -> None:
    """Refuse arguments that do not share the axes B and T.

    Raises:
        ValueError: Naming the argument, and both shapes.
    """
    shape = td_errors.shape
    if len(shape) != 2:
        raise ValueError(f"td_errors has shape {tuple(shape)}; pass one row of tokens per rollout, shape [B, T].")
    if score_norms.dim() not in (2, 3) or score_norms.shape[:2] != shape:
        raise ValueError(
            f"score_norms has shape {tuple(score_norms.shape)} and td_errors {tuple(shape)}; pass a norm [B, T] or a "
            "vector [B, T, S] per token."
        )
    for name, tensor in (("mask", mask), ("forced_ends", forced_ends)):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and td_errors {tuple(shape)}; pass both as [B, T]."
            )
