"""Packs a slice of a group: rollouts that continue a prompt or branch that ran in an earlier call.

Legend: B rollouts of the slice, N their response tokens, P tokens of the path (the prompt and the branches above the
slice), K response tokens of the path, S tokens of the slice after the path, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from pl_grouprl.packing.batch import ScoringBatch, pack
from pl_grouprl.packing.layout import SharedPrefixLayout
from pl_grouprl.packing.trie import MIN_SAVED_TOKENS
from pl_grouprl.types import Rollout, RolloutGroup


class PathRun(Protocol):
    """A pass over the path that slices continue; `models.PrefixPass` is one.

    Attributes:
        num_tokens: P.
        batch: The prompt or the lowest branch, without the path above it.
    """

    num_tokens: int
    batch: ScoringBatch

    @property
    def path_ids(self) -> list[int]:
        """The K response tokens of the path."""


def pack_slice(
    group: RolloutGroup,
    rollout_indices: Sequence[int],
    prefix: PathRun,
    device: torch.device | str = "cpu",
    *,
    min_saved_tokens: int | None = MIN_SAVED_TOKENS,
) -> ScoringBatch:
    """Lay out some rollouts of a group for a decoder call that continues `prefix`.

    Args:
        group: The group; its prompt is not read.
        rollout_indices: The rollouts to lay out, in this order. Each begins with `prefix.path_ids`, or is a prefix of
            them.
        prefix: The pass over the prompt or branch that they continue.
        device: Device of the batch's tensors.
        min_saved_tokens: As in `pack`.

    Returns:
        A batch whose indices refer to hidden states [1 + K + S, D]: of the prompt's last token, of the K tokens, and of
        the slice's S tokens. If no token is left to run, one unused token runs, so every slice calls the decoder.

    Raises:
        ValueError: If `rollout_indices` is empty.
    """
    rollouts = [group.rollouts[index] for index in rollout_indices]
    if not rollouts:
        raise ValueError("rollout_indices is empty; a slice has at least one rollout.")
    # Packing after a one-token stand-in for the prompt gives exactly these indices.
    path, num_prefilled = prefix.path_ids, prefix.num_tokens
    stand_in = RolloutGroup([0], rollouts, 0 if group.group_id is None else group.group_id)
    batch = pack([stand_in], path=path, min_saved_tokens=min_saved_tokens, device=device)
    num_merged = 2 if path else 1  # the stand-in and the path become one prefilled segment
    segments = batch.layout.segments[num_merged:]
    lengths = [num_prefilled, *(segment.length for segment in segments)]
    parents = [None, *(segment.parent - num_merged + 1 for segment in segments if segment.parent is not None)]
    tokens = batch.model_inputs["input_ids"][:, 1 + len(path) :]
    if not tokens.numel():
        tokens, lengths = tokens.new_zeros(1, 1), [*lengths[:-1], 1]
    layout = SharedPrefixLayout(lengths, parents, [stand_in.group_id] * len(lengths), num_prefilled=num_prefilled)
    return _after(prefix, batch, tokens, layout)


def pack_branch(token_ids: Sequence[int], prefix: PathRun, device: torch.device | str = "cpu") -> ScoringBatch:
    """Lay out a run of shared tokens for a decoder call that continues `prefix`, as a prompt that has no rollouts.

    Args:
        token_ids: Its tokens.
        prefix: The pass over the prompt or branch that it continues.
        device: Device of the batch's tensors.
    """
    batch = pack([RolloutGroup(list(token_ids), [Rollout([])])], device=device)
    layout = SharedPrefixLayout([prefix.num_tokens, len(token_ids), 0], [None, 0, 1], num_prefilled=prefix.num_tokens)
    return _after(prefix, batch, batch.model_inputs["input_ids"], layout)


def _after(prefix: PathRun, batch: ScoringBatch, tokens: Tensor, layout: SharedPrefixLayout) -> ScoringBatch:
    """A batch whose tokens continue those of `prefix`, in another layout."""
    inputs = {
        "input_ids": tokens,
        "position_ids": layout.position_ids[None, layout.num_prefilled :].to(tokens.device),
        "prefix_layout": layout,
    }
    return replace(batch, model_inputs=inputs, layout=layout, prefix=prefix, sequence_group=prefix.batch.sequence_group)
