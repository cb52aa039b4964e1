"""From a row to a `Prompt`: finds the prompt among the columns, tokenizes it, keeps to the length limit."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pl_grouprl.data.sources import SourceRow
from pl_grouprl.types import Messages, Prompt

OverlongPrompts = Literal["drop", "truncate", "error"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EncodingOptions:
    """How rows become prompts; the fields are documented at `PromptDataModule`."""

    prompt_column: str = "prompt"
    max_prompt_length: int | None = None
    overlong_prompts: OverlongPrompts = "drop"
    add_special_tokens: bool = True
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_prompt_length is not None and self.max_prompt_length < 1:
            raise ValueError(
                f"max_prompt_length is {self.max_prompt_length}; it must be at least 1, or None for no limit."
            )
        if self.overlong_prompts not in ("drop", "truncate", "error"):
            raise ValueError(
                f"overlong_prompts is {self.overlong_prompts!r}; it must be 'drop', 'truncate' or 'error'."
            )


def encode_rows(rows: Sequence[SourceRow], tokenizer: Any, options: EncodingOptions, split: str) -> list[Prompt]:
    """Turn rows with TRL's or verl's columns into prompts.

    Args:
        rows: The prompt column holds a string, which is tokenized as it is, or messages, which go through the
            tokenizer's chat template. All other columns are kept for reward functions.
        tokenizer: A transformers tokenizer.
        options: Column name, length limit, tokenizer and template options.
        split: Names the data in messages.

    Returns:
        The prompts in the order of the rows, without those dropped for their length.

    Raises:
        ValueError: If a row lacks the prompt, the prompt is malformed or has no tokens, or is too long and the policy
            says `error`; if none is left. The row is named.
    """
    prompts = [_read_prompt(row, options.prompt_column) for row in rows]
    wheres = [row.where for row in rows]
    token_ids = _tokenize(prompts, wheres, tokenizer, options)
    for where, ids in zip(wheres, token_ids, strict=True):
        if not ids:
            raise ValueError(
                f"{where}: the prompt has no tokens; remove the row or fill its {options.prompt_column!r}."
            )
    token_ids, kept = _limit_length(token_ids, wheres, options, split)
    return [_make_prompt(prompts[index], token_ids[index], rows[index], options.prompt_column) for index in kept]


def _read_prompt(row: SourceRow, column: str) -> str | Messages:
    where, values = row
    if values.get(column) is None:
        raise ValueError(
            f"{where}: no column {column!r}; the row has {sorted(values)}. Name the right one with prompt_column."
        )
    for media in ("images", "videos"):
        if values.get(media):
            raise ValueError(f"{where}: column {media!r} is not empty, and only text is supported; remove the column.")
    prompt = values[column]
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Sequence) or not prompt or not all(_is_message(message) for message in prompt):
        raise ValueError(
            f"{where}: column {column!r} is {_shorten(prompt)}; it must be a string or a list of messages, each with "
            "'role' and 'content'."
        )
    return [dict(message) for message in prompt]


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message


def _tokenize(
    prompts: Sequence[str | Messages], wheres: Sequence[str], tokenizer: Any, options: EncodingOptions
) -> list[list[int]]:
    token_ids: list[list[int]] = [[] for _ in prompts]
    plain = [index for index, prompt in enumerate(prompts) if isinstance(prompt, str)]
    chats = [index for index, prompt in enumerate(prompts) if not isinstance(prompt, str)]
    if chats and not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"{wheres[chats[0]]}: the prompt is a list of messages and the tokenizer has no chat template; use a "
            "tokenizer that has one, set tokenizer.chat_template, or give prompts as strings."
        )
    texts = {index: prompts[index] for index in plain} | {
        index: _render(prompts[index], wheres[index], tokenizer, options) for index in chats
    }
    # A template writes the special tokens itself.
    for indices, special in ((plain, options.add_special_tokens), (chats, False)):
        if indices:
            encoded = tokenizer([texts[index] for index in indices], add_special_tokens=special)["input_ids"]
            for index, ids in zip(indices, encoded, strict=True):
                token_ids[index] = list(ids)
    return token_ids


def _render(messages: Any, where: str, tokenizer: Any, options: EncodingOptions) -> str:
    """Write messages as the model reads them; a last message of the assistant is left open to be continued."""
    open_ended = messages[-1]["role"] == "assistant"
    try:
        return tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=not open_ended,
            continue_final_message=open_ended,
            **options.chat_template_kwargs,
        )
    except Exception as error:  # templates are small programs that raise errors of their own
        raise ValueError(f"{where}: the chat template refused the messages ({error}); correct the row.") from error


def _limit_length(
    token_ids: list[list[int]], wheres: Sequence[str], options: EncodingOptions, split: str
) -> tuple[list[list[int]], list[int]]:
    """Apply the length policy.

    Returns:
        Token ids of all prompts, and the indices of the prompts that are kept.
    """
    limit = options.max_prompt_length
    everything = list(range(len(token_ids)))
    overlong = [index for index in everything if limit is not None and len(token_ids[index]) > limit]
    if not overlong or limit is None:
        return token_ids, everything
    first, count = overlong[0], f"{len(overlong)} of {len(token_ids)} prompts"
    if options.overlong_prompts == "error":
        raise ValueError(
            f"{wheres[first]}: the prompt has {len(token_ids[first])} tokens, more than max_prompt_length={limit} "
            f"({count} have); raise the limit, or set overlong_prompts to 'drop' or 'truncate'."
        )
    if options.overlong_prompts == "truncate":
        log.info("%s: %s are longer than %d tokens; only their last %d are kept.", split, count, limit, limit)
        return [ids[-limit:] for ids in token_ids], everything
    if len(overlong) == len(token_ids):
        raise ValueError(
            f"PromptDataModule(`{split}`): all {len(token_ids)} prompts are longer than max_prompt_length={limit} (the "
            f"shortest has {min(map(len, token_ids))} tokens) and would be dropped; raise the limit or set "
            "overlong_prompts='truncate'."
        )
    log.info("%s: %s are longer than %d tokens and are dropped.", split, count, limit)
    dropped = set(overlong)
    return token_ids, [index for index in everything if index not in dropped]


def _make_prompt(prompt: str | Messages, token_ids: list[int], row: SourceRow, column: str) -> Prompt:
    return Prompt(
        token_ids=token_ids,
        prompt=prompt,
        columns={name: value for name, value in row.values.items() if name != column},
        data_source=str(row.values.get("data_source") or "default"),
    )


def _shorten(value: Any, length: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= length else text[:length] + "..."
