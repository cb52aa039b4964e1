"""Chat formats of the optional library `renderers`, which works on tokens, without chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from pl_grouprl.chat.format import ChatFormat, dummy_conversation
from pl_grouprl.chat.parsing import MalformedTurnError, Schema, plain_data
from pl_grouprl.types import Messages
from pl_grouprl.utilities.optional import RENDERERS_AVAILABLE, require

LIBRARY = "renderers"


class RendererFormat(ChatFormat):
    """A `ChatFormat` that uses a renderer of the library.

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
            raise ValueError(
                f"The library {LIBRARY} has no renderer {name!r} for this tokenizer ({error}); name one with "
                f"chat_template='{LIBRARY}:NAME', such as '{LIBRARY}:qwen3'."
            ) from error

    def check_tools(self, *, may_rewrite: bool = False) -> None:
        """Refuse a renderer that cannot extend conversations, and `may_rewrite`: renderers never rewrite any.

        Raises:
            ValueError: Names the remedy.
        """
        if may_rewrite:
            raise ValueError(
                f"rewritten_history is 'new_row', but renderers of the library {LIBRARY} never rewrite the history; "
                "leave it 'refuse', or pass a chat template."
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
        prompt_ids, turn_ids = self._dummy_ids(results[0]["name"])
        rendered = self._renderer.bridge_to_next_turn(prompt_ids, turn_ids, results)
        if rendered is None:
            raise ValueError(
                f"The renderer {type(self._renderer).__name__} cannot extend a conversation by tool results; name "
                f"another with chat_template='{LIBRARY}:NAME', or pass a chat template."
            )
        return list(rendered.token_ids[len(prompt_ids) + len(turn_ids) :])

    def _dummy_ids(self, name: str) -> tuple[list[int], list[int]]:
        """Prompt and turn of a dummy conversation that calls a tool, up to the token that ends the turn."""
        user, turn = dummy_conversation(name)
        prompt_ids = self._render_ids([user], add_generation_prompt=True)
        token_ids = self._render_ids([user, turn])
        places = (place for place, token in enumerate(token_ids) if token in self.turn_end_ids)
        last = max(places, default=len(token_ids) - 1)
        shared = 0  # reasoning that the prompt opens may be rendered differently
        while shared < min(len(prompt_ids), last) and prompt_ids[shared] == token_ids[shared]:
            shared += 1
        return token_ids[:shared], token_ids[shared : last + 1]

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
) -> ChatFormat:
    """Create the chat format that a `chat_template` option selects.

    Args:
        tokenizer: A transformers tokenizer.
        chat_template: See `ChatFormat`; `renderers` and `renderers:NAME` use the library of that name.
        template_kwargs: See `ChatFormat`.
        split_special_tokens: See `ChatFormat`; the library encodes control tokens in text as it does.
    """
    if chat_template is not None and uses_renderers(chat_template):
        return RendererFormat(tokenizer, chat_template.partition(":")[2] or "auto", template_kwargs)
    return ChatFormat(tokenizer, chat_template, template_kwargs, split_special_tokens)
