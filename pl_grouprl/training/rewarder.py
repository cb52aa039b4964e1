"""Rewards the rollouts of a run, and gathers the rewards as tensors, the input of advantage estimators.

Legend: E episodes (each one rollout or several, see `EpisodeRows`), F reward functions, N response tokens of all
rollouts, concatenated, T length of the longest episode.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from pl_grouprl.functional.advantages import AdvantageEstimator, BranchPaths, leaf_weights
from pl_grouprl.functional.masked import from_rows, to_rows
from pl_grouprl.rewards import (
    PendingRewards,
    RewardFunction,
    RewardWorkers,
    Weighted,
    check_calls,
    check_columns,
    prepare_rewards,
)
from pl_grouprl.training.buffer import RolloutBuffer
from pl_grouprl.training.metrics import number_or_nan
from pl_grouprl.training.run import Run
from pl_grouprl.types import EpisodeRows, Prompt, RolloutGroup
from pl_grouprl.utilities.distributed import gather_plain, raise_on_all_ranks, reduce_over_ranks
from pl_grouprl.utilities.options import check_options


@dataclass(frozen=True)
class RewardCallOptions:
    """How reward functions are called.

    Attributes:
        workers: Processes per rank that run reward functions in parallel; 0 runs them in this one, in turn. Async
            functions and reward models stay in this one; see `RewardWorkers`.
        timeout: Seconds that a call of a function in a worker, or of an async one, may take: for one group, or for one
            rollout with verl's signature. A longer call is killed with what it started, and fails. No limit if None.
        memory_limit_mb: MiB of address space of each worker, its imports included; a call that needs more fails. No
            limit if None.
        retries: How often a call that raised is repeated.
        max_failed_share: Share of a rank's rollouts on which a reward function may fail; a larger share ends the run.

    Raises:
        ValueError: If an option is out of range.
    """

    workers: int = 0
    timeout: float | None = None
    memory_limit_mb: int | None = None
    retries: int = 1
    max_failed_share: float = 0.5

    def __post_init__(self) -> None:
        timeout, limit, share = self.timeout, self.memory_limit_mb, self.max_failed_share
        fits = limit is None or (limit >= 1 and self.workers > 0)
        check_options(
            {
                "reward_calls.workers": (self.workers, self.workers >= 0, "0 (none) or larger"),
                "reward_calls.timeout": (timeout, timeout is None or timeout > 0, "larger than 0, or None"),
                "reward_calls.memory_limit_mb": (limit, fits, "at least 1, with workers of 1 or more, or None"),
                "reward_calls.retries": (self.retries, self.retries >= 0, "0 or larger"),
                "reward_calls.max_failed_share": (share, 0 <= share <= 1, "in [0, 1]"),
            }
        )


_CALLS = RewardCallOptions()


class Rewarder:
    """Calls the reward functions, and ends a run that gets no rewards.

    Args:
        rewards: One reward function or several; see `pl_grouprl.rewards`.
        run: Provides the tokenizer.
        calls: How reward functions are called.
        max_unrewarded_batches: Abort after this many consecutive batches without any reward.
        environments: Whether reward functions may take the environments of rollouts; otherwise they never see them.

    Attributes:
        unrewarded_batches: Consecutive batches without any reward so far.

    Raises:
        ValueError: If a function that takes environments would run in a worker, or if it needs a time limit and would
            run outside a worker or without a limit.
    """

    def __init__(
        self,
        rewards: list[Weighted | RewardFunction] | RewardFunction,
        run: Run,
        calls: RewardCallOptions = _CALLS,
        *,
        max_unrewarded_batches: int = 10,
        environments: bool = False,
    ) -> None:
        self.functions = prepare_rewards(rewards)
        self._given = list(rewards) if isinstance(rewards, Sequence) else [rewards]
        check_calls(self.functions, calls.workers, calls.timeout, environments=environments)
        self._run, self._calls = run, calls
        self._max_unrewarded_batches = max_unrewarded_batches
        self._environments = environments
        self.unrewarded_batches = 0
        self._workers: RewardWorkers | None = None

    def open(self) -> None:
        """Start the workers."""
        calls = self._calls
        if calls.workers:
            self._workers = RewardWorkers(self.functions, calls.workers, calls.timeout, calls.memory_limit_mb)

    def close(self) -> None:
        """Stop the workers."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def check_columns(self, prompts: Sequence[Prompt], split: str) -> None:
        """Raise for prompts that lack a column that a reward function reads."""
        check_columns(prompts, self.functions, split, environments=self._environments)

    def start(self, groups: Sequence[RolloutGroup]) -> PendingRewards:
        """Start rewarding rollouts; `wait` on the result finishes. See `pl_grouprl.rewards.PendingRewards`."""
        self.functions = [  # a callback may anneal `Weighted.weight`
            replace(function, weight=given.weight)
            if isinstance(given, Weighted) and given.weight != function.weight
            else function
            for function, given in zip(self.functions, self._given, strict=True)
        ]
        if not self._environments:
            for rollout in (rollout for group in groups for rollout in group.rollouts):
                rollout.environment = None
        return PendingRewards(
            groups,
            self.functions,
            tokenizer=self._run.tokenizer,
            retries=self._calls.retries,
            max_failed_share=self._calls.max_failed_share,
            workers=self._workers,
            timeout=self._calls.timeout,
        )

    def count_unrewarded(self, metrics: Mapping[str, float]) -> None:
        """Warn if no rollout on any rank has a reward.

        Args:
            metrics: Metrics of the batch; `reward` is NaN if there is no reward.

        Raises:
            RuntimeError: After `max_unrewarded_batches` such batches in a row.
        """
        if not math.isnan(metrics["reward"]):
            self.unrewarded_batches = 0
            return
        self.unrewarded_batches += 1
        rank_zero_warn(
            "no rollout of a batch has a reward, so nothing is learned from it; check that a reward function applies "
            "and returns finite numbers (rewards/{name}/none and rewards/{name}/invalid count those that are not)."
        )
        if self.unrewarded_batches >= self._max_unrewarded_batches:
            counts = [
                f"{name} returned None for {metrics.get(f'rewards/{name}/none', 0):g} and no finite number for "
                f"{metrics.get(f'rewards/{name}/invalid', 0):g}"
                for name in (reward.name for reward in self.functions)
            ]
            raise RuntimeError(
                f"no rollout had a reward in {self.unrewarded_batches} batches in a row (guards.max_unrewarded_batches="
                f"{self._max_unrewarded_batches}), so nothing is learned. Of the rollouts of the last one "
                f"{'; '.join(counts)}. Fix the reward functions, or check the columns that they read."
            )


# Rewards as tensors.


def rewards_per_token(buffer: RolloutBuffer) -> Tensor:
    """Assign each episode's reward to its trained tokens, whose rewards sum to it.

    A token's reward goes to the last trained token at or before it (a reward on tool output to the end of the tool
    call), or to the first trained token if there is none before. The outcome reward (the reward without all token
    rewards) goes to the last trained token.

    Returns:
        Rewards, shape [N], float32; 0 at tokens that are not trained, and in episodes without a reward.
    """
    episodes = buffer.episodes
    mask_N, lengths_E = buffer.joined("loss_mask"), buffer.episode_lengths
    rewards_N = torch.zeros(len(mask_N), dtype=torch.float64)
    trained = mask_N.nonzero().flatten()  # indices of trained tokens
    episode_index = torch.arange(len(episodes)).repeat_interleave(lengths_E)[trained]
    last_E = torch.full((len(episodes),), -1).scatter_reduce(0, episode_index, trained, "amax")
    outcomes_E = torch.tensor([number_or_nan(episode.outcome_reward) for episode in episodes], dtype=torch.float64)
    rewarded_E = (last_E >= 0) & ~outcomes_E.isnan()
    rewards_N[last_E[rewarded_E]] = outcomes_E[rewarded_E]
    if not has_token_rewards(buffer.groups):
        return rewards_N.float()
    starts = (lengths_E.cumsum(0) - lengths_E).tolist()
    for index in rewarded_E.nonzero().flatten().tolist():
        if steps := episodes[index].step_rewards:
            of_episode = trained[episode_index == index]
            receiver = torch.searchsorted(of_episode, starts[index] + torch.tensor(list(steps)), right=True) - 1
            rewards_N.index_add_(
                0, of_episode[receiver.clamp(min=0)], torch.tensor(list(steps.values()), dtype=torch.float64)
            )
    return rewards_N.float()


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
    step_rewards_N = None
    if any(joined["has_steps"]):
        step_rewards_N = torch.full((sum(joined["lengths"]),), torch.nan)
        first = 0
        for steps, length in zip(joined["steps"], joined["lengths"], strict=True):
            places = [first + place for place in steps]
            step_rewards_N[places] = torch.tensor(list(steps.values()), dtype=torch.float32)
            first += length
    return GroupRewards(
        outcomes=torch.tensor(joined["rewards"], dtype=torch.float32).view(shape),
        group_ids_E=torch.arange(len(sizes)).repeat_interleave(sizes),
        lengths_E=torch.tensor(joined["lengths"], dtype=torch.long),
        sampled_E=torch.tensor(joined["sampled"], dtype=torch.long),
        greedy=None if greedy is None else torch.tensor(joined["greedy"], dtype=torch.float32).view(shape),
        step_rewards_N=step_rewards_N,
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
    branches = _branches(groups, device)
    if estimator.takes_token_rewards:
        rewards = to_rows(buffer.joined("token_rewards"), lengths_E)
    elif any(gather_plain(has_token_rewards(groups), device)):
        raise ValueError(
            f"a reward function returned a reward per token, which advantage_estimator={estimator.name!r} does not "
            "take; use 'reinforce_plus_plus', or return one number per completion."
        )
    else:  # not the sums of the buffer's token_rewards, which are 0 for episodes without a trained token
        outcomes = [number_or_nan(episode.reward) for group in groups for episode in group.episodes]
        rewards = torch.tensor(outcomes).float()
    turns = dict(zip(("turns", "states"), turn_rows(buffer), strict=True)) if "turns" in estimator.needs else {}
    advantages_ET = estimator(
        rewards,
        _group_ids(groups),
        mask=mask_ET,
        branches=branches,
        **turns,
        score_norms=None if score_norm_N is None else to_rows(score_norm_N.cpu(), lengths_E),
        reduce=partial(reduce_over_ranks, device=device),
    )
    return from_rows(advantages_ET, lengths_E)


def turn_rows(buffer: RolloutBuffer) -> tuple[Tensor, Tensor]:
    """The turn of each token of an episode, and the state in which it was written.

    The loss mask does not tell: tokens may be taken out of it, and two rows of an episode may adjoin.

    Returns:
        Turns, counted from 0, -1 for tokens that the model did not write; and states, the same number where the tokens
        between the turn and the one before it are the same, in any episode of the group. Both int64, shape [E, T].
    """
    turns_N = torch.full((int(buffer.episode_lengths.sum()),), -1)
    states_N = torch.zeros_like(turns_N)
    start, known = 0, dict[Any, int]()
    for number, group in enumerate(buffer.groups):
        for episode in group.episodes:
            tokens, end = [token for row in episode.rows for token in row.token_ids], 0
            for turn, (first, stop) in enumerate(episode.turns):
                turns_N[start + first : start + stop] = turn
                read = (number, *tokens[end:first])
                states_N[start + first : start + stop] = known.setdefault(read, len(known))
                end = stop
            start += len(tokens)
    lengths_E = buffer.episode_lengths
    return to_rows(turns_N + 1, lengths_E) - 1, to_rows(states_N, lengths_E)


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
    """Raise if tokens differ where `branch_path` says that they are shared, which would credit the wrong tokens."""
    for group in groups:
        segments: dict[tuple[int, ...], list[int]] = {}
        for rollout in group.rollouts:
            start = 0
            for place, end in enumerate((*rollout.branch_points, len(rollout.token_ids))):
                path, tokens = rollout.branch_path[: place + 1], rollout.token_ids[start:end]
                if path and segments.setdefault(path, tokens) != tokens:
                    raise ValueError(
                        f"Two rollouts of a group share the first numbers of branch_path, {path}, but not the tokens "
                        f"from {start} to {end}; give rollouts that differ there different numbers."
                    )
                start = end
        for episode in group.episodes:
            if len(episode.rows) > 1 and any(row.branch_path for row in episode.rows):
                raise ValueError(
                    f"Episode {episode.last.episode!r} has {len(episode.rows)} rows and a branch_path, but "
                    "branch_points are indices into a single row; leave Rollout.branch_path of such rows empty."
                )
