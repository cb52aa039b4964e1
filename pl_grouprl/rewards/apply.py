"""Rewards groups of rollouts: calls the functions, sums their results, writes the rewards into the rollouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pl_grouprl.rewards.base import RewardFunction, Weighted, as_weighted, hook_of
from pl_grouprl.rewards.calls import CallRunner, PendingScores
from pl_grouprl.rewards.conventions import (
    PreparedReward,
    call_arguments,
    flatten_groups,
    prepare_reward,
)
from pl_grouprl.rewards.results import Score, fits_float32, reward_metrics, reward_row
from pl_grouprl.types import EpisodeRows, LiveObject, Prompt, Rollout, RolloutGroup
from pl_grouprl.utilities.copying import private_copy

Rewards = Sequence[Weighted | RewardFunction] | Weighted | RewardFunction | list[PreparedReward]
"""One reward function or a list of them, weighted or not; or what `prepare_rewards` returned."""


def prepare_rewards(rewards: Rewards) -> list[PreparedReward]:
    """Check the names and signatures of reward functions before a run. A list that it returned comes back unchanged.

    Raises:
        ValueError: If the list is empty, names repeat, all weights are 0, or a signature is not supported.
        TypeError: If something is not callable, or is a class.
    """
    if isinstance(rewards, list) and rewards and isinstance(rewards[0], PreparedReward):
        return rewards
    prepared = [prepare_reward(weighted) for weighted in as_weighted(rewards)]
    if all(reward.weight == 0 for reward in prepared):
        raise ValueError(
            f"rewards has weight 0 for all of {[reward.name for reward in prepared]}, so no rollout would have a "
            "reward; give one of them another weight."
        )
    return prepared


def check_columns(prompts: Sequence[Prompt], rewards: Rewards, split: str, *, environments: bool = False) -> None:
    """Check before a run that every prompt has the columns that the reward functions require.

    Calls each function's `set_up` and, for each row, its `check_row`, if it has these methods.

    Args:
        prompts: All prompts.
        rewards: The reward functions.
        split: Name of the data set, for messages.
        environments: Whether rollouts will have environments in this process, for functions that require them.

    Raises:
        ValueError: If a prompt lacks one, or `check_row` refuses it; names the row, the function and the column.
        RewardConfigurationError: If a function raises it.
    """
    prepared = prepare_rewards(rewards)
    for reward in prepared:
        if set_up := hook_of(reward.function, "set_up"):
            set_up()
    rollout = Rollout([], text="", environment=LiveObject(object()) if environments else None)
    for number, prompt in enumerate(prompts):
        group = RolloutGroup(prompt.token_ids, [rollout], number, prompt.columns, prompt.prompt, prompt.data_source)
        inputs = flatten_groups([group])
        for reward in prepared:
            try:
                call_arguments(reward, inputs, [0])
                if check_row := hook_of(reward.function, "check_row"):
                    check_row(private_copy(prompt.columns))
            except ValueError as error:
                raise ValueError(f"{prompt.where or f'{split}, prompt {number}'}: {error}") from error


def check_stoppable(prepared: Sequence[PreparedReward], timeout: float) -> None:
    """Refuse a time limit without workers, unless it serves async functions and all others must stay in this process.

    Raises:
        ValueError: Names the functions that could not be stopped.
    """
    plain = [reward.name for reward in prepared if not reward.is_async]
    movable = [reward.name for reward in prepared if not reward.in_process]
    if movable or len(plain) == len(prepared):
        raise ValueError(
            f"reward_timeout is {timeout} with reward_workers=0; {plain} run in this process, where they cannot be "
            f"stopped. {'Set reward_workers to 1 or more, or leave' if movable else 'Leave'} reward_timeout out."
        )


def check_time_limits(prepared: Sequence[PreparedReward], workers: int, timeout: float | None) -> None:
    """Refuse functions that may run forever, unless workers can stop them.

    Raises:
        ValueError: Names the functions and the options.
    """
    endless = [reward.name for reward in prepared if reward.needs_time_limit]
    if endless and (workers == 0 or timeout is None):
        raise ValueError(
            f"the reward functions {endless} may take forever on some completions, and reward_workers is {workers} "
            f"with reward_timeout {timeout}; set reward_workers to 1 or more and reward_timeout to seconds per call."
        )


class PendingRewards:
    """Rewards that are being computed; see `start_rewards`."""

    def __init__(
        self, groups: Sequence[RolloutGroup], prepared: Sequence[PreparedReward], scores: PendingScores
    ) -> None:
        self._groups = groups
        self._prepared = prepared
        self._scores = scores

    def wait(self) -> dict[str, float]:
        """Run the functions that need this thread, wait for the others, and write the rewards into the rollouts.

        Call it once. Returns and raises the same as `apply_rewards`.
        """
        scores = self._scores.wait()
        rewarded_rows: list[Rollout] = []
        start = 0
        for group in self._groups:
            episodes = group.episodes
            rewarded = [episode.last for episode in episodes]
            end = start + len(rewarded)
            by_function = [_align_steps(per_function[start:end], rewarded) for per_function in scores]
            for rollout, *of_rollout in zip(rewarded, *by_function, strict=True):
                _write_reward(rollout, self._prepared, of_rollout)
            for episode in episodes:
                _share_reward(episode)
            start, rewarded_rows = end, rewarded_rows + rewarded
        return reward_metrics(list(map(reward_row, rewarded_rows)), [reward.name for reward in self._prepared])


def start_rewards(
    groups: Sequence[RolloutGroup],
    rewards: Rewards,
    *,
    tokenizer: Any = None,
    retries: int = 1,
    max_failed_share: float = 0.5,
    workers: CallRunner | None = None,
    timeout: float | None = None,
) -> PendingRewards:
    """Start like `apply_rewards`, but return at once; `wait` on the result finishes the work.

    Coroutine functions and those in worker processes start here. Plain functions of this process run on the thread that
    calls `wait`. Do not change the rollouts until then.
    """
    if retries < 0:
        raise ValueError(f"retries is {retries}; it must be 0 or larger.")
    if not 0 <= max_failed_share <= 1:
        raise ValueError(f"max_failed_share is {max_failed_share}; it must be in [0, 1].")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout is {timeout}; it must be larger than 0, or None for no limit.")
    prepared = prepare_rewards(rewards)
    decode_completions(groups, tokenizer)
    inputs = flatten_groups([_last_rows(group) for group in groups])
    scores = PendingScores(
        prepared, inputs, retries=retries, max_failed_share=max_failed_share, workers=workers, timeout=timeout
    )
    return PendingRewards(groups, prepared, scores)


def apply_rewards(
    groups: Sequence[RolloutGroup],
    rewards: Rewards,
    *,
    tokenizer: Any = None,
    retries: int = 1,
    max_failed_share: float = 0.5,
    workers: CallRunner | None = None,
    timeout: float | None = None,
) -> dict[str, float]:
    """Reward every rollout: sets `Rollout.rewards` (per function, unweighted), `reward` and `token_rewards`.

    The combined reward is the weighted sum over the functions that apply, where None means "does not apply". Functions
    of weight 0 are only logged. The reward is None, and the rollout is not trained, if no other function applies, or if
    one of them failed (raised, took too long, or returned a number that is not finite in float32): the sum of the rest
    would not be comparable with the other rollouts of the group. It is also None if the sum overflows float32.

    In place of a completion's number, a function may return a list with one number per token, None or NaN for a token
    without a reward; the sum is then the completion's reward. If the function returns a list for any completion of a
    group, a single number for another completion is the reward of that completion's last token. The tokens are
    `Rollout.completion_ids`, which begin after the environment's observation.

    For an episode, functions of TRL's signature get the messages as `completions`, with tool calls and results. They
    may also take `completion_mask` (per completion, 1 for each token that the model wrote and 0 for others) and, unless
    they run in worker processes, `environments` (the objects themselves, not copies). Functions of verl's signature get
    the whole decoded completion as `solution_str`, tool results included, as in verl; those with a true attribute
    `reads_final_answer` get the content of the last assistant message.

    Functions are called once per episode: where it has several rows (`RolloutGroup.episodes`), they see the last one.
    All rows get the reward; only the last one gets `token_rewards`.

    Args:
        groups: Any number of groups of any size; modified in place.
        rewards: One reward function or several, weighted or not.
        tokenizer: Decodes completions whose `text` is None, and sets it. Not needed if all have their text.
        retries: Retries of a call that raised.
        max_failed_share: Share of rollouts on which a function may fail before that is an error, from 0 to 1.
        workers: `RewardWorkers` created with the same rewards; functions then run in parallel in its processes. None:
            one after another in this process.
        timeout: Seconds that a call of an async function may take; None uses the workers' limit, if there are workers.

    Returns:
        For each function, `rewards/{name}/mean` and `/std` (of the finite rewards, Bessel-corrected; NaN if there are
        none), `/none` (rollouts to which it did not apply), `/invalid` (on which it failed), and the mean of every
        other finite number in returned dictionaries, over the rollouts whose dictionary has the key, as
        `rewards/{name}/{key}` (`{key}_` for the keys `mean`, `std`, `none` and `invalid`). Which keys the dictionaries
        have depends on the data, so ranks may differ.

    Raises:
        ValueError: If a function returns the wrong type or length, or needs a column that the data lacks; if a text is
            missing and there is no tokenizer.
        RewardConfigurationError: If a function raises it.
        RuntimeError: If a function fails on more rollouts than allowed.
    """
    return start_rewards(
        groups,
        rewards,
        tokenizer=tokenizer,
        retries=retries,
        max_failed_share=max_failed_share,
        workers=workers,
        timeout=timeout,
    ).wait()


def decode_completions(groups: Sequence[RolloutGroup], tokenizer: Any) -> None:
    """Set the text of rollouts that have none."""
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        if rollout.text is not None:
            continue
        if tokenizer is None:
            raise ValueError(
                "Rollout.text is None and tokenizer is None; set the text or pass a tokenizer to decode it."
            )
        rollout.text = tokenizer.decode(rollout.completion_ids, skip_special_tokens=True)


def _last_rows(group: RolloutGroup) -> RolloutGroup:
    """The group with the rollouts that reward functions see."""
    if len(group.rows_per_episode) == len(group.rollouts):
        return group
    return replace(group, rollouts=[episode.last for episode in group.episodes])


def _share_reward(episode: EpisodeRows) -> None:
    last = episode.last
    for row in episode.rows[:-1]:
        row.reward, row.rewards, row.token_rewards = last.reward, dict(last.rewards), None


def _write_reward(rollout: Rollout, prepared: Sequence[PreparedReward], scores: Sequence[Score]) -> None:
    rollout.rewards, rollout.reward, rollout.token_rewards = {}, None, None
    rollout.failed_rewards = [reward.name for reward, score in zip(prepared, scores, strict=True) if score.failed]
    rollout.reward_numbers = {}
    total, any_applies, any_failed = 0.0, False, False
    token_rows: list[list[float | None]] = []
    for reward, score in zip(prepared, scores, strict=True):
        rollout.rewards[reward.name] = score.value
        rollout.reward_numbers |= {f"{reward.name}/{key}": number for key, number in score.extras.items()}
        if reward.weight == 0:
            continue
        any_failed = any_failed or score.failed
        any_applies = any_applies or score.value is not None
        if score.token_rewards is not None:
            token_rows.append([None if value is None else reward.weight * value for value in score.token_rewards])
        elif score.value is not None:
            total += reward.weight * score.value
    if any_failed or not any_applies:
        return
    tokens = _sum_tokens(token_rows) if token_rows else None
    if tokens is not None:
        steps = [value for value in tokens if value is not None]
        total = (total + math.fsum(steps)) if all(map(fits_float32, steps)) else math.inf  # fsum may overflow
    if fits_float32(total):
        rollout.reward, rollout.token_rewards = total, tokens


def _sum_tokens(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
    """The sum of the rewards of each token; None for a token without any."""
    return [
        None if all(value is None for value in column) else sum(value for value in column if value is not None)
        for column in zip(*rows, strict=True)
    ]


def _align_steps(scores: Sequence[Score], rollouts: Sequence[Rollout]) -> list[Score]:
    """Align a function's token rewards with the token ids of a group's rollouts.

    If it rewarded tokens of any rollout, its single numbers become rewards of the last token.
    """
    if all(score.token_rewards is None for score in scores):
        return list(scores)
    return [_align(score, rollout) for score, rollout in zip(scores, rollouts, strict=True)]


def _align(score: Score, rollout: Rollout) -> Score:
    if score.token_rewards is not None:
        return replace(score, token_rewards=[*[None] * rollout.num_observation_tokens, *score.token_rewards])
    if score.value is not None and rollout.token_ids:
        return replace(score, token_rewards=[*[None] * (len(rollout.token_ids) - 1), score.value])
    return score
