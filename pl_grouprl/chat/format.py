"""Renders conversations to tokens, and parses the model's turns, with one tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from pl_grouprl.chat.parsing import (
    MalformedTurnError,
    Schema,
    TemplateParser,
    cast_arguments,
    checked_message,
    find_tool_parser,
    plain_data,
)
from pl_grouprl.types import Media, Messages, is_per_token
from pl_grouprl.utilities.optional import RENDERERS_AVAILABLE, require

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

    `mark` breaks the text of special tokens in messages and schemas of tools, which a chat template then renders.
    `encode` puts a special token into each break, because no text merges with it, and removes it from the result. All
    other text, and the control tokens of the template, are encoded as always.

    Args:
        tokenizer: A transformers tokenizer.
        template: The chat template; by default the tokenizer's. In results of tools, added tokens that are not special,
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
        """Copies of messages, or of schemas of tools, with marks."""
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
        """Which tokens of `with_tokens(text)` belong to the text."""
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
    """Matches any of these texts; a single character cannot be broken."""
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


EncodeImages = Callable[[str, Sequence[str], ControlTokens], tuple[list[int], Media]]
"""Maps a rendered text, its images (files in base64) and the `ControlTokens` that marked it to tokens and media."""


def read_template(chat_template: str) -> str:
    """Return the source of a chat template.

    Args:
        chat_template: A built-in template's name, a path, or the source itself.

    Raises:
        ValueError: If it is none of them.
    """
    builtin = {path.stem: path for path in (Path(__file__).parent / "templates").glob("*.jinja")}
    path = builtin.get(chat_template, Path(chat_template))
    if chat_template not in builtin and ("{{" in chat_template or "{%" in chat_template):
        return chat_template
    if not path.is_file():
        names = ", ".join(sorted(builtin))
        raise ValueError(f"chat_template is {chat_template!r}; pass a file, the text of a template, or one of {names}.")
    return path.read_text(encoding="utf-8")


def dummy_conversation(name: str, arguments: Mapping[str, str] = {}) -> Messages:
    """A question, and a turn that calls the tool of this name."""
    call = {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}
    return [{"role": "user", "content": "dummy"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


_REMEDY = (
    "pass episodes.chat_template='qwen3' or 'llama3', built-in training templates of these families, or your own "
    "template that renders each message independently"
)
_MAX_CACHED_PREFIXES = 256
_TAIL_TOKENS = 64


class ChatFormat:
    """Renders conversations with tools, and parses the model's turns.

    Args:
        tokenizer: A transformers tokenizer with a chat template.
        chat_template: The name of a built-in training template (`qwen3`, `llama3`, `plain`), a path to a file, or a
            Jinja template; defaults to the tokenizer's.
        template_kwargs: Passed to `apply_chat_template`, such as `enable_thinking`.
        split_special_tokens: Encode control tokens in the text of messages as text; see `ControlTokens`.
        encode_images: Tokens and media of a rendered text with these images, given the format's `ControlTokens`; if
            None, the model reads only text.

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
        encode_images: EncodeImages | None = None,
    ) -> None:
        self.tokenizer, self._encode_images = tokenizer, encode_images
        self.template_kwargs = dict(template_kwargs or {})
        other = self.template_kwargs.pop("chat_template", None)
        if chat_template is not None and other is not None:
            raise ValueError("chat_template is set twice, as an option and in chat_template_kwargs; omit one of them.")
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
        """Omit the worker process."""
        return vars(self) | {"_template_parser": None}

    def close(self) -> None:
        """End the worker process that parses turns, if there is one."""
        if self._template_parser is not None:
            self._template_parser.close()
            self._template_parser = None

    def check_tools(self, *, may_rewrite: bool = False) -> None:
        """Check that the template renders calls and results, and is prefix-preserving; else training is silently wrong.

        Args:
            may_rewrite: Accept a template that changes earlier messages once others follow.

        Raises:
            ValueError: If the template cannot be used, or no parser knows its calls; names the remedy.
        """
        if not self.source:
            raise ValueError(f"Tools need a chat template, and the tokenizer has none; {_REMEDY}.")
        user, turn = dummy_conversation("check_tool", {"key": "check_value"})
        results = [{"role": "tool", "name": "check_tool", "content": f"check_result_{n}"} for n in (1, 2)]
        markers = {
            "check_tool": "the name of a call",
            "check_value": "the arguments of a call",
            "check_result_1": "the result of a tool",
            "check_result_2": "the second result of a turn",
        }
        alternative = ""
        try:
            text = self._render([user, turn, *results])
            for marker, what in markers.items():
                if marker not in text:
                    raise ValueError(f"the chat template drops {what}")
            alternative = ", or set episodes.rewritten_history='new_row'"
            if not may_rewrite:
                thought = {**turn, "reasoning_content": "check"}
                turns = [user, turn, results[0], thought, results[0], turn, results[0]]
                self._check_prefix_preserving([user, turn], results)
                for place in (2, 4, 6):
                    self._check_prefix_preserving(turns[:place], results[:1])
        except ValueError as error:
            raise ValueError(f"Tools need another chat template: {error}; {_REMEDY}{alternative}.") from error
        if self._response_template is not None:
            with suppress(MalformedTurnError):
                self._parse([], [], ())  # a malformed template, which is another ValueError, ends the run here
        elif self.parser is None:
            raise ValueError("No parser knows this chat template's calls; see pl_grouprl.chat.register_tool_parser.")

    def _check_prefix_preserving(self, before: Messages, results: Messages) -> None:
        """A conversation with results must be the one without, up to its last turn, followed by the results."""
        result_ids = self.encode_results(results)
        full_ids = self._encode([*before, *results], add_generation_prompt=True)
        prefix_ids = self._encode(before, add_generation_prompt=False)
        cut = len(full_ids) - len(result_ids)
        if full_ids[:cut] != prefix_ids[:cut]:
            raise ValueError("the chat template is not prefix-preserving: a result changes how a turn looks")
        if full_ids[cut:] != result_ids:
            raise ValueError("the chat template renders results differently at different positions of a conversation")

    @cached_property
    def turn_end_ids(self) -> list[int]:
        """The tokens with which the template ends the model's turns, answers and calls; empty if it has none.

        They are the special tokens that follow the turn whatever comes next: the EOS token if it is one of them,
        otherwise the last. After an answer, other added tokens count if none is special.
        """
        marker = "check marker"
        answer = {"role": "assistant", "content": marker}
        user, call = dummy_conversation("check", {"check": marker})
        result = {"role": "tool", "name": "check", "content": "check"}
        special, eos = special_tokens(self.tokenizer), self.tokenizer.eos_token_id
        added = {token: text.content for token, text in getattr(self.tokenizer, "added_tokens_decoder", {}).items()}
        found: set[int] = set()
        parts = [one | {"content": [{"type": "text", "text": one["content"]}]} for one in (answer, user)]
        for turn, following in ((answer, user), parts, (call, result)):
            try:
                texts = [self._render([user, turn]), self._render([user, turn, following])]
            except ValueError:  # some templates have no tools
                continue
            tails = [text.partition(marker)[2] for text in texts]
            always = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(*tails, strict=False)))
            ends: list[int] = []
            for texts_of in (special, added) if turn is not call else (special,):
                # Any text may encode to the unknown token.
                ends = ends or [token for token in self._encode_text(always) if texts_of.get(token, "\0") in always]
            found.update([eos] if eos in ends else ends[-1:])
        return sorted(found)

    def render_prompt(self, messages: Messages, tools: Sequence[Schema] = ()) -> str:
        """Render a prompt up to where the model starts to write; a final assistant message is left open.

        Args:
            messages: The conversation.
            tools: Schemas of the tools that the model may call.

        Raises:
            ValueError: If there is no chat template, or it rejects the messages.
        """
        return self._control.without_marks(self._render_prompt(messages, tools))

    def _render_prompt(self, messages: Messages, tools: Sequence[Schema]) -> str:
        open_ended = messages[-1]["role"] == "assistant"
        options = {"tools": list(tools)} if tools else {}
        return self._apply(messages, add_generation_prompt=not open_ended, continue_final_message=open_ended, **options)

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
            ValueError: If the template rejects the messages.
        """
        text = self._render_prompt(messages, tools)
        past = self.tokenizer.decode(history_ids, clean_up_tokenization_spaces=False)
        if not self._control.without_marks(text).startswith(past):
            return self._encode_text(text)
        return [*history_ids, *self._encode_text(self._control.after(text, len(past)))]

    def _encode_text(self, text: str) -> list[int]:
        return self._control.encode([text])[0]

    @property
    def reads_images(self) -> bool:
        """Whether results of tools may have images."""
        return self._encode_images is not None

    def encode_results(self, results: Messages) -> list[int]:
        """Tokens between two turns of the model: the results of tools, and the header of the next turn.

        A dummy conversation is rendered with and without the results. The tokens are what the former adds after the
        last EOS token of the latter (TRL's `_get_tool_suffix_ids`), so sampled turns are never tokenized again.

        Args:
            results: Messages `{"role": "tool", "name": ..., "content": ...}`, at least one.

        Raises:
            ValueError: If the chat template rejects them, or is not prefix-preserving.
        """
        return self._after_call(results, lambda text: (self._encode_text(text), {}))[0]

    def encode_results_with_images(self, results: Messages, images: Sequence[str]) -> tuple[list[int], Media]:
        """Tokens as `encode_results`, and the media in them, for results with parts `{"type": "image"}`.

        Args:
            results: See `encode_results`.
            images: The image of each part, in order; a file in base64.

        Raises:
            ValueError: If the chat template does not place every image, or for the reasons of `encode_results`.
        """
        encode_images = self._encode_images
        assert encode_images is not None
        return self._after_call(results, lambda text: encode_images(text, images, self._control))

    def _after_call(
        self, results: Messages, encode: Callable[[str], tuple[list[int], Media]]
    ) -> tuple[list[int], Media]:
        results = plain_data(results)
        name = results[0]["name"]
        for _ in range(2):
            token_ids, media = encode(self._render([*dummy_conversation(name), *results], add_generation_prompt=True))
            prefix_ids = self._dummy_prefixes.get(name)
            if prefix_ids is None:  # up to the token that ends the call
                prefix_ids = self._encode(dummy_conversation(name), add_generation_prompt=False)
                ends = [place for place, token in enumerate(prefix_ids, 1) if token in self.turn_end_ids]
                prefix_ids = prefix_ids[: max(ends, default=None)]
                if len(self._dummy_prefixes) >= _MAX_CACHED_PREFIXES:  # the model may invent arbitrarily many names
                    self._dummy_prefixes.clear()
                self._dummy_prefixes[name] = prefix_ids
            if token_ids[: (start := len(prefix_ids))] == prefix_ids:
                return token_ids[start:], {n: value[start:] if is_per_token(n) else value for n, value in media.items()}
            self._dummy_prefixes.clear()  # the template may render the date, which may have changed
        raise ValueError(f"the chat template is not prefix-preserving: a result changes how a call of {name!r} looks")

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
        start, count = "", _TAIL_TOKENS  # what the prompt has of the turn: the text after the last header
        while True:
            text = self.tokenizer.decode(prefix_ids[-count:])
            if self.parser.header in text:
                start = text.rpartition(self.parser.header)[2]
            if self.parser.header in text or count >= len(prefix_ids):
                break
            count *= 4
        return self.parser.parse(start + self.tokenizer.decode(token_ids), tools)

    @property
    def _response_template(self) -> Mapping[str, Any] | None:
        return getattr(self.tokenizer, "response_template", None)

    def _encode(self, messages: Messages, *, add_generation_prompt: bool) -> list[int]:
        return self._encode_text(self._render(messages, add_generation_prompt=add_generation_prompt))

    def _render(self, messages: Messages, **options: Any) -> str:
        """Text of a conversation, by the tokenizer's template for tools if it has several."""
        return self._apply(messages, chat_template=self.source, **options)

    def _apply(self, messages: Messages, **options: Any) -> Any:
        if self.chat_template is not None:
            options.setdefault("chat_template", self.chat_template)
        try:
            marked = self._control.mark(messages)
            if "tools" in options:
                options["tools"] = self._control.mark(options["tools"])
            return self.tokenizer.apply_chat_template(marked, tokenize=False, **options, **self.template_kwargs)
        except Exception as error:  # templates are programs that may raise anything
            raise ValueError(f"the chat template refused the messages ({error})") from error


LIBRARY = "renderers"


class RendererFormat(ChatFormat):
    """A `ChatFormat` of the optional library `renderers`, which works on tokens, without chat templates.

    Calls are recognized by special tokens, not by text that looks like them. Renderers extend a conversation without
    rendering its turns again, so the model's chat template need not be prefix-preserving.

    Args:
        tokenizer: A transformers tokenizer with the special tokens of the family.
        name: The library's name of the family, such as `qwen3`; `auto` infers it from the tokenizer's `name_or_path`.
        template_kwargs: Options of the renderer, such as `enable_thinking`.

    Raises:
        ModuleNotFoundError: If the library is missing.
        ValueError: If there is no such renderer, or it does not fit the tokenizer.
    """

    encodes_prompts = True

    def __init__(self, tokenizer: Any, name: str = "auto", template_kwargs: Mapping[str, Any] | None = None) -> None:
        require(RENDERERS_AVAILABLE, f"chat_template={LIBRARY!r}", LIBRARY)
        from renderers import config_from_name, create_renderer

        super().__init__(tokenizer, None, template_kwargs)
        try:
            self._renderer = create_renderer(
                tokenizer, config_from_name(name), chat_template_kwargs=self.template_kwargs or None
            )
        except Exception as error:  # the library asserts, and raises errors of pydantic and transformers
            raise ValueError(f"The library {LIBRARY} has no renderer {name!r} for this tokenizer ({error}).") from error

    def check_tools(self, *, may_rewrite: bool = False) -> None:
        """Check that the renderer can extend conversations.

        Raises:
            ValueError: If it cannot, or `may_rewrite` is set: renderers never rewrite conversations.
        """
        if may_rewrite:
            raise ValueError(
                "episodes.rewritten_history is 'new_row', but renderers never rewrite it; leave it 'refuse'."
            )
        self.encode_results([{"role": "tool", "name": "check", "content": "check"}])

    @cached_property
    def turn_end_ids(self) -> list[int]:
        """The tokens with which the model ends a turn."""
        return sorted(self._renderer.get_stop_token_ids())

    def render_prompt(self, messages: Messages, tools: Sequence[Schema] = ()) -> str:
        """Text of a prompt; see `encode_prompt`."""
        return self.tokenizer.decode(self.encode_prompt(messages, tools))

    def encode_prompt(self, messages: Messages, tools: Sequence[Schema] = ()) -> list[int]:
        """Tokens of a prompt, up to where the model starts to write.

        Raises:
            ValueError: If the last message is the model's: renderers cannot leave one open.
        """
        if messages[-1]["role"] == "assistant":
            raise ValueError(f"the library {LIBRARY} cannot leave the last message of the model open")
        return self._render_ids(messages, tools=list(tools) or None, add_generation_prompt=True)

    def encode_results(self, results: Messages) -> list[int]:
        """Tokens between two turns of the model: the results of tools, and the header of the next turn.

        Raises:
            ValueError: If the renderer cannot extend conversations.
        """
        results = plain_data(results)
        user, turn = dummy_conversation(results[0]["name"])
        prompt_ids = self._render_ids([user], add_generation_prompt=True)
        token_ids = self._render_ids([user, turn])
        places = (place for place, token in enumerate(token_ids) if token in self.turn_end_ids)
        last = max(places, default=len(token_ids) - 1)
        shared = 0  # reasoning that the prompt opens may be rendered differently
        while shared < min(len(prompt_ids), last) and prompt_ids[shared] == token_ids[shared]:
            shared += 1
        rendered = self._renderer.bridge_to_next_turn(token_ids[:shared], token_ids[shared : last + 1], results)
        if rendered is None:
            raise ValueError(f"{type(self._renderer).__name__} cannot extend a conversation; pass a chat template.")
        return list(rendered.token_ids[last + 1 :])

    def _render_ids(self, messages: Messages, **options: Any) -> list[int]:
        try:
            return list(self._renderer.render_ids(messages, **options))
        except Exception as error:  # the default renderer runs chat templates, which may raise anything
            raise ValueError(f"the renderer refused the messages ({error})") from error

    def _parse(self, token_ids: list[int], prefix_ids: list[int], tools: Sequence[Schema]) -> Any:
        parsed = self._renderer.parse_response(token_ids, tools=list(tools) or None, prompt_ids=prefix_ids)
        broken = next((call for call in parsed.tool_calls if call.status != "ok"), None)
        if broken is not None:
            raise MalformedTurnError(f"a call is malformed: {broken.status}")
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content.strip()}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        if parsed.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in parsed.tool_calls
            ]
        return message


def uses_renderers(chat_template: str | None) -> bool:
    """Whether a `chat_template` option selects the library."""
    return chat_template is not None and chat_template.partition(":")[0] == LIBRARY


def make_chat_format(
    tokenizer: Any,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    split_special_tokens: bool = True,
    encode_images: EncodeImages | None = None,
) -> ChatFormat:
    """Create the chat format that a `chat_template` option selects.

    Args:
        tokenizer: A transformers tokenizer.
        chat_template: See `ChatFormat`; `renderers` and `renderers:NAME` use the library of that name.
        template_kwargs: See `ChatFormat`.
        split_special_tokens: See `ChatFormat`; the library encodes control tokens in text as it does.
        encode_images: See `ChatFormat`; with the library, the model reads only text.
    """
    if chat_template is not None and uses_renderers(chat_template):
        return RendererFormat(tokenizer, chat_template.partition(":")[2] or "auto", template_kwargs)
    return ChatFormat(tokenizer, chat_template, template_kwargs, split_special_tokens, encode_images)
