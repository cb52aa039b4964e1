"""Prompts with images and videos: checks a row's media, and processes them on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pl_grouprl.chat.control_tokens import ControlTokens
from pl_grouprl.media.images import as_list, check_image, check_video, read_image, read_video
from pl_grouprl.media.places import KINDS, check_tokens
from pl_grouprl.types import Media, Prompt, is_per_token


@dataclass
class MediaPrompt(Prompt):
    """A prompt whose images and videos are read and processed by `open` when it is sampled, and not kept.

    Its `token_ids` are those of the text, with one token per image or video.

    Attributes:
        encode: Reads and processes the media; returns the model's tokens and the media.
        counted: Number of tokens including images and videos, if a length limit required counting them.
    """

    encode: Callable[[], tuple[list[int], Media]] = field(kw_only=True, repr=False)
    counted: int | None = field(default=None, kw_only=True, repr=False)

    @property
    def num_tokens(self) -> int:
        """Number of the model's tokens if `counted` is set; otherwise those of the text."""
        return len(self.token_ids) if self.counted is None else self.counted

    def open(self) -> Prompt:
        """Read and process the images and videos.

        Raises:
            ValueError: If one cannot be read, or the processor refuses them; names the row.
        """
        token_ids, media = self.encode()
        return Prompt(token_ids, self.prompt, self.columns, self.data_source, media, self.where)


def count_media(values: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, int]:
    """Count the images and videos of a row, by kind.

    Args:
        values: The row.
        columns: The column of each kind.
    """
    return {kind: len(as_list(values.get(columns[kind]))) for kind in KINDS}


def check_row_media(
    values: Mapping[str, Any],
    text: str,
    processor: Any,
    columns: Mapping[str, str],
    options: Mapping[str, Any],
    control: ControlTokens,
    num_after: int = 0,
    *,
    where: str,
) -> Callable[[], tuple[list[int], Media]]:
    """Check the images and videos of a row as far as possible without decoding them.

    Args:
        values: The row.
        text: Its prompt, with the processor's token for each image and video.
        processor: A transformers processor.
        columns: The column of each kind.
        options: Keyword arguments of the processor.
        control: Has marked the text.
        num_after: Number of tokens that the tokenizer adds after the text, such as EOS; they are removed.
        where: Names the row.

    Returns:
        A function that completes the processing, and returns the model's tokens and the media.

    Raises:
        ValueError: If an image or video is missing or invalid, or has no place in the text.
    """
    media = {kind: as_list(values.get(columns[kind])) for kind in KINDS}
    check_tokens({kind: len(media[kind]) for kind in KINDS}, text, processor, where)
    for kind in KINDS:
        for number, item in enumerate(media[kind]):
            try:
                (check_image if kind == "image" else check_video)(item)
            except ValueError as error:
                raise ValueError(f"{where}: {columns[kind]}[{number}]: {error}; correct the row.") from error
    return partial(_encode, processor, text, media, options, control, num_after, where)


def _encode(
    processor: Any,
    text: str,
    media: Mapping[str, list[Any]],
    options: Mapping[str, Any],
    control: ControlTokens,
    num_after: int,
    where: str,
) -> tuple[list[int], Media]:
    try:
        read = {
            "images": [read_image(image) for image in media["image"]],
            "videos": [read_video(video) for video in media["video"]],
        }
        given = {name: items for name, items in read.items() if items}
        encoded = dict(processor(text=[control.with_tokens(text)], return_tensors="pt", **given, **options))
    except Exception as error:  # processors may raise any error of their libraries
        raise ValueError(f"{where}: the images or videos cannot be processed ({error}); correct the row.") from error
    token_ids = encoded.pop("input_ids")[0].tolist()
    encoded.pop("attention_mask", None)
    end = len(token_ids) - num_after
    own = [place for place, keep in enumerate(control.kept(token_ids, text)[:end]) if keep]
    types = {name: value[0][own] if is_per_token(name) else value for name, value in encoded.items()}
    return [token_ids[place] for place in own], types
