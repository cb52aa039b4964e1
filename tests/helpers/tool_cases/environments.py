"""Environments with and without tools, prompts and rewards."""

from __future__ import annotations

import json
from typing import Any


class Counter:
    """An environment with a counter."""

    def reset(self, **columns: Any) -> None:
        self._count = 0

    def increment(self, step: int) -> int:
        """Add to the counter.

        Args:
            step: What to add.

        Returns:
            The new value.
        """
        self._count += step
        return self._count


class RewardingCounter(Counter):
    """An environment whose reward is its counter."""

    def get_reward(self) -> float:
        return float(self._count)


class CounterTask:
    """An environment that writes its prompt."""

    def reset(self, **columns: Any) -> str:
        return "Count."

    def increment(self, step: int) -> int:
        """Count on.

        Args:
            step: By how much.

        Returns:
            The step.
        """
        return step


class EchoTask:
    """Another environment, with another tool."""

    def reset(self, **columns: Any) -> str:
        return "Echo."

    def shout(self, text: str) -> str:
        """Say it loudly.

        Args:
            text: What to say.

        Returns:
            The text in upper case.
        """
        return text.upper()


class OwnTask:
    """An environment without tools that gives the prompt."""

    def reset(self, **columns: Any) -> str:
        return "Guess the word."


class Columns:
    """An environment that shows what it is reset with."""

    def reset(self, prompt: Any = None, difficulty: int = 0, **columns: Any) -> str:
        self._seen = {"difficulty": difficulty, **columns}
        return f" Columns: {sorted(columns)}, difficulty {difficulty}, {len(prompt or [])} messages."

    def look(self) -> str:
        """Look around.

        Returns:
            What there is to see.
        """
        return json.dumps(self._seen)

    async def wait(self, steps: int) -> str:
        """Wait for something to happen.

        Args:
            steps: How long.

        Returns:
            What happened.
        """
        return "." * steps


def numbered_environments() -> type:
    """A class of environments each of which knows how many were made before it and how often it was reset."""
    made = iter(range(1000))

    class Numbered:
        def __init__(self) -> None:
            self._number, self._resets = next(made), 0

        def reset(self, **columns: Any) -> str | None:
            self._resets += 1
            return None if self._number == 1 else f" You are number {self._number}, life {self._resets}."

        def who(self) -> int:
            """Who am I?

            Returns:
                The number.
            """
            return self._number

        def get_reward(self) -> float:
            return self._number / 4

    return Numbered
