"""The control tokens of a prompt: those that its chat template or its tokenizer adds, and none from its text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

MARK = "~^_~|~_^~"
"""Stands in rendered text where `ControlTokens` has broken the text of a control token; templates print it as it is."""


def tokens_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer adds before a text, such as BOS, and after it, such as EOS."""
    own, ids = (list(tokenizer(["0a"], add_special_tokens=special)["input_ids"][0]) for special in (False, True))
    starts = [place for place in range(len(ids) + 1) if ids[place : place + len(own)] == own]
    if not starts:
        raise ValueError(f"{type(tokenizer).__name__} encodes a text differently with special tokens: {own}, {ids}.")
    return ids[: starts[0]], ids[starts[0] + len(own) :]


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """The special tokens of a tokenizer, by id."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    ids, texts = getattr(tokenizer, "all_special_ids", ()), getattr(tokenizer, "all_special_tokens", ())
    return {token: text.content for token, text in added.items() if text.special} | dict(zip(ids, texts, strict=True))


class ControlTokens:
    """Encodes rendered messages so that control tokens in their text are text (`split_special_tokens` of tokenizers).

    `mark` breaks the text of special tokens in messages, which a chat template then renders. `encode` puts a special
    token into each break, because no text merges with it, and removes it from the result. All other text, and the
    control tokens of the template, are encoded as always.

    Args:
        tokenizer: A transformers tokenizer.
        template: The chat template; None is the tokenizer's. In results of tools, added tokens that are not special,
            such as `</tool_response>`, are text as well if the template writes them.
        split: Whether to do anything; otherwise control tokens in text act as such.
    """

    def __init__(self, tokenizer: Any, template: str | None = None, split: bool = True) -> None:
        self._tokenizer, self._split = tokenizer, split
        special, eos = special_tokens(tokenizer), getattr(tokenizer, "eos_token_id", None)
        mark = (eos, special[eos]) if eos in special else next(iter(special.items()), (None, ""))
        self._mark_id: int | None = mark[0]
        self._mark_text: str = mark[1]
        source = str(template or getattr(tokenizer, "chat_template", None))
        added = (token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values())
        written = [text for text in added if text.strip() and text in source]
        self._special, self._written = _any_of(special.values()), _any_of([*special.values(), *written])

    def mark(self, messages: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Copies of messages with marks."""
        if not self._split:
            return list(messages)
        return [_mark(one, self._written if one.get("role") == "tool" else self._special) for one in messages]

    def mark_text(self, text: str) -> str:
        """A text with marks, outside of messages."""
        return str(_mark(text, self._special))

    def without_marks(self, text: str) -> str:
        """What `encode` encodes, as the model reads it."""
        return text.replace(MARK, "")

    def after(self, text: str, count: int) -> str:
        """The text with marks after its first `count` characters, marks not counted."""
        parts = text.split(MARK)
        while count > len(parts[0]):
            count -= len(parts.pop(0))
        return MARK.join([parts[0][count:], *parts[1:]])

    def with_tokens(self, text: str) -> str:
        """What a tokenizer can encode; see `kept`."""
        return text.replace(MARK, self._mark_text)

    def kept(self, token_ids: Sequence[int], text: str) -> list[bool]:
        """Which tokens of `with_tokens(text)` are those of the text."""
        found = re.findall(f"{re.escape(MARK)}|{re.escape(self._mark_text)}", text) if MARK in text else ()
        marks = iter([one == MARK for one in found])
        return [token != self._mark_id or not next(marks, False) for token in token_ids]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of rendered texts, without what a tokenizer adds before and after them."""
        if not texts:
            return []
        encoded = self._tokenizer([self.with_tokens(text) for text in texts], add_special_tokens=False)["input_ids"]
        return [
            [token for token, keep in zip(ids, self.kept(ids, text), strict=True) if keep]
            for ids, text in zip(encoded, texts, strict=True)
        ]


def _any_of(texts: Any) -> re.Pattern[str]:
    """Matches any of these texts; those of one character cannot be broken."""
    longest_first = sorted({text for text in texts if len(text) > 1}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _mark(value: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return pattern.sub(lambda found: found[0][0] + MARK + found[0][1:], value)
    if isinstance(value, Mapping):
        return {_mark(name, pattern): _mark(item, pattern) for name, item in value.items()}
    if not isinstance(value, list | tuple):
        return value
    marked = [_mark(item, pattern) for item in value]
    texts = [part for part in marked if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if pattern.search("".join(part["text"] for part in texts)):  # templates join the parts of a message
        for part in texts:
            part["text"] += MARK
    return marked
