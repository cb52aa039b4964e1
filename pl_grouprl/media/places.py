"""Where images and videos are in a prompt: parts of its messages, tags in its text, the model's tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pl_grouprl.types import Messages
from pl_grouprl.utilities.text import shorten

KINDS = ("image", "video")
_TAGS = re.compile("(<image>|<video>)")
_OTHER_TYPES = ("image_url", "video_url", "input_image", "input_video")
_OWN = ("image", "video", "url", "path", "base64")


def check_contents(messages: Messages, where: str) -> None:
    """Check the contents of messages, except for tool outputs, which are left to the chat template.

    Args:
        messages: Each has `role` and `content`.
        where: Names the row.

    Raises:
        ValueError: If a user's content is None, a content is neither text nor a list of parts, a part has no type, or a
            part has an image in the format of a web API.
    """
    for number, message in enumerate(messages):
        content, place = message["content"], f"{where}: messages[{number}].content"
        if content is None and message["role"] in ("user", "system"):
            raise ValueError(f"{place} is None; write what the {message['role']} says, or remove the message.")
        if message["role"] == "tool" or content is None:
            continue
        if not isinstance(content, (str, list, tuple)):
            raise ValueError(f"{place} is {shorten(str(content))}, not a string or a list of parts; correct the row.")
        for index, part in enumerate(() if isinstance(content, str) else content):
            if not _is_part(part):
                raise ValueError(
                    f"{place}[{index}] is {shorten(str(part))}; a part is a dictionary with a 'type', such as "
                    "{'type': 'text', 'text': ...} or {'type': 'image'}."
                )
            if part["type"] == "text" and not isinstance(part.get("text"), str):
                raise ValueError(f"{place}[{index}].text is {shorten(str(part.get('text')))}, not a string.")
            if part["type"] in _OTHER_TYPES:
                raise ValueError(
                    f"{place}[{index}] has the type {part['type']!r}; put its content in the column of "
                    "images or videos, and write {'type': 'image'} or {'type': 'video'} here."
                )


def has_parts(messages: Messages) -> bool:
    """Whether a message has a part for an image or video."""
    return any(part["type"] in KINDS for message in messages for part in _own_parts(message["content"]))


def has_tags(prompt: str | Messages) -> bool:
    """Whether a text has the tag of an image or video (verl)."""
    contents = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    return any(_TAGS.search(text) for content in contents for text in _texts(content))


def place_media(messages: Messages, counts: Mapping[str, int], where: str) -> Messages:
    """Assign every image and video a place among the parts of the messages.

    Places are the parts `{"type": "image"}` and `{"type": "video"}` of a message, or the tags `<image>` and `<video>`
    in its text (verl). Without any places, all come before the text of the user's first message (TRL).

    Args:
        messages: The messages; not modified.
        counts: Number of images and videos.
        where: Names the row.

    Raises:
        ValueError: If the numbers of places and of images or videos differ, or a part contains one itself.
    """
    placed = [{**message, "content": _parts(message["content"])} for message in messages]
    parts = [part for message in placed for part in _own_parts(message["content"])]
    found = {kind: sum(part["type"] == kind for part in parts) for kind in KINDS}
    for part in parts:
        keys = [name for name in _OWN if part["type"] in KINDS and part.get(name) is not None]
        if keys:
            raise ValueError(
                f"{where}: a part of type {part['type']!r} has {keys[0]!r}, and the row also has {part['type']}s in "
                f"a column; put them all in the column, and write {{'type': {part['type']!r}}} in their places."
            )
    users = [message for message in placed if message["role"] == "user"]
    if not any(found.values()) and users:
        users[0]["content"] = [{"type": kind} for kind in KINDS for _ in range(counts[kind])] + users[0]["content"]
        return placed
    for kind in KINDS:
        if found[kind] != counts[kind]:
            raise ValueError(
                f"{where}: the row has {counts[kind]} {kind}s and the messages have places for {found[kind]} (parts of "
                f"type {kind!r}, or tags <{kind}>); correct the row."
            )
    return placed


def check_tokens(counts: Mapping[str, int], text: str, processor: Any, where: str) -> None:
    """Check that a prompt has one of the model's media tokens for each image and video of its row.

    Args:
        counts: Number of each kind; 0 if missing.
        text: The rendered prompt.
        processor: A transformers processor, which defines the tokens.
        where: Names the row.

    Raises:
        ValueError: If the numbers differ, or there is no such token.
    """
    for kind in (*KINDS, "audio"):
        count, token = counts.get(kind, 0), getattr(processor, f"{kind}_token", None)
        if not token:
            if count:
                raise ValueError(f"{where}: {type(processor).__name__} has no {kind} token; remove the {kind}s.")
        elif (there := text.count(str(token))) != count:
            raise ValueError(
                f"{where}: the row has {count} {kind}s, and its rendered text has the {kind} token {str(token)!r} "
                f"{there} times; correct the row, or use a chat template that writes that token."
            )


def without_empty_keys(messages: Messages) -> Messages:
    """Remove the empty keys that parquet adds to parts, because templates test which keys exist."""
    return [{**message, "content": _without_none(message["content"])} for message in messages]


def _without_none(content: Any) -> Any:
    if not _own_parts(content):
        return content
    return [{name: value for name, value in part.items() if value is not None} for part in content]


def _parts(content: Any) -> Any:
    """Convert a content to a list of parts, split at tags; leaves other tool outputs unchanged."""
    if content is None:
        return []
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if len(_own_parts(content)) != len(content):
        return content
    return [piece for part in content for piece in _split(part)]


def _split(part: dict[str, Any]) -> list[dict[str, Any]]:
    if part["type"] != "text" or not isinstance(part.get("text"), str):
        return [part]
    pieces = [piece for piece in _TAGS.split(part["text"]) if piece]
    return [{"type": p[1:-1]} if _TAGS.fullmatch(p) else {**part, "text": p} for p in pieces]


def _texts(content: Any) -> list[str]:
    texts = [content] if isinstance(content, str) else [part.get("text") for part in _own_parts(content)]
    return [text for text in texts if isinstance(text, str)]


def _own_parts(content: Any) -> Sequence[dict[str, Any]]:
    """The parts of a content if it is a list of parts; otherwise empty."""
    is_parts = isinstance(content, (list, tuple)) and all(_is_part(part) for part in content)
    return content if is_parts else ()


def _is_part(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("type"), str)
