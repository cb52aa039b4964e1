"""Masked sums and means on the flat token axis, and the shape checks that every function there begins with.

Legend: B rollouts, N response tokens of all rollouts in one row (flat, no padding).
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_flat(**tensors: Tensor) -> None:
    """Refuse arguments that do not share one flat axis.

    Args:
        **tensors: Arguments by name; the first one sets the length that the others must have.

    Raises:
        ValueError: If one is not one-dimensional, or the lengths differ.
    """
    names = iter(tensors.items())
    first_name, first = next(names)
    for name, tensor in ((first_name, first), *names):
        if tensor.dim() != 1:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; pass one value per token on one flat axis, without padding."
            )
        if len(tensor) != len(first):
            raise ValueError(
                f"{name} has {len(tensor)} entries and {first_name} has {len(first)}; pass one per token for both."
            )


def check_mask(mask_N: Tensor) -> None:
    """Refuse a mask of another dtype than bool: on integers `~` means something else.

    Args:
        mask_N: True for tokens to train.

    Raises:
        ValueError: If it is not bool.
    """
    if mask_N.dtype != torch.bool:
        raise ValueError(f"mask_N has dtype {mask_N.dtype}; pass bool, such as mask_N.bool().")


def masked_sum(values_N: Tensor, mask_N: Tensor) -> Tensor:
    """Sum the values where the mask is true; NaN and infinities elsewhere do not reach the sum or its gradient.

    Args:
        values_N: Any values, shape [N].
        mask_N: Which to add, bool, shape [N].

    Returns:
        A scalar; 0 if the mask is false everywhere.
    """
    check_flat(values_N=values_N, mask_N=mask_N)
    check_mask(mask_N)
    return values_N.masked_fill(~mask_N, 0).sum()


def masked_mean(values_N: Tensor, mask_N: Tensor) -> Tensor:
    """Average the values where the mask is true.

    Args:
        values_N: Any values, shape [N].
        mask_N: Which to average, bool, shape [N].

    Returns:
        A scalar; 0 if the mask is false everywhere.
    """
    return masked_sum(values_N, mask_N) / mask_N.sum().clamp(min=1)


def sum_per_rollout(values_N: Tensor, rollout_index_N: Tensor, num_rollouts: int) -> Tensor:
    """Add up the values of each rollout.

    Args:
        values_N: Any values, shape [N].
        rollout_index_N: The rollout that each token belongs to, int64 in [0, num_rollouts), shape [N], in any order.
        num_rollouts: B. A rollout without tokens gets 0.

    Returns:
        Sums, shape [B], in the dtype of the values.
    """
    check_flat(values_N=values_N, rollout_index_N=rollout_index_N)
    return values_N.new_zeros(num_rollouts).index_add(0, rollout_index_N, values_N)


def bool_mask(mask: Tensor) -> Tensor:
    """Turn a mask of 0 and 1, which other projects' masks are, into bool.

    Args:
        mask: Any shape; bool, or 0 and 1 of another dtype.

    Returns:
        The same shape, bool.

    Raises:
        ValueError: If it holds anything else, such as weights.
    """
    if mask.dtype == torch.bool:
        return mask
    other = (mask != 0) & (mask != 1)
    if other.any():
        raise ValueError(f"mask has the entry {mask[other][0].item()}; pass bool, or 0 and 1.")
    return mask != 0
