"""What one pass of an update reads: rollouts laid out for the decoder, with their per-token quantities.

Legend: B rollouts, N response tokens of all rollouts one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pl_grouprl.models.prefix_pass import PrefixPass
from pl_grouprl.packing import ScoringBatch, Sharing, pack
from pl_grouprl.packing.slices import pack_slice
from pl_grouprl.types import Rollout, RolloutGroup


@dataclass(frozen=True)
class MicroBatch:
    """Whole groups, or a slice of one, laid out for one decoder call, with their per-token quantities on the axis N.

    Attributes:
        scoring: The decoder call.
        tokens: What the buffer holds, by name, on the module's device.
        groups: The groups themselves, with those of their rollouts that take part.
        rollout_numbers: Place of each rollout in the buffer of the rank that holds it, shape [B]; empty for a filler.
        weight: This rank's share of the pass: 1 / s where s ranks compute it together.
    """

    scoring: ScoringBatch
    tokens: dict[str, Tensor]
    groups: Sequence[RolloutGroup]
    rollout_numbers: tuple[int, ...] = ()
    weight: float = 1.0

    @property
    def mask_N(self) -> Tensor:
        """Which tokens are trained."""
        return self.tokens["loss_mask"]

    @property
    def rollouts(self) -> dict[str, Any]:
        """Which rollout each token belongs to, and their number: keyword arguments of the losses."""
        return {"rollout_index_N": self.scoring.rollout_index_N, "num_rollouts": self.scoring.num_rollouts}

    def repack(self, groups: Sequence[RolloutGroup]) -> ScoringBatch:
        """Lay out shortened groups for a decoder call of the same kind."""
        return lay_out(
            groups, self.scoring.sharing, self.mask_N.device, self.scoring.prefix, self.scoring.sequence_group
        )


def lay_out(
    groups: Sequence[RolloutGroup],
    sharing: Sharing,
    device: torch.device,
    prefix: PrefixPass | None = None,
    sequence_group: Any = None,
) -> ScoringBatch:
    """Lay out groups, or, behind a prefix that has been run, the rollouts of the one group.

    Args:
        groups: What is to be scored.
        sharing: How a row is packed.
        device: Where the tensors are put.
        prefix: The pass of the group's prompt, for a slice of its rollouts.
        sequence_group: The process group that shares the tokens of the row among its ranks.
    """
    if prefix is not None:
        (group,) = groups
        return pack_slice(group, range(len(group.rollouts)), prefix, device)
    return replace(pack(groups, sharing, device=device), sequence_group=sequence_group)


def dummy_group(like: RolloutGroup) -> RolloutGroup:
    """A group of a token or two that stands for nothing; with the images of a prompt where it has any."""
    prompt = like.prompt_ids if like.media else like.prompt_ids[:1]
    return replace(like, prompt_ids=prompt, rollouts=[Rollout(like.prompt_ids[-1:], logprobs=[0.0])])


def dummy_tokens(like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Quantities of its one token: nothing is trained, nothing is rewarded.

    Args:
        like: Quantities of other tokens, whose names and dtypes are taken.
    """
    return {name: torch.zeros(1, *values.shape[1:], dtype=values.dtype) for name, values in like.items()}
