"""Checks that a chat template can be used for conversations with tools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pl_grouprl.types import Messages

_MARKERS = {
    "check_tool": "the name of a call",
    "check_value": "the arguments of a call",
    "check_result_1": "the result of a tool",
    "check_result_2": "the second result of a turn",
}
_NAME, _VALUE, *_RESULTS = _MARKERS
_USER = {"role": "user", "content": "check"}
_FAMILIES = {"qwen3": ("<|im_start|>", "<think>"), "llama3": ("<|start_header_id|>",)}


def check_prefix_preserving(encode: Callable[..., list[int]], encode_results: Callable[[Messages], list[int]]) -> None:
    """Refuse a template that renders turns or results differently in different conversations.

    Args:
        encode: Returns the tokens of a conversation; takes `add_generation_prompt`.
        encode_results: Returns the tokens of results between two turns.

    Raises:
        ValueError: Says what is wrong with the template.
    """
    conversation = _conversation()
    for place, message in enumerate(conversation):
        if message["role"] == "tool":
            _check_results(conversation[:place], [message], encode, encode_results)
    _check_results(conversation[:2], _results(2), encode, encode_results)


def check_complete(render: Callable[[Messages], str]) -> None:
    """Refuse a template that drops calls or results.

    Args:
        render: Returns the text of a conversation.

    Raises:
        ValueError: Names what it drops.
    """
    text = render([_USER, _turn(), *_results(2)])
    for marker, what in _MARKERS.items():
        if marker not in text:
            raise ValueError(f"the chat template drops {what}")


def _check_results(
    before: Messages,
    results: Messages,
    encode: Callable[..., list[int]],
    encode_results: Callable[[Messages], list[int]],
) -> None:
    """A conversation with results must be the one without, up to its last turn, followed by the results."""
    result_ids = encode_results(results)
    full_ids = encode([*before, *results], add_generation_prompt=True)
    prefix_ids = encode(before, add_generation_prompt=False)
    cut = len(full_ids) - len(result_ids)
    if full_ids[:cut] != prefix_ids[:cut]:
        raise ValueError(
            "the chat template is not prefix-preserving: it renders a turn of the model differently once a result "
            "follows"
        )
    if full_ids[cut:] != result_ids:
        raise ValueError("the chat template renders results differently at different positions of a conversation")


def _turn(thought: str | None = None) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": _NAME, "arguments": {"key": _VALUE}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    return turn if thought is None else {**turn, "reasoning_content": thought}


def _results(count: int) -> Messages:
    return [{"role": "tool", "name": _NAME, "content": content} for content in _RESULTS[:count]]


def _conversation() -> Messages:
    """Three calls, the second with reasoning, each followed by a result."""
    turns = [_turn(), _turn(thought="check"), _turn()]
    return [_USER, *(message for turn in turns for message in (turn, *_results(1)))]


def remedy(source: str) -> str:
    """What to do about a refused template; names the built-in one for its family."""
    fitting = [name for name, markers in _FAMILIES.items() if all(marker in source for marker in markers)]
    names = " or ".join(f"chat_template={name!r}" for name in fitting or _FAMILIES)
    return (
        f"pass {names}{'' if fitting else ' if the model is of that family'}, a built-in training template, or a "
        "template of your own that renders each message independently"
    )
