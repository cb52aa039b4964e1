"""Assigns groups to ranks and mini-batches once the lengths of their rollouts are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pl_grouprl.models.cost import ModelCost
from pl_grouprl.packing import Sharing, balance, build_trie, imbalance
from pl_grouprl.training.selection import without_rewards
from pl_grouprl.types import Rollout, RolloutGroup
from pl_grouprl.utilities.copying import field_values
from pl_grouprl.utilities.distributed import gather_plain

_REWARDS = ("reward", "rewards", "failed_rewards", "reward_numbers", "token_rewards")  # fields of a rollout


@dataclass(frozen=True)
class RankAssignment:
    """What one rank trains.

    Attributes:
        groups: Its groups.
        mini_batches: Mini-batch index of each group.
        metrics: `balance/max_over_mean` of the estimated cost over ranks (mean over mini-batches), and
            `balance/max_over_mean_unbalanced`, the same if every group stayed on the rank that sampled it.
    """

    groups: list[RolloutGroup]
    mini_batches: list[int]
    metrics: dict[str, float]


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
) -> RankAssignment:
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
    """
    per_rank = gather_plain([to_state(group) | {"columns": _plain_columns(group)} for group in groups], device)
    sampled = [(owner, state) for owner, states in enumerate(per_rank) for state in states]
    sampled.sort(key=lambda pair: pair[1]["group_id"])  # same order for any number of ranks
    all_groups = [from_state(state) for _, state in sampled]
    owners = [owner for owner, _ in sampled]
    tries = (build_trie([rollout.token_ids for rollout in group.rollouts]) for group in all_groups)
    costs = cost.of_groups(
        [(len(group.prompt_ids), trie) for group, trie in zip(all_groups, tries, strict=True)], sharing
    )
    mini_batches = cut_into_mini_batches(len(all_groups), num_mini_batches, seed)
    assigned: list[int] = []
    balanced, unbalanced = [], []
    for number in range(num_mini_batches):
        members = [index for index, mini_batch in enumerate(mini_batches) if mini_batch == number]
        part = [costs[index] for index in members]
        ranks = balance(part, len(per_rank)) if can_move else [owners[index] for index in members]
        assigned += [index for index, owner in zip(members, ranks, strict=True) if owner == rank]
        balanced.append(imbalance(part, ranks, len(per_rank)))
        unbalanced.append(imbalance(part, [owners[index] for index in members], len(per_rank)))
    assigned.sort()
    metrics = {
        "balance/max_over_mean": sum(balanced) / len(balanced),
        "balance/max_over_mean_unbalanced": sum(unbalanced) / len(unbalanced),
    }
    columns = {group.group_id: group.columns for group in groups}
    for index in assigned:  # groups that stay keep all dataset columns
        all_groups[index].columns = columns.get(all_groups[index].group_id, all_groups[index].columns)
    if not assigned:  # fewer groups than ranks: join the collectives with nothing to train
        return RankAssignment([replace(without_rewards(all_groups[0]), group_id=-1)], [-1], metrics)
    return RankAssignment(
        [all_groups[index] for index in assigned], [mini_batches[index] for index in assigned], metrics
    )


def exchange_rewards(sampled: Sequence[RolloutGroup], trained: Sequence[RolloutGroup], device: torch.device) -> None:
    """Send rewards from the ranks that computed them to those that train the groups. Collective.

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


def to_state(group: RolloutGroup) -> dict[str, Any]:
    """A group as plain containers and tensors, without dataset columns (only rewards need them)."""
    return {**field_values(group), "columns": {}, "rollouts": [rollout_state(rollout) for rollout in group.rollouts]}


def rollout_state(rollout: Rollout) -> dict[str, Any]:
    """A rollout as plain containers, without its environment."""
    return {name: value for name, value in field_values(rollout).items() if name != "environment"}


def from_state(state: dict[str, Any]) -> RolloutGroup:
    """Rebuild what `to_state` returned."""
    return RolloutGroup(**{**state, "rollouts": [Rollout(**rollout) for rollout in state["rollouts"]]})


def _plain_columns(group: RolloutGroup) -> dict[str, Any]:
    """Dataset columns that can be sent to another rank: numbers, strings, and lists and dicts of them."""
    return {name: value for name, value in group.columns.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(_is_plain(item) for item in value)
    if type(value) is dict:
        return all(type(name) is str and _is_plain(item) for name, item in value.items())
    return value is None or type(value) in (bool, int, float, str)
