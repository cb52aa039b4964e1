"""Slices of a group: some of its rollouts, which continue a prompt from an earlier call.

Legend: B rollouts of the slice, S their tokens, N response tokens, P tokens of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from pl_grouprl.packing.batch import ScoringBatch, pack
from pl_grouprl.packing.layout import SharedPrefixLayout
from pl_grouprl.types import RolloutGroup


class PromptRun(Protocol):
    """One run of a group's prompt, which its slices continue; `models.PrefixPass` is one.

    Attributes:
        num_tokens: Tokens of the prompt.
        batch: The prompt, without rollouts.
    """

    num_tokens: int
    batch: ScoringBatch


def pack_slice(
    group: RolloutGroup, rollout_indices: Sequence[int], prefix: PromptRun, device: torch.device | str = "cpu"
) -> ScoringBatch:
    """Lay out some rollouts of a group for a decoder call that continues from the prompt run in `prefix`.

    Args:
        group: The group; its prompt is not read.
        rollout_indices: The rollouts to lay out, in this order.
        prefix: The run of the prompt.
        device: Device of the batch's tensors.

    Returns:
        A batch whose indices point into [1 + S, D]: the hidden state of the prompt's last token, then those of the
        rollouts' tokens. If all rollouts are empty, one dummy token runs, so every slice calls the decoder.

    Raises:
        ValueError: If `rollout_indices` is empty.
    """
    rollouts = [group.rollouts[index] for index in rollout_indices]
    if not rollouts:
        raise ValueError("rollout_indices is empty; a slice has at least one rollout.")
    # Packing with a one-token prompt, in place of the prompt's last hidden state, gives exactly these indices.
    batch = pack([RolloutGroup([0], rollouts, group.group_id)], device=device)
    tokens, given = batch.model_inputs["input_ids"][:, 1:], prefix.num_tokens
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    if not tokens.numel():
        tokens, lengths = tokens.new_zeros(1, 1), [*lengths, 1]
    name = group.group_id if group.group_id is not None else 0
    layout = SharedPrefixLayout.from_groups([(given, lengths)], [name], given=given)
    inputs = {
        "input_ids": tokens,
        "position_ids": layout.position_ids[None, given:].to(device),
        "prefix_layout": layout,
    }
    return replace(batch, model_inputs=inputs, layout=layout, prefix=prefix, sequence_group=prefix.batch.sequence_group)
