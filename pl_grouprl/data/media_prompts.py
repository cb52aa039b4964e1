"""Prompts with images and videos: where these stand in the text, and when they are processed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pl_grouprl.data.images import as_list, check_image, check_video, read_image, read_video
from pl_grouprl.data.sources import SourceRow
from pl_grouprl.packing.media import is_per_token
from pl_grouprl.types import Media, Messages, Prompt

KINDS = ("image", "video")
_TAGS = re.compile("(<image>|<video>)")


@dataclass
class MediaPrompt(Prompt):
    """A prompt whose images and videos are read and processed when it is sampled, by `open`, and not kept.

    Its `token_ids` are those of the text, with one token in the place of each image or video.

    Attributes:
        encode: Reads and processes them; returns the tokens as the model reads them, and the media.
    """

    encode: Callable[[], tuple[list[int], Media]] = field(kw_only=True, repr=False)

    def open(self) -> Prompt:
        """Read and process the images and videos.

        Raises:
            ValueError: If one cannot be read, or the processor refuses them. Names the row.
        """
        token_ids, media = self.encode()
        return Prompt(token_ids, self.prompt, self.columns, self.data_source, media)


def count_media(values: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, int]:
    """How many images and videos a row has, by kind.

    Args:
        values: The row.
        columns: The column of each kind.
    """
    return {kind: len(as_list(values.get(columns[kind]))) for kind in KINDS}


def place_media(messages: Messages, counts: Mapping[str, int], where: str) -> Messages:
    """Give every image and video its place among the parts of the messages.

    Places are the parts `{"type": "image"}` and `{"type": "video"}` of a message, or the tags `<image>` and `<video>`
    in its text (verl). Where there is no place at all, all come before the text of the first message of the user (TRL).

    Args:
        messages: Left as they are.
        counts: How many images and videos there are.
        where: Names the row.

    Raises:
        ValueError: If there are not as many places as images and videos of each kind.
    """
    placed = [{**message, "content": _parts(message["content"])} for message in messages]
    found = {kind: sum(part["type"] == kind for m in placed for part in m["content"]) for kind in KINDS}
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


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        pieces = [piece for piece in _TAGS.split(content) if piece]
        return [{"type": p[1:-1]} if _TAGS.fullmatch(p) else {"type": "text", "text": p} for p in pieces]
    # Parquet fills up the keys that a part does not have; templates ask which keys there are.
    return [{name: value for name, value in part.items() if value is not None} for part in content]


def has_places(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a message has a part for an image or video."""
    contents = [message["content"] for message in messages if isinstance(message["content"], (list, tuple))]
    return any(isinstance(part, Mapping) and part.get("type") in KINDS for content in contents for part in content)


def check_media(
    row: SourceRow, text: str, processor: Any, columns: Mapping[str, str], options: Mapping[str, Any]
) -> Callable[[], tuple[list[int], Media]]:
    """Check the images and videos of a row, as far as that goes without decoding them, and put off the rest.

    Args:
        row: Holds them.
        text: Its prompt, with the processor's token in the place of each image and video.
        processor: A transformers processor.
        columns: The column of each kind.
        options: Keyword arguments of the processor.

    Returns:
        What is left to do: a function that returns the tokens as the model reads them, and the media.

    Raises:
        ValueError: If an image or video is not there or is none, or has no place in the text.
    """
    media = {kind: as_list(row.values.get(columns[kind])) for kind in KINDS}
    for kind in KINDS:
        _check_places(kind, len(media[kind]), text, processor, row.where)
        for number, item in enumerate(media[kind]):
            try:
                (check_image if kind == "image" else check_video)(item)
            except ValueError as error:
                raise ValueError(f"{row.where}: {columns[kind]}[{number}]: {error}; correct the row.") from error
    return partial(_encode, processor, text, media, options, row.where)


def _check_places(kind: str, count: int, text: str, processor: Any, where: str) -> None:
    token = getattr(processor, f"{kind}_token", None)
    if token is None:
        if count:
            raise ValueError(f"{where}: {type(processor).__name__} has no {kind} token; remove the {kind}s.")
    elif text.count(token) != count:
        raise ValueError(
            f"{where}: the row has {count} {kind}s, and its text as the model reads it has {text.count(token)} times "
            f"the {kind} token {token!r}; correct the row, or use a chat template that writes that token."
        )


def _encode(
    processor: Any, text: str, media: Mapping[str, list[Any]], options: Mapping[str, Any], where: str
) -> tuple[list[int], Media]:
    try:
        read = {
            "images": [read_image(image) for image in media["image"]],
            "videos": [read_video(video) for video in media["video"]],
        }
        given = {name: items for name, items in read.items() if items}
        encoded = dict(processor(text=[text], return_tensors="pt", **given, **options))
    except Exception as error:  # processors raise what their libraries raise
        raise ValueError(f"{where}: the images or videos cannot be processed ({error}); correct the row.") from error
    token_ids = encoded.pop("input_ids")[0].tolist()
    encoded.pop("attention_mask", None)
    return token_ids, {name: value[0] if is_per_token(name) else value for name, value in encoded.items()}
