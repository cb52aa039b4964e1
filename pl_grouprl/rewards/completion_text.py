"""The text of a completion, whichever form TRL's convention gives it."""

from __future__ import annotations

from typing import Any


def completion_text(completion: str | list[dict[str, Any]]) -> str:
    """Return a string as it is, and the contents of messages joined by line feeds."""
    if isinstance(completion, str):
        return completion
    return "\n".join(message.get("content") or "" for message in completion)
