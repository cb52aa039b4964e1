"""Two graders that make a run ill, for docs/reading_the_logs.md: one never pays, one can be cheated."""

from __future__ import annotations

from typing import Any


def boxed(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    r"""1 for the answer in \boxed{}, in which a model that was not told so never writes it."""
    return [float(f"\\boxed{{{right}}}" in text) for text, right in zip(completions, answer, strict=True)]


def contains(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 for the answer anywhere in the completion, as in one that lists all possible answers."""
    return [float(right in text) for text, right in zip(completions, answer, strict=True)]
