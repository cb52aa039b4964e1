"""Renders conversations to tokens, and parses the model's turns, with one tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import takewhile
from typing import Any

from pl_grouprl.chat.casting import cast_arguments
from pl_grouprl.chat.control_tokens import ControlTokens, special_tokens
from pl_grouprl.chat.families import find_tool_parser
from pl_grouprl.chat.parsing import MalformedTurnError, Schema, checked_message, plain_data
from pl_grouprl.chat.response_template import TemplateParser
from pl_grouprl.chat.template_check import check_complete, check_prefix_preserving, remedy
from pl_grouprl.chat.template_files import read_template
from pl_grouprl.types import Messages

_MAX_CACHED_PREFIXES = 256
_TAIL_TOKENS = 64
_MARKER = "check marker"


class ChatFormat:
    """Renders conversations with tools, and parses the model's turns.

    Args:
        tokenizer: A transformers tokenizer with a chat template.
        chat_template: The name of a built-in training template (`qwen3`, `llama3`, `plain`), a path to a file, or a
            Jinja template; None for the tokenizer's.
        template_kwargs: Passed to `apply_chat_template`, such as `enable_thinking`.
        split_special_tokens: Encode control tokens in the text of messages as text; see `ControlTokens`.

    Raises:
        ValueError: If there is no such chat template, or `template_kwargs` also sets one.
    """

    encodes_prompts = False
    """Whether prompts must come from `encode_prompt`; otherwise `apply_chat_template` gives the same tokens."""

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        split_special_tokens: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        other = self.template_kwargs.pop("chat_template", None)
        if chat_template is not None and other is not None:
            raise ValueError(
                "chat_template is set twice, as an option and in chat_template_kwargs; leave one of them out."
            )
        chosen = other if chat_template is None else chat_template
        self.chat_template = None if chosen is None else read_template(chosen)
        source = self.chat_template or getattr(tokenizer, "chat_template", None) or ""
        if isinstance(source, Mapping):
            source = source.get("tool_use") or source.get("default") or ""
        self.source = source
        self.parser = find_tool_parser(source)
        self._template_parser: TemplateParser | None = None
        self._control = ControlTokens(tokenizer, source, split_special_tokens)
        self._dummy_prefixes: dict[str, list[int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the worker process."""
        return vars(self) | {"_template_parser": None}

    def close(self) -> None:
        """End the worker process that parses turns, if there is one."""
        if self._template_parser is not None:
            self._template_parser.close()
            self._template_parser = None

    def check_tools(self, *, may_rewrite: bool = False) -> None:
        """Refuse a template that cannot render a conversation with tools, or is not prefix-preserving.

        Args:
            may_rewrite: Accept one that changes earlier messages once others follow.

        Raises:
            ValueError: If the template cannot be used, or no parser knows its calls; names the remedy.
        """
        if not self.source:
            raise ValueError(f"Tools need a chat template, and the tokenizer has none; {remedy(self.source)}.")
        alternative = ""
        try:
            check_complete(self._render)
            alternative = ", or set rewritten_history='new_row'"
            if not may_rewrite:
                check_prefix_preserving(self._encode, self.encode_results)
        except ValueError as error:
            raise ValueError(
                f"Tools need another chat template: {error}; {remedy(self.source)}{alternative}."
            ) from error
        if self._response_template is not None:
            with suppress(MalformedTurnError):
                self._parse([], [], ())  # a malformed template, which is another ValueError, ends the run here
        elif self.parser is None:
            raise ValueError(
                "No parser knows the tool calls of this chat template; set tokenizer.response_template, or add a "
                "parser with pl_grouprl.chat.register_tool_parser."
            )

    @cached_property
    def turn_end_ids(self) -> list[int]:
        """The tokens with which the template ends the model's turns, answers and calls; empty if it has none.

        They are the special tokens that follow the turn whatever comes next: the EOS token if it is one of them,
        otherwise the last. After an answer, other added tokens count if none is special.
        """
        answer = {"role": "assistant", "content": _MARKER}
        user, call = dummy_conversation("check", {"check": _MARKER})
        result = {"role": "tool", "name": "check", "content": "check"}
        special, eos = special_tokens(self.tokenizer), self.tokenizer.eos_token_id
        added = {token: text.content for token, text in getattr(self.tokenizer, "added_tokens_decoder", {}).items()}
        found: set[int] = set()
        for turn, following in ((answer, user), (_in_parts(answer), _in_parts(user)), (call, result)):
            try:
                texts = [self._render([user, turn]), self._render([user, turn, following])]
            except ValueError:  # some templates have no tools
                continue
            tails = [text.partition(_MARKER)[2] for text in texts]
            always = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(*tails, strict=False)))
            ends: list[int] = []
            for texts_of in (special, added) if turn is not call else (special,):
                # An unknown token stands for other texts than its own.
                ends = ends or [token for token in self._encode_text(always) if texts_of.get(token, "\0") in always]
            found.update([eos] if eos in ends else ends[-1:])
        return sorted(found)

    def render_prompt(self, messages: Messages, tools: Sequence[Schema] = ()) -> str:
        """Render a prompt up to where the model starts to write; a final assistant message is left open.

        Args:
            messages: The conversation.
            tools: Schemas of the tools that the model may call.

        Raises:
            ValueError: If there is no chat template, or it refuses the messages.
        """
        return self._control.without_marks(self._render_prompt(messages, tools))

    def _render_prompt(self, messages: Messages, tools: Sequence[Schema]) -> str:
        open_ended = messages[-1]["role"] == "assistant"
        options = {"tools": list(tools)} if tools else {}
        return self._apply(
            messages,
            tokenize=False,
            add_generation_prompt=not open_ended,
            continue_final_message=open_ended,
            **options,
        )

    def encode_prompt(self, messages: Messages, tools: Sequence[Schema] = ()) -> list[int]:
        """Tokens of a prompt, up to where the model starts to write; see `render_prompt`."""
        return self._encode_text(self._render_prompt(messages, tools))

    def encode_history(self, history_ids: Sequence[int], messages: Messages, tools: Sequence[Schema] = ()) -> list[int]:
        """Tokens of a conversation as the template renders it now, up to where the model writes its next turn.

        Args:
            history_ids: What the model has read and written so far. These tokens are kept and only new text is encoded,
                unless the template has changed the text of the history.
            messages: The conversation, which has continued.
            tools: Schemas of the tools that the model may call.

        Raises:
            ValueError: If the template refuses the messages.
        """
        text = self._render_prompt(messages, tools)
        past = self.tokenizer.decode(history_ids, clean_up_tokenization_spaces=False)
        if not self._control.without_marks(text).startswith(past):
            return self._encode_text(text)
        return [*history_ids, *self._encode_text(self._control.after(text, len(past)))]

    def _encode_text(self, text: str) -> list[int]:
        return self._control.encode([text])[0]

    def encode_results(self, results: Messages) -> list[int]:
        """Tokens between two turns of the model: the results of tools, and the header of the next turn.

        A dummy conversation is rendered with and without the results. The tokens are what the former adds after the
        last EOS token of the latter (TRL's `_get_tool_suffix_ids`), so sampled turns are never tokenized again.

        Args:
            results: Messages `{"role": "tool", "name": ..., "content": ...}`, at least one.

        Raises:
            ValueError: If the chat template refuses them, or is not prefix-preserving.
        """
        results = plain_data(results)
        name = results[0]["name"]
        for _ in range(2):
            token_ids = self._encode([*dummy_conversation(name), *results], add_generation_prompt=True)
            prefix_ids = self._dummy_prefix_ids(name)
            if token_ids[: len(prefix_ids)] == prefix_ids:
                return token_ids[len(prefix_ids) :]
            self._dummy_prefixes.clear()  # the template may render the date, which may have changed
        raise ValueError(
            f"the chat template is not prefix-preserving: it renders a call of {name!r} differently once its result "
            "follows"
        )

    def parse(
        self, token_ids: Sequence[int], prefix_ids: Sequence[int] = (), tools: Sequence[Schema] = ()
    ) -> dict[str, Any]:
        """Parse a turn of the model into an assistant message, with `tool_calls` if it has any.

        It is parsed by the tokenizer's `response_template` if there is one, in a worker process and for at most 2
        seconds, otherwise by the parser of the chat template's family. A malformed turn, such as a call without a name
        or with broken JSON, becomes plain text.

        Args:
            token_ids: The turn with its end token.
            prefix_ids: All tokens before it. Those after the turn's header, such as an opened `<think>`, are parsed
                too.
            tools: Schemas of the tools, for the types of arguments, and for their names if the format has none.

        Returns:
            `role`, `content` (a string), and, if there are any, `reasoning_content` and `tool_calls`, each
            `{"type": "function", "function": {"name": ..., "arguments": ...}}`.
        """
        try:
            message = checked_message(self._parse(list(token_ids), list(prefix_ids), tools))
            message = plain_data(cast_arguments(message, tools))
        except (ValueError, TypeError, RecursionError):
            return self.plain_message(token_ids)
        for end in self.tokenizer.convert_ids_to_tokens(self.turn_end_ids):
            if isinstance(message["content"], str):
                message["content"] = message["content"].removesuffix(end)
        return message

    def plain_message(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """A turn as an assistant message whose content is all its text, without special tokens."""
        return {"role": "assistant", "content": self.tokenizer.decode(token_ids, skip_special_tokens=True)}

    def _parse(self, token_ids: list[int], prefix_ids: list[int], tools: Sequence[Schema]) -> Any:
        if self._response_template is not None:
            if self._template_parser is None:
                self._template_parser = TemplateParser(self._response_template)
            return self._template_parser.parse(
                self.tokenizer.decode(token_ids), self.tokenizer.decode(prefix_ids), tools
            )
        if self.parser is None:
            raise MalformedTurnError("no parser knows this chat template")
        text = self._turn_start(prefix_ids, self.parser.header) + self.tokenizer.decode(token_ids)
        return self.parser.parse(text, tools)

    @property
    def _response_template(self) -> Mapping[str, Any] | None:
        return getattr(self.tokenizer, "response_template", None)

    def _turn_start(self, prefix_ids: list[int], header: str) -> str:
        """The part of the turn that is in the prompt: the text after the last header."""
        count = _TAIL_TOKENS
        while True:
            text = self.tokenizer.decode(prefix_ids[-count:])
            if header in text:
                return text.rpartition(header)[2]
            if count >= len(prefix_ids):
                return ""
            count *= 4

    def _dummy_prefix_ids(self, name: str) -> list[int]:
        """Tokens of a dummy conversation up to the token that ends a call of this name."""
        if name in self._dummy_prefixes:
            return self._dummy_prefixes[name]
        token_ids = self._encode(dummy_conversation(name), add_generation_prompt=False)
        ends = [place for place, token in enumerate(token_ids, 1) if token in self.turn_end_ids]
        token_ids = token_ids[: max(ends, default=None)]
        if len(self._dummy_prefixes) >= _MAX_CACHED_PREFIXES:  # the model may invent arbitrarily many names
            self._dummy_prefixes.clear()
        self._dummy_prefixes[name] = token_ids
        return token_ids

    def _encode(self, messages: Messages, *, add_generation_prompt: bool) -> list[int]:
        """Tokens of a conversation, by the tokenizer's template for tools if it has several."""
        options = {"add_generation_prompt": add_generation_prompt, "chat_template": self.source}
        return self._encode_text(self._apply(messages, tokenize=False, **options))

    def _render(self, messages: Messages) -> str:
        return self._apply(messages, tokenize=False, chat_template=self.source)

    def _apply(self, messages: Messages, **options: Any) -> Any:
        if not self.source:
            raise ValueError(
                "the tokenizer has no chat template; use a tokenizer that has one, set tokenizer.chat_template, or "
                "pass chat_template"
            )
        if self.chat_template is not None:
            options.setdefault("chat_template", self.chat_template)
        try:
            return self.tokenizer.apply_chat_template(self._control.mark(messages), **options, **self.template_kwargs)
        except Exception as error:  # templates are programs that may raise anything
            raise ValueError(f"the chat template refused the messages ({error})") from error


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """The message as templates for images want it."""
    return message | {"content": [{"type": "text", "text": message["content"]}]}


def dummy_conversation(name: str, arguments: Mapping[str, str] = {}) -> Messages:
    """A question, and a turn that calls the tool of this name."""
    call = {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}
    return [{"role": "user", "content": "dummy"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
