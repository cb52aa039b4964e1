"""Extracts what the model wrote from a completion in either form of TRL's convention."""

from __future__ import annotations

from collections.abc import Sequence

from pl_grouprl.types import Messages


def completion_text(completion: str | Messages) -> str:
    """Return the model's answer: a string unchanged; of messages, the content of the last assistant message.

    Earlier turns and tool results are not part of the answer. Empty if there is none.
    """
    if isinstance(completion, str):
        return completion
    return next(reversed(_assistant_texts(completion)), "")


def written_text(completion: str | Messages) -> str:
    """Return everything the model wrote: a string unchanged; of messages, the joined contents of the assistant's."""
    return completion if isinstance(completion, str) else "\n".join(_assistant_texts(completion))


def written_ids(completion_ids: Sequence[list[int]], completion_mask: Sequence[list[int]] | None) -> list[list[int]]:
    """Return the tokens of each completion that the model wrote; without a mask, all of them."""
    if completion_mask is None:
        return list(completion_ids)
    return [
        [token for token, bit in zip(ids, mask, strict=True) if bit]
        for ids, mask in zip(completion_ids, completion_mask, strict=True)
    ]


def _assistant_texts(messages: Messages) -> list[str]:
    return [message.get("content") or "" for message in messages if message.get("role") == "assistant"]
