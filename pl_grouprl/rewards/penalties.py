"""Rewards and penalties by length and repetition. Tests: tests/rewards/test_shaping_rewards.py."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from pl_grouprl.rewards.apply import PendingRewards
from pl_grouprl.rewards.base import (
    RewardFunction,
    Weighted,
    as_weighted,
    content_text,
    hook_of,
    prepare_reward,
    written_ids,
    written_text,
)
from pl_grouprl.types import LiveObject, Rollout, RolloutGroup
from pl_grouprl.utilities.options import check_fields


def cosine_between(start: float, end: float, progress: float) -> float:
    """Interpolate from `start` to `end` along half a cosine, flat at both ends (CosFn in arXiv:2502.03373).

    Args:
        start: Value at progress 0 and below.
        end: Value at progress 1 and above.
        progress: Position between the two, without unit.
    """
    progress = min(max(progress, 0.0), 1.0)
    return end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * progress))


@dataclass(eq=False)
class CosineLengthReward:
    """Cosine reward of arXiv:2502.03373. Has TRL's signature; replaces the correctness reward.

    The reward of a correct answer falls from `max_value_correct` at length 0 to `min_value_correct` at `max_len`. The
    reward of a wrong one rises from `min_value_wrong` to `max_value_wrong`: a policy that does not know the answer yet
    may think for longer. Lengths beyond `max_len` count as `max_len`. (Up to there, with `unit="character"`, the
    numbers equal those of open-r1's `get_cosine_scaled_reward`, whose cosine turns back beyond it.)

    Attributes:
        correct: Reward function that judges correctness, with TRL's or verl's signature, `async` or not. A completion
            is correct if its reward is larger than `threshold`. If it does not apply (None), neither does this; if it
            fails, there is no reward either.
        max_len: Length at which the cosine ends, in `unit`s; usually the sampler's `max_completion_length`.
        min_value_wrong: Reward of a wrong answer of length 0.
        max_value_wrong: Reward of a wrong answer of `max_len`.
        min_value_correct: Reward of a correct answer of `max_len`.
        max_value_correct: Reward of a correct answer of length 0.
        exceed_value: Reward at `max_len` and beyond, correct or not (the paper's r_e); no such penalty if None.
        threshold: Largest reward of `correct` that still counts as wrong.
        unit: Unit of length: `token` (the paper) or `character` (open-r1). In an episode, only what the model
            wrote counts.
    """

    correct: RewardFunction
    max_len: int
    _: KW_ONLY
    min_value_wrong: float = -1.0
    max_value_wrong: float = -0.5
    min_value_correct: float = 0.5
    max_value_correct: float = 1.0
    exceed_value: float | None = None
    threshold: float = 0.5
    unit: Literal["token", "character"] = "token"

    def __post_init__(self) -> None:
        wrong, best = self.max_value_wrong, self.max_value_correct
        # Else a long wrong answer would earn more than a long correct one.
        ordered = wrong <= self.min_value_correct <= best
        check_fields(
            self,
            max_len=(self.max_len >= 1, "at least 1"),
            max_value_wrong=(True, "a finite number"),
            max_value_correct=(True, "a finite number"),
            unit=(self.unit in ("token", "character"), "token or character"),
            min_value_wrong=(self.min_value_wrong <= wrong, f"at most max_value_wrong={wrong}"),
            min_value_correct=(ordered, f"from max_value_wrong={wrong} to max_value_correct={best}"),
            exceed_value=(True, "a finite number"),
            threshold=(True, "a finite number"),
        )
        self._judge = prepare_reward(as_weighted([Weighted(self.correct)])[0])
        if self._judge.convention not in ("trl", "verl"):
            raise ValueError(
                f"CosineLengthReward.correct is {self._judge.name!r}, which has neither TRL's nor verl's signature; "
                "pass a function of completions, or add that reward next to this one."
            )

    @property
    def stays_in_process(self) -> bool:
        """Same as for `correct`, unless that stays only because it is async."""
        return self._judge.in_process and not self._judge.is_async

    @property
    def needs_time_limit(self) -> bool:
        """Same as for `correct`."""
        return self._judge.needs_time_limit

    def set_up(self) -> None:
        """Call the `set_up` of `correct`, if it has one."""
        if set_up := hook_of(self.correct, "set_up"):
            set_up()

    def check_row(self, columns: dict[str, Any]) -> None:
        """Call the `check_row` of `correct`, if it has one."""
        if check_row := hook_of(self.correct, "check_row"):
            check_row(columns)

    def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]],
        completion_mask: list[list[int]] | None = None,
        **columns: list[Any],
    ) -> list[float | None]:
        """Return the reward of each completion; NaN, which counts as a failure, where `correct` failed.

        Raises:
            ValueError: If `correct` needs a column that the data lacks, or returns the wrong type or length.
        """
        units: Sequence[Any] = written_ids(completion_ids, completion_mask)
        if self.unit == "character":
            units = [written_text(completion) for completion in completions]
        groups = []
        for index, (prompt, completion, ids) in enumerate(zip(prompts, completions, completion_ids, strict=True)):
            row = {name: values[index] for name, values in columns.items()}
            text = completion
            if not isinstance(completion, str):
                text = "\n".join(map(content_text, completion))
            environment = row.get("environments")
            rollout = Rollout(
                ids,
                text=text,
                messages=None if text is completion or isinstance(prompt, str) else completion,
                loss_mask=None if completion_mask is None else completion_mask[index],
                environment=None if environment is None else LiveObject(environment),
            )
            source = str(row.get("data_source") or "default")
            # The prompt's tokens are unknown here, but neither signature receives them.
            groups.append(RolloutGroup([0], [rollout], index, row, prompt, source))
        # The caller, which sees the NaNs, decides how many may fail.
        (scores,) = PendingRewards(groups, [self._judge], max_failed_share=1.0).scores()
        rewards: list[float | None] = []
        for score, length in zip(scores, map(len, units), strict=True):
            if score.failed or score.value is None:
                rewards.append(math.nan if score.failed else None)
            elif self.exceed_value is not None and length >= self.max_len:
                rewards.append(self.exceed_value)
            else:
                start, end = (self.min_value_wrong, self.max_value_wrong)
                if score.value > self.threshold:
                    start, end = (self.max_value_correct, self.min_value_correct)
                rewards.append(cosine_between(start, end, length / self.max_len))
        return rewards


@dataclass(eq=False)
class OverlongPenalty:
    """Soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13). Has TRL's signature.

    With y tokens in a completion, L = `max_length` and C = `overlong_buffer`::

        0                                y <= L - C
        penalty * ((L - C) - y) / C      L - C < y <= L
        -penalty                         y > L

    In an episode, only tokens that the model wrote count. Combine it with a reward for correctness; alone, it only
    teaches brevity. TRL's `get_soft_overlong_punishment(max_completion_len, soft_punish_cache)` and verl's
    `overlong_buffer_cfg` (`len`, `penalty_factor`, with `max_resp_len`) give the same numbers.

    Attributes:
        max_length: L, in tokens; usually the sampler's `max_completion_length`.
        overlong_buffer: C, in tokens, from 0 (no slope, only the drop beyond L) to `max_length`.
        penalty: Size of the penalty, positive.
    """

    max_length: int
    overlong_buffer: int
    penalty: float = 1.0

    def __post_init__(self) -> None:
        check_fields(
            self,
            max_length=(self.max_length >= 1, "at least 1 token"),
            overlong_buffer=(
                0 <= self.overlong_buffer <= self.max_length,
                f"between 0 and max_length={self.max_length} tokens",
            ),
            penalty=(self.penalty > 0, "positive, as the reward is its negative"),
        )

    def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]],
        completion_mask: list[list[int]] | None = None,
        **columns: list[Any],
    ) -> list[float]:
        """Return the penalty of each completion, from -penalty to 0."""
        free = self.max_length - self.overlong_buffer
        penalties = []
        for length in map(len, written_ids(completion_ids, completion_mask)):
            if length <= free:
                penalties.append(0.0)
            elif length > self.max_length:
                penalties.append(-self.penalty)
            else:
                penalties.append((free - length) / self.overlong_buffer * self.penalty)
        return penalties


def repeated_share(units: Sequence[Hashable], ngram_size: int) -> float:
    """Return the share of n-grams that occurred before: 1 - distinct / all (arXiv:2502.03373, appendix C.2).

    Args:
        units: Words or tokens.
        ngram_size: Units in one n-gram, at least 1. N-grams overlap.

    Returns:
        A number in [0, 1); 0 if there are fewer units than in one n-gram.
    """
    total = len(units) - ngram_size + 1
    if total < 1:
        return 0.0
    distinct = {tuple(units[start : start + ngram_size]) for start in range(total)}
    return 1 - len(distinct) / total


@dataclass(eq=False)
class RepetitionPenalty:
    """`max_penalty` times the share of repeated n-grams (arXiv:2502.03373, appendix C.2). Has TRL's signature.

    On words it agrees with open-r1's `get_repetition_penalty_reward`: words are separated by white space, and case is
    ignored. Languages without spaces between words need `unit="token"`. In an episode, only the text of the model
    counts, with all turns joined.

    Attributes:
        ngram_size: Words or tokens in one n-gram.
        max_penalty: Reward that a completion approaches as it repeats a single n-gram; not positive.
        unit: Count n-grams of words (`word`) or tokens (`token`).
    """

    ngram_size: int
    max_penalty: float
    unit: Literal["word", "token"] = "word"

    def __post_init__(self) -> None:
        check_fields(
            self,
            ngram_size=(self.ngram_size >= 1, "at least 1"),
            max_penalty=(self.max_penalty <= 0, "not positive, such as -1.0"),
            unit=(self.unit in ("word", "token"), "word or token"),
        )

    def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]],
        completion_mask: list[list[int]] | None = None,
        **columns: list[Any],
    ) -> list[float]:
        """Return the penalty of each completion, from max_penalty to 0."""
        sequences: list[Any] = written_ids(completion_ids, completion_mask)
        if self.unit == "word":
            sequences = [written_text(completion).lower().split() for completion in completions]
        # + 0.0 turns -0.0 into 0.0.
        return [self.max_penalty * repeated_share(units, self.ngram_size) + 0.0 for units in sequences]
