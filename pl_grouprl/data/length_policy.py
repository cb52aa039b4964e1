"""Drops, truncates or refuses prompts that are too long, and counts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pl_grouprl.media.prompts import MediaPrompt
from pl_grouprl.types import Messages, Prompt
from pl_grouprl.utilities.options import check_options

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
        return line + (
            f"; each epoch leaves out {in_no_batch} that do not fill a batch (drop_last)" if in_no_batch else ""
        )


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
        """Drop, truncate or refuse the prompts that are longer than the limit.

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
        self._refuse(prompts, overlong, split)
        if self.overlong_prompts == "truncate":
            for index in overlong:
                prompt = prompts[index]
                prompt.token_ids = prompt.token_ids[-limit:]
                prompt.prompt = _cut(prompt.prompt, tokenizer.decode(prompt.token_ids))
            return KeptPrompts(list(prompts), list(everything), len(prompts), len(overlong))
        dropped = set(overlong)
        rows = [index for index in everything if index not in dropped]
        return KeptPrompts([prompts[index] for index in rows], rows, len(prompts))

    def _refuse(self, prompts: Sequence[Prompt], overlong: Sequence[int], split: str) -> None:
        limit = self.max_prompt_length
        uncut = [index for index in overlong if isinstance(prompts[index], MediaPrompt)]
        refused = {"error": overlong, "truncate": uncut, "drop": ()}[self.overlong_prompts]
        if refused:
            first = prompts[refused[0]]
            remedy = "set overlong_prompts to 'drop'" + (" (images cannot be truncated)" if uncut else " or 'truncate'")
            raise ValueError(
                f"{first.where}: the prompt has {first.num_tokens} tokens, more than max_prompt_length={limit} "
                f"({len(overlong)} of {len(prompts)} prompts have); raise the limit, or {remedy}."
            )
        if self.overlong_prompts != "drop" or len(overlong) <= self.max_dropped_share * len(prompts):
            return
        everything = len(overlong) == len(prompts)
        shortest = min(prompt.num_tokens for prompt in prompts)
        raise ValueError(
            f"PromptDataModule(`{split}`): {'all' if everything else f'{len(overlong)} of'} {len(prompts)} prompts are "
            f"longer than max_prompt_length={limit} (the shortest has {shortest} tokens) and would be dropped"
            + ("" if everything else f", more than max_dropped_share={self.max_dropped_share}")
            + "; raise the limit or set overlong_prompts='truncate'."
        )


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
