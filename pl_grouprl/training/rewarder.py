"""Rewards the rollouts of a run, optionally in worker processes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from pl_grouprl.rewards import (
    PendingRewards,
    RewardFunction,
    RewardWorkers,
    Weighted,
    check_columns,
    check_environments,
    check_stoppable,
    check_time_limits,
    prepare_rewards,
    start_rewards,
)
from pl_grouprl.training.run import Run
from pl_grouprl.types import Prompt, RolloutGroup
from pl_grouprl.utilities.options import check_options


class Rewarder:
    """Calls the reward functions, and ends a run that gets no rewards.

    Args:
        rewards: One reward function or several; see `pl_grouprl.rewards`.
        run: Provides the tokenizer.
        workers: Processes per rank that run reward functions in parallel; 0 runs them in this one.
        timeout: Seconds that a call may take; None is no limit.
        memory_limit_mb: MiB of address space of each worker; None is no limit.
        retries: How often a call that raised is repeated.
        max_failed_share: Share of a rank's rollouts on which a function may fail before that is an error.
        max_unrewarded_batches: Abort after this many consecutive batches without any reward.
        environments: Whether reward functions may take the environments of rollouts; otherwise they never see them.

    Attributes:
        unrewarded_batches: Consecutive batches without any reward so far.

    Raises:
        ValueError: If an option is out of range, a function that takes environments would run in a worker, or one
            that needs a time limit would run outside a worker or without a limit.
    """

    def __init__(
        self,
        rewards: list[Weighted | RewardFunction] | RewardFunction,
        run: Run,
        *,
        workers: int = 0,
        timeout: float | None = None,
        memory_limit_mb: int | None = None,
        retries: int = 1,
        max_failed_share: float = 0.5,
        max_unrewarded_batches: int = 10,
        environments: bool = False,
    ) -> None:
        check_options(
            {
                "reward_workers": (workers, workers >= 0, "0 (none) or larger"),
                "reward_retries": (retries, retries >= 0, "0 or larger"),
                "max_failed_share": (max_failed_share, 0 <= max_failed_share <= 1, "in [0, 1]"),
                "reward_timeout": (timeout, timeout is None or timeout > 0, "larger than 0, or None for no limit"),
                "reward_memory_limit_mb": (
                    memory_limit_mb,
                    memory_limit_mb is None or (memory_limit_mb >= 1 and workers > 0),
                    "at least 1, with reward_workers of 1 or more, or None for no limit",
                ),
                "max_unrewarded_batches": (max_unrewarded_batches, max_unrewarded_batches >= 1, "at least 1"),
            }
        )
        self.functions = prepare_rewards(rewards)
        self._given = list(rewards) if isinstance(rewards, Sequence) else [rewards]
        if timeout is not None and workers == 0:
            check_stoppable(self.functions, timeout)
        check_time_limits(self.functions, workers, timeout)
        if environments and workers:
            check_environments(self.functions)
        self._run = run
        self._num_workers, self._timeout, self._memory_limit_mb = workers, timeout, memory_limit_mb
        self._retries, self._max_failed_share = retries, max_failed_share
        self._max_unrewarded_batches = max_unrewarded_batches
        self._environments = environments
        self.unrewarded_batches = 0
        self._workers: RewardWorkers | None = None

    def open(self) -> None:
        """Start the workers."""
        if self._num_workers:
            self._workers = RewardWorkers(self.functions, self._num_workers, self._timeout, self._memory_limit_mb)

    def close(self) -> None:
        """Stop the workers."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def check_columns(self, prompts: Sequence[Prompt], split: str) -> None:
        """Refuse prompts that lack a column that a reward function reads."""
        check_columns(prompts, self.functions, split, environments=self._environments)

    def start(self, groups: Sequence[RolloutGroup]) -> PendingRewards:
        """Start rewarding rollouts; `wait` on the result finishes. See `pl_grouprl.rewards.start_rewards`."""
        self._read_weights()
        if not self._environments:
            for rollout in (rollout for group in groups for rollout in group.rollouts):
                rollout.environment = None
        return start_rewards(
            groups,
            self.functions,
            tokenizer=self._run.tokenizer,
            retries=self._retries,
            max_failed_share=self._max_failed_share,
            workers=self._workers,
            timeout=self._timeout,
        )

    def _read_weights(self) -> None:
        """Adopt weights that have changed since the last batch: a callback may anneal `Weighted.weight`."""
        self.functions = [
            replace(function, weight=given.weight)
            if isinstance(given, Weighted) and given.weight != function.weight
            else function
            for function, given in zip(self.functions, self._given, strict=True)
        ]

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
                f"no rollout had a reward in {self.unrewarded_batches} batches in a row (max_unrewarded_batches="
                f"{self._max_unrewarded_batches}), so nothing is learned. Of the rollouts of the last one "
                f"{'; '.join(counts)}. Fix the reward functions, or check the columns that they read."
            )
