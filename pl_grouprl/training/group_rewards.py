"""Rewards of groups as tensors, the input of advantage estimators.

Legend: E episodes (each one rollout or several, see `EpisodeRows`), F reward functions, N response tokens of all
rollouts, concatenated, T length of the longest episode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pl_grouprl.functional.advantages import AdvantageEstimator, BranchPaths, leaf_weights
from pl_grouprl.functional.rows import from_rows, to_rows
from pl_grouprl.training.metrics import number_or_nan
from pl_grouprl.training.rollout_buffer import RolloutBuffer
from pl_grouprl.training.run import Run
from pl_grouprl.types import EpisodeRows, Rollout, RolloutGroup
from pl_grouprl.utilities.distributed import gather_plain, raise_on_all_ranks, reduce_over_ranks


@dataclass(frozen=True)
class GroupRewards:
    """Rewards of the episodes of all ranks, in rank order. The rows of an episode are one observation.

    Attributes:
        outcomes: Outcome of each episode, shape [E], or its reward from each function, shape [E, F]; NaN if missing.
        group_ids_E: Group of each episode.
        lengths_E: Number of response tokens of each episode.
        sampled_E: Number of those tokens that the model wrote.
        greedy: Outcome of the greedy rollout of each episode's prompt, shaped like `outcomes`; None without greedy
            rollouts.
        step_rewards_N: Reward of each step at its last token, NaN elsewhere; None if no rollout on any rank has
            `token_rewards`.
        own_E: This rank's episodes.
        own_N: This rank's tokens.
        rows_E: Number of rollouts of each of this rank's episodes.
    """

    outcomes: Tensor
    group_ids_E: Tensor
    lengths_E: Tensor
    sampled_E: Tensor
    greedy: Tensor | None
    step_rewards_N: Tensor | None
    own_E: slice
    own_N: slice
    rows_E: Tensor

    def of_own_rollouts(self, values_E: Tensor) -> Tensor:
        """Repeat the values of this rank's episodes, one per rollout."""
        return values_E[self.own_E].repeat_interleave(self.rows_E)


def gather_rewards(
    groups: Sequence[RolloutGroup],
    run: Run,
    *,
    functions: Sequence[str] = (),
    greedy: Sequence[RolloutGroup] | None = None,
) -> GroupRewards:
    """Gather the rewards of all ranks. Collective.

    Args:
        groups: This rank's groups.
        run: The run.
        functions: Names of reward functions, one column each; empty for the outcome alone.
        greedy: One greedy rollout of each prompt, in the order of the groups.
    """
    per_group = [group.episodes for group in groups]
    episodes = [episode for of_group in per_group for episode in of_group]
    baselines = [
        _reward_table(baseline.episodes, functions) * len(group.episodes)
        for baseline, group in ([] if greedy is None else zip(greedy, groups, strict=True))
    ]
    has_steps = has_token_rewards(groups)
    per_rank: list[dict[str, Any]] = gather_plain(
        {
            "sizes": [len(of_group) for of_group in per_group],
            "lengths": [episode.num_tokens for episode in episodes],
            "sampled": [episode.num_sampled_tokens for episode in episodes],
            "rewards": _reward_table(episodes, functions),
            "greedy": [number for table in baselines for number in table],
            "steps": [episode.step_rewards if has_steps else {} for episode in episodes],
            "has_steps": [has_steps],
        },
        run.device,
    )
    joined = {name: [item for rank in per_rank for item in rank[name]] for name in per_rank[0]}
    sizes, shape = torch.tensor(joined["sizes"]), (-1, len(functions)) if functions else (-1,)
    counts = [(len(rank["lengths"]), sum(rank["lengths"])) for rank in per_rank]
    first_E, first_N = (sum(of_rank[axis] for of_rank in counts[: run.global_rank]) for axis in (0, 1))
    count_E, count_N = counts[run.global_rank]
    return GroupRewards(
        outcomes=torch.tensor(joined["rewards"], dtype=torch.float32).view(shape),
        group_ids_E=torch.arange(len(sizes)).repeat_interleave(sizes),
        lengths_E=torch.tensor(joined["lengths"], dtype=torch.long),
        sampled_E=torch.tensor(joined["sampled"], dtype=torch.long),
        greedy=None if greedy is None else torch.tensor(joined["greedy"], dtype=torch.float32).view(shape),
        step_rewards_N=_on_tokens(joined["steps"], joined["lengths"]) if any(joined["has_steps"]) else None,
        own_E=slice(first_E, first_E + count_E),
        own_N=slice(first_N, first_N + count_N),
        rows_E=torch.tensor([len(episode.rows) for episode in episodes], dtype=torch.long),
    )


def _reward_table(episodes: Sequence[EpisodeRows], functions: Sequence[str]) -> list[float]:
    """Each episode's outcome, or its reward from each function, one episode after another."""
    if not functions:
        return [number_or_nan(episode.outcome_reward) for episode in episodes]
    return [
        number_or_nan(last.rewards.get(name)) if last.reward is not None else math.nan
        for last in (episode.last for episode in episodes)
        for name in functions
    ]


def _on_tokens(steps: Sequence[dict[int, float]], lengths: Sequence[int]) -> Tensor:
    rewards_N = torch.full((sum(lengths),), torch.nan)
    first = 0
    for step_rewards, length in zip(steps, lengths, strict=True):
        places = [first + place for place in step_rewards]
        rewards_N[places] = torch.tensor(list(step_rewards.values()), dtype=torch.float32)
        first += length
    return rewards_N


def has_token_rewards(groups: Sequence[RolloutGroup]) -> bool:
    """Whether any rollout has rewards per token."""
    return any(rollout.token_rewards is not None for group in groups for rollout in group.rollouts)


def subtract_kl_penalties(buffer: RolloutBuffer) -> list[RolloutGroup]:
    """Copy the groups, subtracting from each reward the KL penalty of the tokens of its episode."""
    groups = []
    for group, penalties in zip(buffer.groups, buffer.tokens["kl_penalty"], strict=True):
        episodes = group.episodes
        sums = [float(part.sum()) for part in penalties.split([episode.num_tokens for episode in episodes])]
        rollouts = [
            row if row.reward is None else replace(row, reward=row.reward - penalty)
            for episode, penalty in zip(episodes, sums, strict=True)
            for row in episode.rows
        ]
        groups.append(replace(group, rollouts=rollouts))
    return groups


def token_advantages(
    estimator: AdvantageEstimator,
    buffer: RolloutBuffer,
    groups: Sequence[RolloutGroup],
    device: torch.device,
    score_norm_N: Tensor | None = None,
) -> Tensor:
    """Estimate advantages per token. Collective.

    Args:
        estimator: An estimator with `per_token`.
        buffer: Has `token_rewards`.
        groups: The buffer's groups, with the KL penalty subtracted from rewards if it is part of them.
        device: Device for communication.
        score_norm_N: Squared norm of each token's score, if the estimator needs it.

    Returns:
        Advantages, shape [N].

    Raises:
        ValueError: If the estimator takes one reward per rollout, and a rollout on any rank has rewards per token, or
            if the paths of this rank's branches contradict their tokens (on other ranks: RuntimeError).
    """
    lengths_E = buffer.episode_lengths
    mask_ET = to_rows(buffer.joined("loss_mask"), lengths_E)
    ids_E, branches = _group_ids(groups), _branches(groups, device)
    reduce = partial(reduce_over_ranks, device=device)
    episodes = [episode for group in groups for episode in group.episodes]
    if estimator.takes_token_rewards:
        rewards = to_rows(buffer.joined("token_rewards"), lengths_E)
    else:  # not the sums of the buffer's token_rewards, which are 0 for episodes without a trained token
        if any(gather_plain(has_token_rewards(groups), device)):
            raise ValueError(
                unusable_token_rewards(f"{estimator.name} compares whole rollouts", "use reinforce_plus_plus")
            )
        rewards = torch.tensor([number_or_nan(episode.reward) for episode in episodes]).float()
    score_norms = None if score_norm_N is None else to_rows(score_norm_N.cpu(), lengths_E)
    data: dict[str, Any] = {"branches": branches, "score_norms": score_norms, "reduce": reduce}
    advantages_ET = estimator(rewards, ids_E, mask=mask_ET, **data)
    return from_rows(advantages_ET, lengths_E)


def episode_leaf_weights(groups: Sequence[RolloutGroup], mask_ET: Tensor, device: torch.device) -> Tensor:
    """`leaf_weights` of the groups' episodes, shape [E], float32. Collective, on the given device."""
    reduce = partial(reduce_over_ranks, device=device)
    return leaf_weights(_group_ids(groups), mask_ET, _branches(groups, device), reduce=reduce).float()


def _group_ids(groups: Sequence[RolloutGroup]) -> Tensor:
    sizes = torch.tensor([len(group.rows_per_episode) for group in groups], dtype=torch.long)
    return torch.arange(len(sizes)).repeat_interleave(sizes)


def _branches(groups: Sequence[RolloutGroup], device: torch.device) -> BranchPaths:
    """Where the groups' episodes branch. Collective; impossible paths raise on all ranks."""
    raise_on_all_ranks(partial(_check_branches, groups), device)
    last_rows = [episode.last for group in groups for episode in group.episodes]
    return BranchPaths([row.branch_points for row in last_rows], [row.branch_path for row in last_rows])


def _check_branches(groups: Sequence[RolloutGroup]) -> None:
    for group in groups:
        _check_shared_segments(group.rollouts)
    for episode in (episode for group in groups for episode in group.episodes):
        if len(episode.rows) > 1 and any(row.branch_path for row in episode.rows):
            raise ValueError(
                f"Episode {episode.last.episode!r} has {len(episode.rows)} rows and a branch_path, but branch_points "
                "are indices into a single row; leave Rollout.branch_path and branch_points of such rows empty."
            )


def _check_shared_segments(rollouts: Sequence[Rollout]) -> None:
    """Refuse rollouts whose `branch_path` says that they share a segment, but whose tokens differ there."""
    segments: dict[tuple[int, ...], list[int]] = {}
    for rollout in rollouts:
        start = 0
        for place, end in enumerate((*rollout.branch_points, len(rollout.token_ids))):
            path, tokens = rollout.branch_path[: place + 1], rollout.token_ids[start:end]
            if path and segments.setdefault(path, tokens) != tokens:
                raise ValueError(
                    f"Two rollouts of a group share the first numbers of branch_path, {path}, but not the tokens from "
                    f"{start} to {end}; give rollouts that differ there different numbers."
                )
            start = end


def unusable_token_rewards(reason: str, remedy: str) -> str:
    """Error text for rewards per token where they are not supported."""
    return (
        f"a reward function returned a reward per token, but {reason}; {remedy}, or return one number per completion."
    )
