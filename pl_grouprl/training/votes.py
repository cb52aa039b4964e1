"""Extracts answers from completions, for the majority vote of maj@k."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from pl_grouprl.rewards.base import hook_of
from pl_grouprl.rewards.completion_text import completion_text
from pl_grouprl.rewards.conventions import PreparedReward
from pl_grouprl.types import Rollout, RolloutGroup

Answers = list[str | None]
"""The answer of each episode of a group; None for no answer, which is a vote like any other."""


class AnswerExtractor:
    """Extracts answers with a reward function's method; without one, the whole text is the answer.

    For an episode, the text is the content of the last assistant message.

    Args:
        rewards: The first one with a method `extract_answer(text)`, or `extract_answer(text, columns)` with the row's
            columns, is used. Without one, answers are the stripped texts.
    """

    def __init__(self, rewards: Sequence[PreparedReward] = ()) -> None:
        self._hook: Callable[..., Any] | None = None
        self._takes_columns = self._warned = False
        for reward in rewards:
            if hook := hook_of(reward.function, "extract_answer"):
                self._name, self._hook = reward.name, hook
                self._takes_columns = "columns" in inspect.signature(hook).parameters
                break

    def answers(self, group: RolloutGroup) -> Answers:
        """The answer of each episode; None, with a warning the first time, where the method raises."""
        return [self._answer(_text(episode.last), group.columns) for episode in group.episodes]

    def _answer(self, text: str, columns: Mapping[str, Any]) -> str | None:
        if self._hook is None:
            return text.strip()
        try:
            answer = self._hook(text, columns=columns) if self._takes_columns else self._hook(text)
        except Exception as error:
            if not self._warned:
                self._warned = True
                rank_zero_warn(
                    f"extract_answer of the reward function {self._name!r} raised {type(error).__name__}: {error}. "
                    "Completions for which it raises count as having no answer in maj@k."
                )
            return None
        return None if answer is None else str(answer)


def _text(rollout: Rollout) -> str:
    return (rollout.text or "") if rollout.messages is None else completion_text(rollout.messages)
