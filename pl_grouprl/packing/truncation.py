"""Truncates rollouts for decoder calls that only need results up to a certain token of each.

A causal decoder's result at a token does not depend on later tokens, so tokens after the last result needed do not have
to run, forward or backward. GROUP PPO trains its critic at the starts of token groups only.

Legend: B rollouts, N response tokens of all rollouts, concatenated, M of them that are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pl_grouprl.types import Rollout, RolloutGroup


class TruncatedGroups(NamedTuple):
    """Groups with truncated rollouts, and the original indices of their tokens.

    Attributes:
        groups: The same prompts with the first tokens of each rollout.
        kept_index_M: Index of each kept token among the original N, int64, ascending: `tensor_N[kept_index_M]` selects
            the truncated groups' part of any tensor of shape [N].
    """

    groups: list[RolloutGroup]
    kept_index_M: Tensor


def truncate_rollouts(groups: Sequence[RolloutGroup], lengths_B: Sequence[int] | Tensor) -> TruncatedGroups:
    """Keep the first tokens of each rollout.

    The value V[t] is read where token t is predicted, so for values up to token s of a rollout keep s + 1 tokens (one
    more than strictly needed, to keep the packed indices of `pack`).

    Args:
        groups: Prompts with their rollouts; unchanged. Only tokens and loss masks are copied.
        lengths_B: Number of tokens to keep of each rollout, over all groups in order.

    Raises:
        ValueError: If there is not one length per rollout, or one is negative or longer than its rollout.
    """
    lengths = [int(length) for length in lengths_B]
    full = [len(rollout.token_ids) for group in groups for rollout in group.rollouts]
    if len(lengths) != len(full):
        raise ValueError(f"lengths_B has {len(lengths)} entries for {len(full)} rollouts; pass one per rollout.")
    for number, (length, tokens) in enumerate(zip(lengths, full, strict=True)):
        if not 0 <= length <= tokens:
            raise ValueError(
                f"lengths_B[{number}] is {length}, but the rollout has {tokens} tokens; pass 0 to {tokens}."
            )
    remaining = iter(lengths)
    truncated = [
        RolloutGroup(
            group.prompt_ids,
            [_first_tokens(rollout, next(remaining)) for rollout in group.rollouts],
            group.group_id,
            media=group.media,
        )
        for group in groups
    ]
    return TruncatedGroups(truncated, _kept_index(full, lengths))


def _first_tokens(rollout: Rollout, length: int) -> Rollout:
    mask = rollout.loss_mask
    return Rollout(rollout.token_ids[:length], loss_mask=None if mask is None else mask[:length])


def _kept_index(full: list[int], lengths: list[int]) -> Tensor:
    index: list[int] = []
    start = 0
    for tokens, length in zip(full, lengths, strict=True):
        index += range(start, start + length)
        start += tokens
    return torch.tensor(index, dtype=torch.long)
