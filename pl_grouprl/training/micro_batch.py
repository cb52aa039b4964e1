"""One forward and backward of an update: rollouts laid out for the decoder, with their per-token quantities.

Legend: B rollouts, E episodes, N response tokens of all rollouts, concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pl_grouprl.models.prefix_pass import PrefixPass
from pl_grouprl.packing import ScoringBatch, Sharing, pack
from pl_grouprl.packing.slices import pack_slice
from pl_grouprl.packing.trie import MIN_SAVED_TOKENS
from pl_grouprl.types import Rollout, RolloutGroup


@dataclass(frozen=True)
class RowOptions:
    """How rollouts are laid out.

    Attributes:
        sharing: `shared` or `repeated`.
        max_tokens: Most tokens of a micro-batch on one rank; None is no limit.
        device: Device of the tensors.
        sequence_group: The ranks that split the tokens of each row; None if every rank runs its own rows.
        sequence_ranks: Number of those ranks.
        share_across_groups: Whether prompts share their beginning; see `packing.pack`.
        min_saved_tokens: What rollouts must save to share a segment; see `packing.build_trie`.
        whole_episodes: Whether all rows of an episode must be in one micro-batch. Not compared, because
            the layout of a row does not depend on it.
    """

    sharing: Sharing
    max_tokens: int | None
    device: torch.device
    sequence_group: Any = None
    sequence_ranks: int = 1
    share_across_groups: bool = False
    min_saved_tokens: int | None = MIN_SAVED_TOKENS
    whole_episodes: bool = field(default=False, compare=False)

    @property
    def tokens_per_row(self) -> int | None:
        """Most tokens of a row, on all ranks that split it; None is no limit."""
        return None if self.max_tokens is None else self.max_tokens * self.sequence_ranks


@dataclass(frozen=True)
class MicroBatch:
    """Whole groups, or a slice of one, laid out for one decoder call, with their per-token quantities on the axis N.

    Attributes:
        scoring: The decoder call.
        tokens: The buffer's per-token quantities, by name, on the module's device.
        groups: The groups, reduced to their rollouts in this micro-batch.
        rollout_numbers: Index of each rollout in its rank's buffer, shape [B]; empty for a dummy. In an update of a
            loss that is not overridden, in what is left of the buffer without idle rollouts.
        options: How it was laid out; None if it will not be laid out again.
    """

    scoring: ScoringBatch
    tokens: dict[str, Tensor]
    groups: Sequence[RolloutGroup]
    rollout_numbers: tuple[int, ...] = ()
    options: RowOptions | None = None

    @property
    def weight(self) -> float:
        """This rank's share: 1 / s if s ranks compute the micro-batch together."""
        return 1.0 if self.options is None else 1 / self.options.sequence_ranks

    @property
    def mask_N(self) -> Tensor:
        """Which tokens are trained."""
        return self.tokens["loss_mask"]

    @property
    def rollouts(self) -> dict[str, Any]:
        """Each token's rollout and the number of rollouts: keyword arguments of the losses.

        The rows of an episode in this micro-batch are one rollout.
        """
        index_N, num_rollouts = self.scoring.rollout_index_N, self.scoring.num_rollouts
        sizes = torch.tensor([rows for group in self.groups for rows in group.rows_per_episode])
        if len(sizes) < num_rollouts:
            index_E = torch.arange(len(sizes)).repeat_interleave(sizes)
            index_N, num_rollouts = index_E.to(index_N.device)[index_N], len(sizes)
        return {"rollout_index_N": index_N, "num_rollouts": num_rollouts}

    def repack(self, groups: Sequence[RolloutGroup]) -> ScoringBatch:
        """Lay out truncated groups the same way."""
        assert self.options is not None
        return lay_out(groups, self.options, self.scoring.prefix)


def lay_out(groups: Sequence[RolloutGroup], options: RowOptions, prefix: PrefixPass | None = None) -> ScoringBatch:
    """Lay out groups, or the rollouts of one group that continue what has already run.

    Args:
        groups: The groups to score.
        options: How.
        prefix: For a slice of a group's rollouts, the pass through its prompt or a branch.
    """
    least = options.min_saved_tokens
    if prefix is not None:
        (group,) = groups
        return pack_slice(group, range(len(group.rollouts)), prefix, options.device, min_saved_tokens=least)
    across = options.share_across_groups
    batch = pack(groups, options.sharing, share_across_groups=across, min_saved_tokens=least, device=options.device)
    return replace(batch, sequence_group=options.sequence_group)


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
