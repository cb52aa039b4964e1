"""Renders conversations to tokens and parses the model's turns, for one tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pl_grouprl.types import Messages

Schema = dict[str, Any]
"""JSON schema of a tool, as transformers' `get_json_schema` makes it."""


class ChatFormat:
    """Renders conversations with tools, and parses what the model answers.

    Args:
        tokenizer: A transformers tokenizer with a chat template.
        chat_template: Used in place of the tokenizer's: the name of a built-in training template (`qwen3`, `llama3`), a
            path to a file, or a Jinja template. None: the tokenizer's.
        template_kwargs: Passed to `apply_chat_template`, such as `enable_thinking`.
    """

    def __init__(
        self, tokenizer: Any, chat_template: str | None = None, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        raise NotImplementedError

    def check_tools(self) -> None:
        """Refuse a template that cannot render a conversation with tools, or is not prefix-preserving."""
        raise NotImplementedError

    def render_prompt(self, messages: Messages, tools: Sequence[Schema] = ()) -> str:
        """Render a prompt up to where the model starts to write."""
        raise NotImplementedError

    def encode_prompt(self, messages: Messages, tools: Sequence[Schema] = ()) -> list[int]:
        """Tokens of a prompt, up to where the model starts to write."""
        raise NotImplementedError

    def encode_results(self, results: Messages) -> list[int]:
        """Tokens between the model's last token of a turn and the first of its next, for results of tools."""
        raise NotImplementedError

    def parse(self, token_ids: Sequence[int], prefix_ids: Sequence[int] = ()) -> dict[str, Any]:
        """Parse a turn of the model into an assistant message, with `tool_calls` if it has any."""
        raise NotImplementedError
