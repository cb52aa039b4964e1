"""The tokens of a response as readable text, set in lines like a paragraph."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any, NamedTuple

COLUMNS = 96
"""Characters of a line."""

_WIDEST = 4
"""By how much the tokens of a response that fills less than a line are spread."""

_MOST = 24
"""Characters of a token that are shown."""

_CONTEXT = 8
"""Tokens that are decoded before a token, so that it gets its space and its part of a character."""

_VISIBLE = {"\n": "↵", "\r": "␍", "\t": "→"}


class Cell(NamedTuple):
    """A token on its line.

    Attributes:
        number: Place in the response, from 0.
        start: Column at which it begins.
        width: Columns.
        text: What is shown.
    """

    number: int
    start: int
    width: int
    text: str


def token_texts(token_ids: Sequence[int], tokenizer: Any) -> list[str]:
    """Return the text that each token adds to a response.

    Args:
        token_ids: Tokens of one response, length T.
        tokenizer: A tokenizer of transformers.

    Returns:
        T strings, special tokens by name. A character made of several tokens is that of the last one; the others
        are empty.
    """
    texts = []
    for index in range(len(token_ids)):
        first = max(0, index - _CONTEXT)
        before = _decoded(tokenizer, token_ids[first:index])
        texts.append(_decoded(tokenizer, token_ids[first : index + 1])[len(before) :])
    return texts


def _decoded(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text without the beginning of an unfinished character."""
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text.rstrip("�")


def lines_of(texts: Sequence[str], columns: int = COLUMNS) -> list[list[Cell]]:
    """Set tokens in lines, without splitting one; a new line follows each line break in the text."""
    shown = list(map(_shown, texts))
    widths = [max(1, sum(map(_width, text))) for text in shown]
    spread = max(1, min(_WIDEST, columns // sum(widths)))
    lines: list[list[Cell]] = [[]]
    for index, width in enumerate(spread * width for width in widths):
        last = lines[-1][-1] if lines[-1] else None
        start = last.start + last.width if last else 0
        if last and (start + width > columns or "\n" in texts[last.number]):
            lines.append([])
            start = 0
        lines[-1].append(Cell(index, start, width, shown[index]))
    return lines


def _shown(text: str) -> str:
    visible = "".join(_VISIBLE.get(character, character if character.isprintable() else "·") for character in text)
    return visible if len(visible) <= _MOST else visible[: _MOST - 1] + "…"


def _width(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
