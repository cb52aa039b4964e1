"""Limits on the length of an episode."""

from __future__ import annotations

from dataclasses import dataclass

from pl_grouprl.utilities.options import check_options


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of an episode, besides `sampling.max_new_tokens`, which limits the tokens that the model writes in it.

    Attributes:
        max_tool_calling_iterations: How many times the model may call tools and read their results; it then answers
            once more, and calls in that answer are not executed. None is no limit.
        max_turn_tokens: Most tokens that the model writes in one turn; None is no limit.
        max_episode_tokens: Most tokens after the prompt, tool results included; None leaves only the limit of the
            model's context.

    Raises:
        ValueError: If a limit is out of range.
    """

    max_tool_calling_iterations: int | None = None
    max_turn_tokens: int | None = None
    max_episode_tokens: int | None = None

    def __post_init__(self) -> None:
        lowest = {"max_tool_calling_iterations": 0, "max_turn_tokens": 1, "max_episode_tokens": 1}
        values = {name: getattr(self, name) for name in lowest}
        check_options(
            {
                name: (value, value is None or value >= lowest[name], f"at least {lowest[name]}, or None for no limit")
                for name, value in values.items()
            }
        )


def smallest(*limits: int | None) -> int | None:
    """The smallest of some limits, where None is no limit."""
    known = [limit for limit in limits if limit is not None]
    return min(known, default=None)
