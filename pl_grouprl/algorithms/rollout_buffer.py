"""The rollouts of one prompt batch, and the per-token quantities that several updates reuse.

Legend: B rollouts, N response tokens of all rollouts one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from pl_grouprl.functional.rows import to_rows
from pl_grouprl.types import Rollout, RolloutGroup
from pl_grouprl.utilities.distributed import derive_seed


@dataclass
class RolloutBuffer:
    """Groups of rollouts and named tensors on their token axis N, on the CPU.

    Attributes:
        groups: In the order of the prompts.
        rollout_number: Counts the prompt batches of the run.
        num_mini_batches: Optimizer steps of one pass over the groups.
        seed: Decides, with `rollout_number`, the order of the groups in each pass.
        tokens: For each name one tensor per group, over the response tokens of the group. `loss_mask` is always there:
            True where the token is trained, which it never is in a rollout without a reward. `rollout_logprobs`, what
            the sampler reported, is there if it did so for every rollout, and in a run for every rollout of all ranks.
        metrics: What is known since the rollout, by the name it is logged under.
        num_tokens: Tokens of all sequences of all ranks, each with its prompt.
        updates_done: How many updates have used the buffer.
    """

    groups: list[RolloutGroup]
    rollout_number: int = 0
    num_mini_batches: int = 1
    seed: int = 0
    tokens: dict[str, list[Tensor]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    num_tokens: int = 0
    updates_done: int = 0

    def __post_init__(self) -> None:
        if "loss_mask" not in self.tokens:
            trained = [bit for group in self.groups for rollout in group.rollouts for bit in _trained_tokens(rollout)]
            self.put("loss_mask", torch.tensor(trained, dtype=torch.bool))
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

    def put_per_rollout(self, name: str, values_B: Tensor) -> None:
        """Keep a quantity of each rollout, repeated for each of its tokens."""
        self.put(name, values_B.cpu().repeat_interleave(self.rollout_lengths))

    def joined(self, name: str) -> Tensor:
        """A per-token quantity of all groups, shape [N]."""
        return torch.cat(self.tokens[name])

    def trained_rollouts(self) -> Tensor:
        """Which rollouts have a trained token, bool, shape [B]."""
        return to_rows(self.joined("loss_mask"), self.rollout_lengths).any(dim=1)

    def per_rollout_means(self, name: str) -> list[list[float]]:
        """Mean over the tokens of each rollout, by group: what a table of completions shows. 0 for an empty one."""
        means = []
        for group, values in zip(self.groups, self.tokens[name], strict=True):
            parts = values.split([len(rollout.token_ids) for rollout in group.rollouts])
            means.append([float(part.float().mean()) if len(part) else 0.0 for part in parts])
        return means

    def mini_batch(self, update_index: int) -> tuple[list[RolloutGroup], dict[str, Tensor]]:
        """Select the groups of one update, whole, and their per-token quantities.

        Each pass over the groups has its own order, decided by the seed, the rollout number and the pass. A rank that
        has fewer groups than mini-batches has nothing to train in some updates: it gets a group with an empty mask, so
        that all ranks still do the same.
        """
        epoch, part = divmod(update_index, self.num_mini_batches)
        chosen = self._order(epoch).tensor_split(self.num_mini_batches)[part].tolist()
        indices = chosen or [0]
        tokens = {name: torch.cat([values[i] for i in indices]) for name, values in self.tokens.items()}
        if not chosen:
            tokens["loss_mask"] = torch.zeros_like(tokens["loss_mask"])
        return [self.groups[i] for i in indices], tokens

    def _order(self, epoch: int) -> Tensor:
        if self.num_mini_batches == 1:
            return torch.arange(len(self.groups))
        generator = torch.Generator().manual_seed(derive_seed("order", self.seed, self.rollout_number, epoch))
        return torch.randperm(len(self.groups), generator=generator)

    def state_dict(self) -> dict[str, Any]:
        """Return plain containers and tensors. Columns of the data set, needed for the reward only, are left out."""
        state = _shallow(self)
        state["groups"] = [
            {**_shallow(group), "columns": {}, "rollouts": [_shallow(rollout) for rollout in group.rollouts]}
            for group in self.groups
        ]
        return state

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> RolloutBuffer:
        """Rebuild what `state_dict` returned."""
        groups = [
            RolloutGroup(**{**group, "rollouts": [Rollout(**rollout) for rollout in group["rollouts"]]})
            for group in state["groups"]
        ]
        return cls(**{**state, "groups": groups})


def _trained_tokens(rollout: Rollout) -> Sequence[int]:
    if rollout.reward is None or rollout.reward != rollout.reward:
        return [0] * len(rollout.token_ids)
    return rollout.loss_mask if rollout.loss_mask is not None else [1] * len(rollout.token_ids)


def _num_tokens(group: RolloutGroup) -> int:
    return sum(len(rollout.token_ids) for rollout in group.rollouts)


def _shallow(instance: Any) -> dict[str, Any]:
    return {part.name: getattr(instance, part.name) for part in fields(instance)}
