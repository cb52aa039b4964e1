"""Turns a row into a `Prompt`: finds the prompt among the columns and tokenizes it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from pl_grouprl.chat.format import ControlTokens, tokens_around
from pl_grouprl.data.rows import SourceRow
from pl_grouprl.media.rows import (
    MediaPrompt,
    check_contents,
    check_processor_options,
    check_row_media,
    check_tokens,
    count_media,
    has_parts,
    has_tags,
    place_media,
    without_empty_keys,
)
from pl_grouprl.types import Messages, Prompt
from pl_grouprl.utilities.options import check_options
from pl_grouprl.utilities.text import shorten

log = logging.getLogger(__name__)

EMPTY_PROMPT: Messages = [{"role": "user", "content": ""}]
"""The prompt of a row that has none, because an environment writes it (as in TRL)."""

RenderOptions = Callable[[Mapping[str, Any]], dict[str, Any]]
"""From a row's columns to its further chat template arguments, such as `tools`."""

OverlongPrompts = Literal["drop", "truncate", "error"]


@dataclass(frozen=True)
class KeptPrompts:
    """The rows of a split after a length policy.

    Attributes:
        prompts: The prompts in use.
        rows: Row index of each prompt in the whole split, from 0.
        num_rows: Number of rows before dropping.
        num_truncated: Number of truncated prompts.
    """

    prompts: list[Prompt]
    rows: list[int]
    num_rows: int
    num_truncated: int = 0

    @property
    def num_dropped(self) -> int:
        """Number of rows that were dropped."""
        return self.num_rows - len(self.prompts)

    def describe(self, split: str, max_prompt_length: int | None, in_no_batch: int = 0) -> str:
        """Describe the result in one line.

        Args:
            split: Name of the split.
            max_prompt_length: The limit.
            in_no_batch: Number of prompts that each epoch skips because they do not fill a batch.
        """
        line = f"{split}: {self.num_rows} rows, {len(self.prompts)} kept, {self.num_dropped} dropped"
        if self.num_dropped:
            line += f" (longer than max_prompt_length={max_prompt_length})"
        line += f", {self.num_truncated} truncated"
        if self.num_truncated:
            line += f" (to max_prompt_length={max_prompt_length})"
        return line + (f"; each epoch omits {in_no_batch} that do not fill a batch (drop_last)" if in_no_batch else "")


@dataclass(frozen=True)
class LengthPolicy:
    """How to treat long prompts; see `PromptDataModule` for the fields."""

    max_prompt_length: int | None = None
    overlong_prompts: OverlongPrompts = "drop"
    max_dropped_share: float = 0.9

    def __post_init__(self) -> None:
        limit, share = self.max_prompt_length, self.max_dropped_share
        check_options(
            {
                "max_prompt_length": (limit, limit is None or limit >= 1, "at least 1, or None for no limit"),
                "overlong_prompts": (
                    self.overlong_prompts,
                    self.overlong_prompts in ("drop", "truncate", "error"),
                    "'drop', 'truncate' or 'error'",
                ),
                "max_dropped_share": (share, 0 <= share <= 1, "in [0, 1]"),
            }
        )

    def apply(self, prompts: Sequence[Prompt], split: str, tokenizer: Any) -> KeptPrompts:
        """Drop or truncate the prompts that are longer than the limit.

        Processes images and videos once to count their tokens, without keeping them.

        Args:
            prompts: One per row; truncated in place, tokens and text.
            split: Name of the data, for messages.
            tokenizer: Decodes truncated prompts.

        Raises:
            ValueError: If a prompt is too long and `overlong_prompts` is `error`, or if none, or too few, would remain.
        """
        limit, everything = self.max_prompt_length, range(len(prompts))
        if limit is None:
            return KeptPrompts(list(prompts), list(everything), len(prompts))
        for prompt in prompts:
            if isinstance(prompt, MediaPrompt):
                prompt.counted = len(prompt.open().token_ids)
        overlong = [index for index in everything if prompts[index].num_tokens > limit]
        uncut = [index for index in overlong if isinstance(prompts[index], MediaPrompt)]
        if rejected := {"error": overlong, "truncate": uncut, "drop": ()}[self.overlong_prompts]:
            first = prompts[rejected[0]]
            remedy = "set overlong_prompts to 'drop'" + (" (images cannot be truncated)" if uncut else " or 'truncate'")
            raise ValueError(
                f"{first.where}: the prompt has {first.num_tokens} tokens, more than max_prompt_length={limit} "
                f"({len(overlong)} of {len(prompts)} prompts have); raise the limit, or {remedy}."
            )
        if self.overlong_prompts == "truncate":
            for index in overlong:
                prompt = prompts[index]
                prompt.token_ids = prompt.token_ids[-limit:]
                prompt.prompt = _cut(prompt.prompt, tokenizer.decode(prompt.token_ids))
            return KeptPrompts(list(prompts), list(everything), len(prompts), len(overlong))
        if len(overlong) > self.max_dropped_share * len(prompts):
            shortest = min(prompt.num_tokens for prompt in prompts)
            raise ValueError(
                f"PromptDataModule(`{split}`): {len(overlong)} of {len(prompts)} prompts exceed max_prompt_length="
                f"{limit} (the shortest has {shortest} tokens), more than max_dropped_share={self.max_dropped_share}."
            )
        dropped = set(overlong)
        rows = [index for index in everything if index not in dropped]
        return KeptPrompts([prompts[index] for index in rows], rows, len(prompts))


def _cut(prompt: str | Messages, text: str) -> str | Messages:
    """What the model reads of a prompt, given the end of its rendered text; messages keep the content that is there."""
    if isinstance(prompt, str):
        return text
    text, kept = text.lstrip("\ufffd"), []  # half a character
    for index in reversed(range(len(prompt))):
        parts = prompt[index]["content"]
        content = parts if isinstance(parts, str) else "".join(part.get("text") or "" for part in parts or ())
        place = text.rfind(content.strip())
        if text and place >= 0:
            text, kept = text[:place], prompt[index:]
            continue
        size = next(size for size in range(len(text), -1, -1) if content.strip().endswith(text[:size]))
        if size > 0:
            cut = text[:size] if isinstance(parts, str) else [{"type": "text", "text": text[:size]}]
            return [{**prompt[index], "content": cut}, *prompt[index + 1 :]]
    return kept or [{**prompt[-1], "content": ""}]


@dataclass(frozen=True)
class ChatOptions:
    """A module's requirements on the conversations of its prompts.

    Attributes:
        of_row: A row's chat template arguments besides the messages; may be empty.
        needs_messages: Why prompts must be messages; None if strings will do.
        may_be_empty: Whether a row may lack the prompt, because an environment writes it.
        writes_data: Whether that environment needs no rows at all.
    """

    of_row: RenderOptions = lambda columns: {}
    needs_messages: str | None = None
    may_be_empty: bool = False
    writes_data: bool = False


@dataclass(frozen=True)
class EncodingOptions:
    """How to convert rows to prompts; `PromptDataModule` documents the fields."""

    prompt_column: str = "prompt"
    add_special_tokens: bool = True
    split_special_tokens: bool = True
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    image_column: str = "images"
    video_column: str = "videos"
    processor_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def media_columns(self, values: Mapping[str, Any]) -> dict[str, str]:
        """The column of each kind of media in a row; TRL's singular name if only that exists."""
        columns = {"image": self.image_column, "video": self.video_column}
        for kind, column in columns.items():
            if column == f"{kind}s" and values.get(column) is None and kind in values:
                columns[kind] = kind
        return columns


def encode_rows(
    rows: Sequence[SourceRow],
    tokenizer: Any,
    options: EncodingOptions,
    load_processor: Callable[[], Any] | None = None,
    reads_media: bool = False,
    chat: ChatOptions = ChatOptions(),
) -> list[Prompt]:
    """Convert rows with TRL's or verl's columns to prompts.

    Args:
        rows: The prompt column is a string, which is tokenized directly, or messages, which go through the tokenizer's
            chat template. All other columns are kept for reward functions.
        tokenizer: A transformers tokenizer.
        options: Column names, tokenizer and template options.
        load_processor: Returns a transformers processor; called if a row has images or videos, or `reads_media`.
        reads_media: Whether the model reads images or videos; texts are then searched for their tags and tokens.
        chat: The module's requirements on conversations, such as its tools.

    Returns:
        One prompt per row, of any length. Images and videos are processed when a prompt is opened.

    Raises:
        ValueError: If a row lacks the prompt, the prompt is malformed or has no tokens, or images or videos cannot be
            read or placed; names the row.
    """
    read = [_read_prompt(row, options, chat) for row in rows]
    control = ControlTokens(tokenizer, None, options.split_special_tokens)
    before, after = tokens_around(tokenizer) if options.add_special_tokens else ([], [])
    made: dict[int, Prompt] = {}
    texts: dict[int, str] = {}  # of the other rows
    processor: Any = None
    for index, (row, prompt) in enumerate(zip(rows, read, strict=True)):
        columns = options.media_columns(row.values)
        counts = count_media(row.values, columns)
        if not any(counts.values()):
            # Tags count if there is a column for media.
            tags = (reads_media or any(name in row.values for name in columns.values())) and has_tags(prompt)
            if tags or (not isinstance(prompt, str) and has_parts(prompt)):
                names = " and ".join(map(repr, columns.values()))
                raise ValueError(
                    f"{row.where}: the prompt has places for images or videos (parts, or tags as <image>), and the "
                    f"columns {names} are empty; fill them, name others with image_column and video_column, or remove "
                    "the places."
                )
            texts[index] = _render(prompt, row, tokenizer, options, chat, control)
            continue
        if processor is None:
            problem = "there is no processor"
            try:
                processor = load_processor() if load_processor is not None else None
            except ValueError as error:
                problem = str(error).removesuffix(".")
            if processor is None:
                names = " or ".join(map(repr, columns.values()))
                raise ValueError(
                    f"{row.where}: column {names} is not empty, and {problem}. Pass processor=..., remove the column, "
                    "or, if it has other contents, set image_column and video_column to other names."
                )
            check_processor_options(processor, options.processor_kwargs)
        template = processor if getattr(processor, "chat_template", None) else tokenizer
        placed = prompt if isinstance(prompt, str) else place_media(prompt, counts, row.where)
        text = _render(placed, row, template, options, chat, control)
        (token_ids,) = control.encode([text])
        adds_tokens = isinstance(prompt, str) and token_ids[: len(before)] != before
        processor_options = {"add_special_tokens": adds_tokens, **options.processor_kwargs}
        num_after = len(after) * adds_tokens
        made[index] = MediaPrompt(
            before * adds_tokens + token_ids,
            prompt,
            **_other_columns(row, options),
            encode=check_row_media(
                row.values, text, processor, columns, processor_options, control, num_after, where=row.where
            ),
        )
    if reads_media and texts and load_processor is not None:
        try:
            processor = load_processor()
        except Exception as error:  # a text-only run must not fail because of a processor that it does not use
            log.info("Texts are not searched for image tokens: %s", error)
        else:
            for index, text in texts.items():
                check_tokens({}, text, processor, rows[index].where)
    for index, token_ids in zip(texts, control.encode(list(texts.values())), strict=True):
        adds_tokens = isinstance(read[index], str) and token_ids[: len(before)] != before
        made[index] = Prompt(before * adds_tokens + token_ids, read[index], **_other_columns(rows[index], options))
    prompts = [made[index] for index in range(len(rows))]
    end = getattr(tokenizer, "eos_token_id", None)
    ended = [prompt for prompt in prompts if len(prompt.token_ids) > 1 and prompt.token_ids[-1] == end]
    if ended:
        rank_zero_warn(
            f"{ended[0].where}: the prompt ends with the EOS token {tokenizer.eos_token!r} ({len(ended)} of "
            f"{len(prompts)} prompts do), so the policy continues after the end of the text; remove that token, or let "
            "the prompt end with the header of the model's turn."
        )
    for encoded in prompts:
        if not encoded.token_ids and not (chat.may_be_empty and encoded.prompt == EMPTY_PROMPT):
            column = options.prompt_column
            raise ValueError(f"{encoded.where}: the prompt has no tokens; remove the row or fill its {column!r}.")
    return prompts


def _read_prompt(row: SourceRow, options: EncodingOptions, chat: ChatOptions) -> str | Messages:
    """The prompt of a row, and checks of the other columns that have a meaning."""
    (where, values), column = row, options.prompt_column
    if column not in values and chat.may_be_empty:
        return [dict(message) for message in EMPTY_PROMPT]
    if column not in values:
        raise ValueError(f"{where}: no column {column!r}; set prompt_column to one of {sorted(values)}.")
    for name in ("prompts", "completions", "completion_ids"):
        if name in values and name != column:
            raise ValueError(f"{where}: column {name!r} is named like an argument of reward functions; rename it.")
    model = values.get("reward_model")
    if model is not None and not isinstance(model, Mapping):
        raise ValueError(f"{where}: column 'reward_model' is {shorten(model)}, not a mapping; correct or rename it.")
    references = {name: values.get(name) for name in ("ground_truth", "answer")}
    references["reward_model.ground_truth"] = (model or {}).get("ground_truth")
    for name, reference in references.items():
        if isinstance(reference, float) and math.isnan(reference):
            raise ValueError(f"{where}: {name!r} is NaN, which is not a reference; write the answer, or null for none.")
    prompt = values[column]
    if isinstance(prompt, str):
        if chat.needs_messages is not None:
            raise ValueError(f"{where}: column {column!r} is a string, and {chat.needs_messages}; write messages.")
        return prompt
    are_messages = isinstance(prompt, Sequence) and all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message
        for message in prompt
    )
    if not prompt or not are_messages:
        wanted = "a string or a list of messages, each with 'role' and 'content'"
        raise ValueError(f"{where}: column {column!r} is {shorten(prompt)}; it must be {wanted}.")
    messages = [dict(message) for message in prompt]
    check_contents(messages, where)
    return messages


def _other_columns(row: SourceRow, options: EncodingOptions) -> dict[str, Any]:
    columns = {name: value for name, value in row.values.items() if name != options.prompt_column}
    source = str(row.values.get("data_source") or "default")
    return {"columns": columns, "data_source": source, "where": row.where}


def _render(
    prompt: Any, row: SourceRow, template: Any, options: EncodingOptions, chat: ChatOptions, control: ControlTokens
) -> str:
    """Text of a prompt; messages are marked, and a final assistant message is left open for continuation."""
    if isinstance(prompt, str):
        return prompt
    more = chat.of_row(row.values)
    if not (getattr(template, "chat_template", None) or more):
        problem = "the prompt is a list of messages and the tokenizer has no chat template"
        raise ValueError(f"{row.where}: {problem}; set tokenizer.chat_template, or pass prompts as strings.")
    open_ended = prompt[-1]["role"] == "assistant"
    try:
        return template.apply_chat_template(
            control.mark(without_empty_keys(prompt)),
            tokenize=False,
            add_generation_prompt=not open_ended,
            continue_final_message=open_ended,
            **more,
            **options.chat_template_kwargs,
        )
    except Exception as error:  # templates are programs that may raise anything
        raise ValueError(f"{row.where}: the chat template refused the messages ({error}); correct the row.") from error
