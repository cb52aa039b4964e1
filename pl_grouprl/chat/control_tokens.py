"""The control tokens of a prompt: those that its chat template or its tokenizer adds."""

from __future__ import annotations

from typing import Any


def added_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer adds before a text, such as BOS, and after it, such as EOS."""
    own, ids = (list(tokenizer(["0a"], add_special_tokens=special)["input_ids"][0]) for special in (False, True))
    start = next(place for place in range(len(ids) + 1) if ids[place : place + len(own)] == own)
    return ids[:start], ids[start + len(own) :]


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """The special tokens of a tokenizer, by id."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    return {token: text.content for token, text in added.items() if text.special} | dict(named)
