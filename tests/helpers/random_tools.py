"""Tools and an environment for random episodes, calls of them, and what they answer."""

from __future__ import annotations

import random
from typing import Any

Call = tuple[str, dict[str, Any]]
"""Name and arguments."""

TEXTS = ("", "So.", "Größe 数 🧮", "two\n\nlines ", "the tool <result>", '{"a": 1}', "  spaces  ", "\n")


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: First summand.
        b: Second summand.

    Returns:
        The sum.
    """
    return a + b


async def turn_round(text: str) -> str:
    """Turn a text round.

    Args:
        text: Any text.

    Returns:
        It, from its end.
    """
    return text[::-1]


def fill(text: str, times: int) -> str:
    """Repeat a text.

    Args:
        text: Any text.
        times: How often.

    Returns:
        The long text.
    """
    return text * times


def crash(why: str) -> str:
    """Fail.

    Args:
        why: The message.

    Returns:
        Nothing.
    """
    raise RuntimeError(why)


TOOLS = (add, turn_round, fill, crash)


class Walk:
    """An environment that counts steps and says where it starts, which differs between rollouts of a prompt."""

    made = 0

    def __init__(self) -> None:
        self._start = Walk.made
        Walk.made += 1

    def reset(self, **columns: Any) -> str | None:
        self._place = self._start
        return None if self._start % 3 == 0 else f" You stand at {self._start}."

    def walk(self, steps: int) -> int:
        """Walk on.

        Args:
            steps: How many steps.

        Returns:
            The new place.
        """
        self._place += steps
        return self._place

    def get_reward(self) -> float:
        return float(self._place)


def write_call(rng: random.Random) -> Call:
    """A random call; about a third fail."""
    text, number = rng.choice(TEXTS), rng.randint(0, 9)
    return rng.choice(
        (
            ("add", {"a": number, "b": rng.randint(0, 9)}),
            ("add", {"a": number}),
            ("turn_round", {"text": text}),
            ("turn_round", {"txt": text}),
            ("fill", {"text": text, "times": number}),
            ("fill", {"text": "long ", "times": 10 * number}),
            ("crash", {"why": text}),
            ("walk", {"steps": number}),
            ("nowhere", {"text": text}),
        )
    )


class Oracle:
    """What the tools answer in one episode, in the order of their results."""

    def __init__(self, place: int | None) -> None:
        self.place = place

    def answer(self, calls: tuple[Call, ...]) -> list[tuple[str, str, str | None]]:
        """Name, content and failure of each result: those of async tools come last."""
        results = [(name, *self._one(name, values)) for name, values in calls]
        return sorted(results, key=lambda result: result[0] == "turn_round" and "keyword" not in result[1])

    def _one(self, name: str, values: dict[str, Any]) -> tuple[str, str | None]:
        if name == "nowhere" or (name == "walk" and self.place is None):
            return str({"error": f"Tool {name} not found."}), "unknown"
        if name == "crash":
            return str({"error": values["why"]}), "raised"
        if name == "walk":
            self.place += values["steps"]
            return str(self.place), None
        if values.keys() == {"a"}:
            return str({"error": "add() missing 1 required positional argument: 'b'"}), "arguments"
        if values.keys() == {"txt"}:
            return str({"error": "turn_round() got an unexpected keyword argument 'txt'"}), "arguments"
        return str({"add": _sum, "turn_round": _reversed, "fill": _filled}[name](**values)), None


def _sum(a: int, b: int) -> int:
    return a + b


def _reversed(text: str) -> str:
    return text[::-1]


def _filled(text: str, times: int) -> str:
    return text * times
