"""Rollouts of one prompt batch, assigned to ranks and mini-batches, with per-token quantities that updates reuse.

Legend: B rollouts, E episodes (each one rollout or several, see `EpisodeRows`), N response tokens of all rollouts,
concatenated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from pl_grouprl.functional.masked import differ, places_of, to_rows
from pl_grouprl.models.cost import ModelCost
from pl_grouprl.packing import Sharing, balance, build_trie, imbalance
from pl_grouprl.packing.batch import loss_mask
from pl_grouprl.types import EpisodeRows, Rollout, RolloutGroup
from pl_grouprl.utilities.describe import field_values
from pl_grouprl.utilities.distributed import derive_seed, gather_plain


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

    def put_per_rollout(self, name: str, values_B: Tensor) -> None:
        """Store a per-rollout quantity, repeated for each token."""
        self.put(name, values_B.cpu().repeat_interleave(self.rollout_lengths))

    def joined(self, name: str) -> Tensor:
        """A copy of a per-token quantity, shape [N]."""
        return self.values[name].clone()

    def compute_loss_mask(self) -> None:
        """Compute the loss mask from the rollouts as they are now; called again when rewards arrive."""
        trained = [
            not (self.mask_truncated and episode.last.finish_reason == "length")
            and episode.reward is not None
            and not math.isnan(episode.reward)
            for episode in self.episodes
        ]
        trained_N = torch.tensor(trained, dtype=torch.bool).repeat_interleave(self.episode_lengths)
        self.put("loss_mask", (trained_N & loss_mask(self.rollouts)) if any(trained) else trained_N)

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
        groups, numbers = [], []
        for index, chosen in parts:
            group = self.groups[index]
            is_whole = list(chosen) == list(range(len(group.rollouts)))
            groups.append(group if is_whole else replace(group, rollouts=[group.rollouts[n] for n in chosen]))
            numbers += [first_rollouts[index] + number for number in chosen]
        return groups, self._values_of(numbers), tuple(numbers)

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

    def trained_and_idle(self, *, by_advantages: bool) -> tuple[RolloutBuffer, RolloutBuffer]:
        """Split the rollouts: those of episodes with a token that a loss trains, and those an update need not encode.

        Args:
            by_advantages: Whether a token whose advantage is 0 is not trained; one outside `loss_mask` never is.
        """
        trained_N = self.joined("loss_mask")
        if by_advantages:
            trained_N &= self.joined("advantages") != 0
        trained_B = to_rows(trained_N, self.episode_lengths).any(dim=1).repeat_interleave(self.rows_per_episode)
        return self.subset(trained_B), self.subset(~trained_B)

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

    def _values_of(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Copies of the per-token quantities of some rollouts, by their index in the buffer."""
        if list(numbers) == list(range(len(self.rollouts))):
            return {name: values_N.clone() for name, values_N in self.values.items()}
        places_N = places_of(torch.tensor(numbers, dtype=torch.long), self.rollout_lengths)
        return {name: values_N[places_N] for name, values_N in self.values.items()}

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


def to_state(group: RolloutGroup) -> dict[str, Any]:
    """A group as plain containers and tensors, without dataset columns (only rewards need them)."""
    return {**field_values(group), "columns": {}, "rollouts": [rollout_state(rollout) for rollout in group.rollouts]}


def rollout_state(rollout: Rollout) -> dict[str, Any]:
    """A rollout as plain containers, without its environment."""
    return {name: value for name, value in field_values(rollout).items() if name != "environment"}


def from_state(state: dict[str, Any]) -> RolloutGroup:
    """Rebuild what `to_state` returned."""
    return RolloutGroup(**{**state, "rollouts": [Rollout(**rollout) for rollout in state["rollouts"]]})


# Which rollouts are worth training.


def rewards_differ(group: RolloutGroup) -> bool:
    """Whether a group's rewards or step rewards differ, so that comparing its rollouts is informative."""
    return numbers_differ(episode.reward for episode in group.episodes) or _steps_differ(group)


def outcomes_or_steps_differ(group: RolloutGroup) -> bool:
    """Whether a group's outcome rewards or step rewards differ; GRPO compares the two separately."""
    return numbers_differ(episode.outcome_reward for episode in group.episodes) or _steps_differ(group)


def any_function_differs(group: RolloutGroup) -> bool:
    """Whether the rewards of any function differ, for `multi_objective_aggregation='normalize_then_sum'`."""
    rollouts = [episode.last for episode in group.episodes]
    names = {name for rollout in rollouts for name in rollout.rewards}
    return any(numbers_differ(rollout.rewards.get(name) for rollout in rollouts) for name in names)


def _steps_differ(group: RolloutGroup) -> bool:
    return numbers_differ(reward for rollout in group.rollouts for reward in rollout.step_rewards.values())


def numbers_differ(rewards: Iterable[float | None]) -> bool:
    """Whether rewards differ by more than rounding; None and NaN are ignored."""
    numbers = [reward for reward in rewards if reward is not None and not math.isnan(reward)]
    return bool(numbers) and differ(min(numbers), max(numbers))


def without_rewards(group: RolloutGroup) -> RolloutGroup:
    """Copy a group without rewards, for a rank with nothing to train: it joins the update but affects no statistic."""
    return replace(group, rollouts=[replace(rollout, reward=None, token_rewards=None) for rollout in group.rollouts])


# Assigns groups to mini-batches and, once the lengths of their rollouts are known, to ranks.

_REWARDS = ("reward", "rewards", "failed_rewards", "reward_numbers", "token_rewards")  # fields of a rollout


def cut_into_mini_batches(num_groups: int, num_mini_batches: int, seed: int) -> list[int]:
    """Split groups at random into mini-batches of about equal size; returns each group's mini-batch index."""
    if num_mini_batches == 1:
        return [0] * num_groups
    order = torch.randperm(num_groups, generator=torch.Generator().manual_seed(seed), device="cpu")
    numbers = torch.empty(num_groups, dtype=torch.long)
    for number, chosen in enumerate(order.tensor_split(num_mini_batches)):
        numbers[chosen] = number
    return numbers.tolist()


def distribute_groups(
    groups: Sequence[RolloutGroup],
    cost: ModelCost,
    sharing: Sharing,
    *,
    num_mini_batches: int,
    seed: int,
    rank: int,
    device: torch.device,
    can_move: bool = True,
) -> tuple[list[RolloutGroup], list[int], dict[str, float]]:
    """Exchange groups to give ranks about equal work in each mini-batch. Collective.

    Args:
        groups: The groups this rank sampled, with rewards. `group_id` is the index in the whole batch.
        cost: Cost model of the policy.
        sharing: How the groups will be laid out.
        num_mini_batches: Number of parts that the groups of all ranks are split into.
        seed: Decides which groups are trained together; the same on all ranks.
        rank: This rank.
        device: Device for communication.
        can_move: Whether groups may leave the rank that sampled them. If not, only mini-batches are assigned.

    Returns:
        The groups of this rank; the mini-batch index of each; and the metrics `balance/max_over_mean` of the estimated
        cost over ranks (mean over mini-batches), and `balance/max_over_mean_unbalanced`, the same if every group stayed
        on the rank that sampled it.
    """

    def sendable(columns: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in columns.items() if _is_plain(value)}

    per_rank = gather_plain([to_state(group) | {"columns": sendable(group.columns)} for group in groups], device)
    sampled = [(owner, state) for owner, states in enumerate(per_rank) for state in states]
    sampled.sort(key=lambda pair: pair[1]["group_id"])  # same order for any number of ranks
    owners, all_groups = [owner for owner, _ in sampled], [from_state(state) for _, state in sampled]
    tries = [build_trie([rollout.token_ids for rollout in group.rollouts]) for group in all_groups]
    prompts = [len(group.prompt_ids) for group in all_groups]
    costs = cost.of_groups(list(zip(prompts, tries, strict=True)), sharing)
    mini_batches = cut_into_mini_batches(len(all_groups), num_mini_batches, seed)
    assigned: list[int] = []
    balanced, unbalanced = [], []
    for number in range(num_mini_batches):
        members = [index for index, mini_batch in enumerate(mini_batches) if mini_batch == number]
        part, own = [costs[index] for index in members], [owners[index] for index in members]
        ranks = balance(part, len(per_rank)) if can_move else own
        assigned += [index for index, owner in zip(members, ranks, strict=True) if owner == rank]
        balanced.append(imbalance(part, ranks, len(per_rank)))
        unbalanced.append(imbalance(part, own, len(per_rank)))
    assigned.sort()
    metrics = {
        "balance/max_over_mean": sum(balanced) / len(balanced),
        "balance/max_over_mean_unbalanced": sum(unbalanced) / len(unbalanced),
    }
    if not assigned:  # fewer groups than ranks: join the collectives with nothing to train
        return [replace(without_rewards(all_groups[0]), group_id=-1)], [-1], metrics
    columns = {group.group_id: group.columns for group in groups}
    for index in assigned:  # groups that stay keep all dataset columns
        all_groups[index].columns = columns.get(all_groups[index].group_id, all_groups[index].columns)
    return [all_groups[index] for index in assigned], [mini_batches[index] for index in assigned], metrics


def exchange_rewards(sampled: Sequence[RolloutGroup], trained: Sequence[RolloutGroup], device: torch.device) -> None:
    """Send rewards from the ranks that computed them to the ranks that train the groups. Collective.

    Args:
        sampled: Groups that this rank sampled and rewarded.
        trained: Groups that it trains, matched by `group_id`; changed in place.
        device: Device for communication.
    """
    rewards = [(group.group_id, [[getattr(r, name) for name in _REWARDS] for r in group.rollouts]) for group in sampled]
    found = dict(pair for pairs in gather_plain(rewards, device) for pair in pairs)
    for group in trained:
        for rollout, rewarded in zip(group.rollouts, found.get(group.group_id, ()), strict=False):
            for name, value in zip(_REWARDS, rewarded, strict=True):
                setattr(rollout, name, value)


def _is_plain(value: Any) -> bool:
    """Whether a dataset column can be sent to another rank: numbers, strings, and lists and dicts of them."""
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(type(name) is str and _is_plain(item) for name, item in value.items())
    return value is None or type(value) in (bool, int, float, str)
