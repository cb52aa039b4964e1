"""The rollouts of one prompt batch, and the per-token quantities that several updates reuse.

Legend: B rollouts, E episodes (each one rollout or several, see `EpisodeRows`), N response tokens of all rollouts,
concatenated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from pl_grouprl.functional.rows import places_of, to_rows
from pl_grouprl.packing.batch import loss_mask
from pl_grouprl.training.distribution import cut_into_mini_batches, from_state, to_state
from pl_grouprl.types import EpisodeRows, Rollout, RolloutGroup
from pl_grouprl.utilities.copying import field_values
from pl_grouprl.utilities.distributed import derive_seed


@dataclass
class RolloutBuffer:
    """Groups of rollouts and named tensors on their token axis N, on the CPU.

    Attributes:
        groups: In prompt order. Lengths and episodes are computed from them once.
        rollout_number: Index of the prompt batch in the run.
        num_mini_batches: Optimizer steps per pass over the groups of all ranks.
        seed: Decides, with `rollout_number`, the order of the mini-batches in each pass.
        values: Per-token quantities by name, shape [N]. Always has `loss_mask`: True where a token is trained, so False
            throughout a rollout without a reward. Has `rollout_logprobs`, as reported by the sampler, if every rollout
            (in a run, of all ranks) has them.
        metrics: Metrics of the rollout, by the name they are logged under.
        num_tokens: Tokens of all sequences of all ranks, prompts included.
        updates_done: Number of updates that have used the buffer.
        mini_batches: Mini-batch index of each group; by default from `cut_into_mini_batches`, as on one rank.
        mask_truncated: Train no token of rollouts that were truncated at a length limit.
    """

    groups: list[RolloutGroup]
    rollout_number: int = 0
    num_mini_batches: int = 1
    seed: int = 0
    values: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    num_tokens: int = 0
    updates_done: int = 0
    mini_batches: list[int] = field(default_factory=list)
    mask_truncated: bool = False

    def __post_init__(self) -> None:
        if not self.mini_batches:
            seed = derive_seed("order", self.seed, self.rollout_number)
            self.mini_batches = cut_into_mini_batches(len(self.groups), self.num_mini_batches, seed)
        if "loss_mask" not in self.values:
            self.compute_loss_mask()
            sampled = [rollout.logprobs for rollout in self.rollouts]
            logprobs = [value for values in sampled if values is not None for value in values]
            if None not in sampled:
                self.put("rollout_logprobs", torch.tensor(logprobs, dtype=torch.float32))

    @cached_property
    def rollouts(self) -> list[Rollout]:
        """The B rollouts of all groups."""
        return [rollout for group in self.groups for rollout in group.rollouts]

    @cached_property
    def episodes(self) -> list[EpisodeRows]:
        """The E episodes of all groups."""
        return [episode for group in self.groups for episode in group.episodes]

    @cached_property
    def rollout_lengths(self) -> Tensor:
        """Response tokens of each rollout, shape [B], int64."""
        return torch.tensor([len(rollout.token_ids) for rollout in self.rollouts], dtype=torch.long)

    @cached_property
    def rows_per_episode(self) -> Tensor:
        """Rollouts of each episode, shape [E], int64."""
        return torch.tensor([rows for group in self.groups for rows in group.rows_per_episode], dtype=torch.long)

    @cached_property
    def episode_lengths(self) -> Tensor:
        """Response tokens of each episode, all its rows together, shape [E], int64."""
        stops_E = self.rollout_lengths.cumsum(0)[self.rows_per_episode.cumsum(0) - 1]
        return stops_E.diff(prepend=stops_E.new_zeros(1))

    @property
    def tokens(self) -> Mapping[str, list[Tensor]]:
        """The per-token quantities by name, one tensor per group. Read-only: store with `put`."""
        lengths = [sum(len(rollout.token_ids) for rollout in group.rollouts) for group in self.groups]
        return MappingProxyType({name: list(values_N.split(lengths)) for name, values_N in self.values.items()})

    def put(self, name: str, values_N: Tensor) -> None:
        """Store a per-token quantity of all groups under a name.

        Raises:
            ValueError: If there is not one value per response token.
        """
        total = int(self.rollout_lengths.sum())
        if values_N.shape != (total,):
            raise ValueError(f"{name} has shape {tuple(values_N.shape)}; pass one value per token, ({total},).")
        self.values[name] = values_N.detach().cpu()

    def compute_loss_mask(self) -> None:
        """Compute the loss mask from the rollouts as they are now; called again when rewards arrive."""
        trained = [_is_trained(episode, self.mask_truncated) for episode in self.episodes]
        trained_E = torch.tensor(trained, dtype=torch.bool)
        trained_N = trained_E.repeat_interleave(self.episode_lengths)
        self.put("loss_mask", (trained_N & loss_mask(self.rollouts)) if trained_E.any() else trained_N)

    def put_per_rollout(self, name: str, values_B: Tensor) -> None:
        """Store a per-rollout quantity, repeated for each token."""
        self.put(name, values_B.cpu().repeat_interleave(self.rollout_lengths))

    def joined(self, name: str) -> Tensor:
        """A copy of a per-token quantity, shape [N]."""
        return self.values[name].clone()

    def trained_episodes(self) -> Tensor:
        """Which episodes have a trained token, bool, shape [E]."""
        return to_rows(self.joined("loss_mask"), self.episode_lengths).any(dim=1)

    def members(self, update_index: int) -> list[int]:
        """Indices of the groups that this rank trains in an update; may be empty.

        Every pass uses the same mini-batches; their order depends on seed, rollout number and pass, and is the same on
        all ranks.
        """
        epoch, place = divmod(update_index, self.num_mini_batches)
        generator = torch.Generator().manual_seed(derive_seed("order", self.seed, self.rollout_number, epoch))
        number = int(torch.randperm(self.num_mini_batches, generator=generator, device="cpu")[place])
        return [index for index, mini_batch in enumerate(self.mini_batches) if mini_batch == number]

    def select(
        self, parts: Sequence[tuple[int, Sequence[int]]]
    ) -> tuple[list[RolloutGroup], dict[str, Tensor], tuple[int, ...]]:
        """Select some rollouts of some groups.

        Args:
            parts: Group indices, each with the indices of the selected rollouts.

        Returns:
            The groups with these rollouts (the buffer's objects where all are selected), their per-token quantities,
            and each rollout's index in the buffer.
        """
        first_rollouts = list(accumulate((len(group.rollouts) for group in self.groups), initial=0))
        numbers = tuple(first_rollouts[index] + number for index, chosen in parts for number in chosen)
        groups = [_part(self.groups[index], chosen) for index, chosen in parts]
        return groups, self._values_of(numbers), numbers

    def only(self, members: Sequence[int]) -> RolloutBuffer:
        """A buffer with the rollouts of some groups, where the others are empty; the buffer itself if there are none.

        Args:
            members: Indices of the groups.
        """
        if len(members) == len(self.groups):
            return self
        chosen = set(members)
        kept = [index in chosen for index, group in enumerate(self.groups) for _ in group.rollouts]
        return self.subset(torch.tensor(kept, dtype=torch.bool))

    def subset(self, kept_B: Tensor) -> RolloutBuffer:
        """The same groups with only some of their rollouts, or none.

        Args:
            kept_B: Which rollouts to keep, bool, shape [B].
        """
        kept = iter(kept_B.tolist())
        groups = [replace(group, rollouts=[r for r in group.rollouts if next(kept)]) for group in self.groups]
        return replace(self, groups=groups, values=self._values_of(kept_B.nonzero().flatten().tolist()))

    def _values_of(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Copies of the per-token quantities of some rollouts, by their index in the buffer."""
        if list(numbers) == list(range(len(self.rollouts))):
            return {name: values_N.clone() for name, values_N in self.values.items()}
        places_N = places_of(torch.tensor(numbers, dtype=torch.long), self.rollout_lengths)
        return {name: values_N[places_N] for name, values_N in self.values.items()}

    def in_order(self, values: Sequence[Tensor], numbers: Sequence[int], *, per_token: bool) -> Tensor:
        """Reorder values that were computed part by part into the order of the buffer.

        Args:
            values: One tensor per part, shape [N, ...] or [B, ...] of the part.
            numbers: Buffer index of each rollout, over all parts; each rollout once.
            per_token: Whether values are per token rather than per rollout.
        """
        joined = torch.cat(list(values))
        if list(numbers) == sorted(numbers):
            return joined
        order = torch.tensor(numbers).argsort()
        return joined[places_of(order, self.rollout_lengths[list(numbers)]) if per_token else order]

    def state_dict(self) -> dict[str, Any]:
        """Return plain containers and tensors, without dataset columns."""
        state = field_values(self) | {"groups": [to_state(group) for group in self.groups]}
        del state["values"]
        return state | {"tokens": dict(self.tokens)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> RolloutBuffer:
        """Rebuild what `state_dict` returned."""
        options = {name: value for name, value in state.items() if name not in ("groups", "tokens")}
        values = {name: torch.cat(list(parts)) for name, parts in state["tokens"].items()}
        return cls([from_state(group) for group in state["groups"]], values=values, **options)


def _is_trained(episode: EpisodeRows, mask_truncated: bool) -> bool:
    if mask_truncated and episode.last.finish_reason == "length":
        return False
    reward = episode.reward
    return reward is not None and not math.isnan(reward)


def _part(group: RolloutGroup, chosen: Sequence[int]) -> RolloutGroup:
    """Some rollouts of a group; the same object if it is all of them."""
    if list(chosen) == list(range(len(group.rollouts))):
        return group
    return replace(group, rollouts=[group.rollouts[number] for number in chosen])
