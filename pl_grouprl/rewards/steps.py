"""Finds the tokens at which the steps of a completion end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_BYTES_PER_CHARACTER = 4


def step_ends(token_ids: Sequence[int], tokenizer: Any, separator: str) -> list[int]:
    """Return the index of the last token of each step.

    A step ends at the token that completes `separator`, whatever else that token contains. The last step ends with the
    completion, before its final special tokens. White space and separators alone are not a step: they belong to the
    next one or, at the end of the completion, to none.

    Args:
        token_ids: The completion.
        tokenizer: Decodes the token ids.
        separator: Text that ends a step; not empty.
    """
    length = _length_before_final(token_ids, set(tokenizer.all_special_ids))
    may_complete = _MayComplete(tokenizer, separator[-1])
    window = _BYTES_PER_CHARACTER * len(separator)  # a token has at least one byte
    ends: list[int] = []
    start = blank = 0  # the tokens from `start` to `blank` have no content
    for index in range(length):
        if not may_complete(token_ids[index]):
            continue
        tail = token_ids[max(start, index + 1 - window) : index + 1]
        without, count = (_decode(tokenizer, tokens).count(separator) for tokens in (tail[:-1], tail))
        if count > without:
            if _has_content(tokenizer, token_ids[blank : index + 1], separator):
                ends.append(index)
                start = index + 1
            blank = index + 1
    if _has_content(tokenizer, token_ids[blank:length], separator):
        ends.append(length - 1)
    return ends


def _length_before_final(token_ids: Sequence[int], special: set[int]) -> int:
    """The length of a completion without its final special tokens."""
    length = len(token_ids)
    while length and token_ids[length - 1] in special:
        length -= 1
    return length


class _MayComplete:
    """Whether a token may complete the separator: it has its last character, or part of a multi-byte character."""

    def __init__(self, tokenizer: Any, character: str) -> None:
        self._tokenizer = tokenizer
        self._character = character
        self._known: dict[int, bool] = {}

    def __call__(self, token: int) -> bool:
        if token not in self._known:
            text = _decode(self._tokenizer, [token])
            self._known[token] = self._character in text or "�" in text
        return self._known[token]


def _has_content(tokenizer: Any, token_ids: Sequence[int], separator: str) -> bool:
    return bool(_decode(tokenizer, token_ids).replace(separator, "").strip())


def _decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    return text
