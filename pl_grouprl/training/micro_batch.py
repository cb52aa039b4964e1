"""One forward and backward of an update: rollouts laid out for the decoder, with their per-token quantities.

Legend: B rollouts, N response tokens of all rollouts, concatenated.
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
        tokens: The buffer's per-token quantities, by name, on the module's device.
        groups: The groups, reduced to their rollouts in this micro-batch.
        rollout_numbers: Index of each rollout in its rank's buffer, shape [B]; empty for a dummy.
        weight: This rank's share: 1 / s if s ranks compute the micro-batch together.
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
        """Each token's rollout and the number of rollouts: keyword arguments of the losses."""
        return {"rollout_index_N": self.scoring.rollout_index_N, "num_rollouts": self.scoring.num_rollouts}

    def repack(self, groups: Sequence[RolloutGroup]) -> ScoringBatch:
        """Lay out truncated groups the same way."""
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
    """Lay out groups, or the rollouts of one group whose prefix has already run.

    Args:
        groups: The groups to score.
        sharing: How a row is packed.
        device: Device of the tensors.
        prefix: For a slice of a group's rollouts, the pass through its prompt.
        sequence_group: Process group that splits the tokens of the row over its ranks.
    """
    if prefix is not None:
        (group,) = groups
        return pack_slice(group, range(len(group.rollouts)), prefix, device)
    return replace(pack(groups, sharing, device=device), sequence_group=sequence_group)


def dummy_group(like: RolloutGroup) -> RolloutGroup:
    """A dummy group of a token or two for ranks with no work left; keeps the prompt's images, if any."""
    prompt = like.prompt_ids if like.media else like.prompt_ids[:1]
    return replace(like, prompt_ids=prompt, rollouts=[Rollout(like.prompt_ids[-1:], logprobs=[0.0])])


def dummy_tokens(like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Per-token quantities of the dummy group: nothing is trained or rewarded.

    Args:
        like: Quantities whose names and dtypes are copied.
    """
    return {name: torch.zeros(1, *values.shape[1:], dtype=values.dtype) for name, values in like.items()}
