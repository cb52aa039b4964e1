"""The rollouts of one prompt batch, and the per-token quantities that several updates reuse.

Legend: B rollouts, N response tokens of all rollouts one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pl_grouprl.functional.rows import to_rows
from pl_grouprl.training.distribution import cut_into_mini_batches, from_state, to_state
from pl_grouprl.types import Rollout, RolloutGroup
from pl_grouprl.utilities.copying import field_values
from pl_grouprl.utilities.distributed import derive_seed


@dataclass
class RolloutBuffer:
    """Groups of rollouts and named tensors on their token axis N, on the CPU.

    Attributes:
        groups: In the order of the prompts.
        rollout_number: Counts the prompt batches of the run.
        num_mini_batches: Optimizer steps of one pass over the groups of all ranks.
        seed: Decides, with `rollout_number`, the order of the mini-batches in each pass.
        tokens: For each name one tensor per group, over the response tokens of the group. `loss_mask` is always there:
            True where the token is trained, which it never is in a rollout without a reward. `rollout_logprobs`, what
            the sampler reported, is there if it did so for every rollout, and in a run for every rollout of all ranks.
        metrics: What is known since the rollout, by the name it is logged under.
        num_tokens: Tokens of all sequences of all ranks, each with its prompt.
        updates_done: How many updates have used the buffer.
        mini_batches: The number of the mini-batch that each group belongs to; by default as `distribution.deal` deals
            groups on one rank.
    """

    groups: list[RolloutGroup]
    rollout_number: int = 0
    num_mini_batches: int = 1
    seed: int = 0
    tokens: dict[str, list[Tensor]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    num_tokens: int = 0
    updates_done: int = 0
    mini_batches: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.mini_batches:
            shuffled = derive_seed("order", self.seed, self.rollout_number)
            self.mini_batches = cut_into_mini_batches(len(self.groups), self.num_mini_batches, shuffled)
        if "loss_mask" not in self.tokens:
            self.mask_unrewarded()
            sampled = [rollout.logprobs for group in self.groups for rollout in group.rollouts]
            logprobs = [logprob for own in sampled if own is not None for logprob in own]
            if None not in sampled:
                self.put("rollout_logprobs", torch.tensor(logprobs, dtype=torch.float32))

    @property
    def rollout_lengths(self) -> Tensor:
        """Response tokens of each rollout, shape [B], int64."""
        lengths = [len(rollout.token_ids) for group in self.groups for rollout in group.rollouts]
        return torch.tensor(lengths, dtype=torch.long)

    def put(self, name: str, values_N: Tensor) -> None:
        """Keep a per-token quantity of all groups under a name.

        Raises:
            ValueError: If there is not one value per response token.
        """
        sizes = [_num_tokens(group) for group in self.groups]
        if values_N.shape != (sum(sizes),):
            raise ValueError(f"{name} has shape {tuple(values_N.shape)}; pass one value per token, ({sum(sizes)},).")
        self.tokens[name] = list(values_N.detach().cpu().split(sizes))

    def mask_unrewarded(self) -> None:
        """Make the loss mask from the rollouts as they are now; done anew when rewards arrive."""
        trained = [bit for group in self.groups for rollout in group.rollouts for bit in _trained_tokens(rollout)]
        self.put("loss_mask", torch.tensor(trained, dtype=torch.bool))

    def put_per_rollout(self, name: str, values_B: Tensor) -> None:
        """Keep a quantity of each rollout, repeated for each of its tokens."""
        self.put(name, values_B.cpu().repeat_interleave(self.rollout_lengths))

    def joined(self, name: str) -> Tensor:
        """A per-token quantity of all groups, shape [N]."""
        return torch.cat(self.tokens[name])

    def trained_rollouts(self) -> Tensor:
        """Which rollouts have a trained token, bool, shape [B]."""
        return to_rows(self.joined("loss_mask"), self.rollout_lengths).any(dim=1)

    def members(self, update_index: int) -> list[int]:
        """Which groups of this rank are trained in an update, whole; a rank may have none.

        Mini-batches are the same in each pass over the rollouts and come in another order, which the seed, the rollout
        number and the pass decide, on all ranks alike.
        """
        epoch, place = divmod(update_index, self.num_mini_batches)
        generator = torch.Generator().manual_seed(derive_seed("order", self.seed, self.rollout_number, epoch))
        number = int(torch.randperm(self.num_mini_batches, generator=generator)[place])
        return [index for index, own in enumerate(self.mini_batches) if own == number]

    def select(
        self, parts: Sequence[tuple[int, Sequence[int]]]
    ) -> tuple[list[RolloutGroup], dict[str, Tensor], tuple[int, ...]]:
        """Take some rollouts of some groups.

        Args:
            parts: Indices of groups, each with the indices of the rollouts that are taken.

        Returns:
            The groups with these rollouts (those of the buffer where all are taken), their per-token quantities, and
            the place of each rollout in the buffer.
        """
        first_rollouts = list(accumulate((len(group.rollouts) for group in self.groups), initial=0))
        groups, numbers = [], []
        tokens: dict[str, list[Tensor]] = {name: [] for name in self.tokens}
        for index, chosen in parts:
            group = self.groups[index]
            numbers += [first_rollouts[index] + number for number in chosen]
            whole = list(chosen) == list(range(len(group.rollouts)))
            groups.append(group if whole else replace(group, rollouts=[group.rollouts[number] for number in chosen]))
            lengths = [] if whole else [len(rollout.token_ids) for rollout in group.rollouts]
            for name, values in self.tokens.items():
                if whole:
                    tokens[name].append(values[index])
                else:
                    pieces = values[index].split(lengths)
                    tokens[name] += [pieces[number] for number in chosen]
        return groups, {name: torch.cat(values) for name, values in tokens.items()}, tuple(numbers)

    def in_order(self, values: Sequence[Tensor], numbers: Sequence[int], *, per_token: bool) -> Tensor:
        """Put what was computed of some rollouts after another back into the order of the buffer.

        Args:
            values: Of parts of the buffer, shape [N, ...] of the part, or [B, ...].
            numbers: The place of each rollout in the buffer, through all parts; each rollout once.
            per_token: Whether there is a value per token, not per rollout.
        """
        joined = torch.cat(list(values))
        if list(numbers) == sorted(numbers):
            return joined
        lengths = self.rollout_lengths[list(numbers)].tolist() if per_token else [1] * len(numbers)
        pieces = joined.split(lengths)
        places = sorted(range(len(numbers)), key=lambda place: numbers[place])
        return torch.cat([pieces[place] for place in places])

    def state_dict(self) -> dict[str, Any]:
        """Return plain containers and tensors; the groups without columns of the data set."""
        return field_values(self) | {"groups": [to_state(group) for group in self.groups]}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> RolloutBuffer:
        """Rebuild what `state_dict` returned."""
        return cls(**{**state, "groups": [from_state(group) for group in state["groups"]]})


def _trained_tokens(rollout: Rollout) -> Sequence[int]:
    if rollout.reward is None or rollout.reward != rollout.reward:
        return [0] * len(rollout.token_ids)
    return rollout.loss_mask if rollout.loss_mask is not None else [1] * len(rollout.token_ids)


def _num_tokens(group: RolloutGroup) -> int:
    return sum(len(rollout.token_ids) for rollout in group.rollouts)
