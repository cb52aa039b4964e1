"""Slices of a group: some of its rollouts, which continue what ran in an earlier call.

Legend: B rollouts of the slice, N response tokens of theirs, P tokens of the path from the prompt down, K of them
response tokens, S tokens of the slice after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from pl_grouprl.packing.batch import ScoringBatch, pack
from pl_grouprl.packing.layout import SharedPrefixLayout
from pl_grouprl.packing.trie import MIN_SAVED_TOKENS
from pl_grouprl.types import RolloutGroup


class PathRun(Protocol):
    """One run of what the rollouts of slices begin with; `models.PrefixPass` is one.

    Attributes:
        num_tokens: P: the prompt, and what all rollouts have in common after it.
        path_ids: The K response tokens among them.
        batch: Its last segment alone.
    """

    num_tokens: int
    path_ids: list[int]
    batch: ScoringBatch


def pack_slice(
    group: RolloutGroup,
    rollout_indices: Sequence[int],
    prefix: PathRun,
    device: torch.device | str = "cpu",
    *,
    min_saved_tokens: int | None = MIN_SAVED_TOKENS,
) -> ScoringBatch:
    """Lay out some rollouts of a group for a decoder call that continues the run of `prefix`.

    Args:
        group: The group; its prompt is not read.
        rollout_indices: The rollouts to lay out, in this order. Each begins with `prefix.path_ids`, or is the beginning
            of them.
        prefix: The run of the prompt, or of a branch.
        device: Device of the batch's tensors.
        min_saved_tokens: As in `pack`.

    Returns:
        A batch whose indices point into [1 + K + S, D]: the hidden state of the prompt's last token, of the K tokens,
        then those of the others. If there are no others, one unused token runs, so every slice calls the decoder.

    Raises:
        ValueError: If `rollout_indices` is empty.
    """
    rollouts = [group.rollouts[index] for index in rollout_indices]
    if not rollouts:
        raise ValueError("rollout_indices is empty; a slice has at least one rollout.")
    # Packing after a one-token prompt, whose hidden state comes first, gives exactly these indices.
    path, given = prefix.path_ids, prefix.num_tokens
    alone = RolloutGroup([0], rollouts, 0 if group.group_id is None else group.group_id)
    batch = pack([alone], path=path, min_saved_tokens=min_saved_tokens, device=device)
    merged = 2 if path else 1  # segments of the path, which is one here
    segments = batch.layout.segments[merged:]
    lengths = [given, *(segment.length for segment in segments)]
    parents = [None, *(segment.parent - merged + 1 for segment in segments if segment.parent is not None)]
    tokens = batch.model_inputs["input_ids"][:, 1 + len(path) :]
    if not tokens.numel():
        tokens, lengths = tokens.new_zeros(1, 1), [*lengths[:-1], 1]
    layout = SharedPrefixLayout(lengths, parents, [alone.group_id] * len(lengths), given=given)
    inputs = {
        "input_ids": tokens,
        "position_ids": layout.position_ids[None, given:].to(device),
        "prefix_layout": layout,
    }
    return replace(batch, model_inputs=inputs, layout=layout, prefix=prefix, sequence_group=prefix.batch.sequence_group)
