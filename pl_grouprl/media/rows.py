"""Images and videos of a data set's rows: read, placed in prompts, processed."""

from __future__ import annotations

import io
import re
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pl_grouprl.chat.format import ControlTokens
from pl_grouprl.media.inputs import PLACEHOLDERS
from pl_grouprl.types import Media, Messages, Prompt, is_per_token
from pl_grouprl.utilities.text import shorten

# Images and videos in the formats of data sets: PIL images, paths, dictionaries with bytes or a path.


def as_list(value: Any) -> list[Any]:
    """Return a row's images or videos as a list: a single one is wrapped, None becomes empty."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def check_image(image: Any) -> None:
    """Verify that something is an image, without decoding it.

    Raises:
        ValueError: If it is not an image, or cannot be opened.
    """
    opened = _open(image)
    if opened is not image:
        with _errors_naming(image), opened:
            opened.verify()


def read_image(image: Any) -> Any:
    """Decode an image to RGB, rotated according to its EXIF data.

    Raises:
        ValueError: If it is not an image, or cannot be decoded.
    """
    from PIL import ImageOps

    with _errors_naming(image):
        return ImageOps.exif_transpose(_open(image)).convert("RGB")


def check_video(video: Any) -> None:
    """Verify that a video's file exists, or that its frames are images.

    Raises:
        ValueError: If the file does not exist, a frame is no image, or it is neither.
    """
    video = _unwrap(video, "video")
    if _is_frames(video):
        for frame in video:
            check_image(frame)
    elif isinstance(video, str) and not _path(video).is_file():
        raise ValueError(f"there is no file {video!r}")
    elif not isinstance(video, str) and not hasattr(video, "shape"):
        raise ValueError(f"a video of type {type(video).__name__} is not a path, a list of frames or an array")


def read_video(video: Any) -> Any:
    """Decode a video that is a list of frames; a file is left to the processor.

    Raises:
        ValueError: If a frame cannot be decoded.
    """
    video = _unwrap(video, "video")
    if _is_frames(video):
        return [read_image(frame) for frame in video]
    return str(_path(video)) if isinstance(video, str) else video


def _open(image: Any) -> Any:
    from PIL import Image

    image = _unwrap(image, "image")
    if isinstance(image, Image.Image):
        return image
    with _errors_naming(image):
        return Image.open(io.BytesIO(image) if isinstance(image, bytes) else _path(image))


def _unwrap(value: Any, kind: str) -> Any:
    """The bytes or path in a dictionary; other values unchanged. A path may be from another machine, so bytes win."""
    if not isinstance(value, Mapping):
        return value
    found = next((value[key] for key in ("bytes", kind, "path") if value.get(key) is not None), None)
    if found is None:
        raise ValueError(f"a dictionary with the keys {sorted(value)} has neither 'bytes' nor '{kind}' nor 'path'")
    return found


def _is_frames(video: Any) -> bool:
    return isinstance(video, Sequence) and not isinstance(video, (str, bytes))


def _path(path: str | Path) -> Path:
    text = str(path)
    if text.startswith(("http://", "https://")):
        raise ValueError(f"{text!r} is on another machine; download it and pass its path")
    return Path(text.removeprefix("file://")).expanduser()


@contextmanager
def _errors_naming(image: Any) -> Iterator[None]:
    """Turn any error of PIL into a ValueError that names the image."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:  # PIL's formats raise almost anything for broken files
        name = repr(str(image)) if isinstance(image, (str, Path)) else "the image"
        raise ValueError(f"{name} cannot be read: {error}") from error


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
        content, problem = message["content"], None
        place = f"{where}: messages[{number}].content"
        if content is None and message["role"] in ("user", "system"):
            problem = f"is None; write what the {message['role']} says, or remove the message."
        elif message["role"] == "tool" or content is None or isinstance(content, str):
            continue
        elif not isinstance(content, (list, tuple)):
            problem = f"is {shorten(str(content))}, not a string or a list of parts; correct the row."
        else:
            for index, part in enumerate(content):
                if not _is_part(part) or (part["type"] == "text" and not isinstance(part.get("text"), str)):
                    problem = (
                        f"[{index}] is {shorten(str(part))}; a part is a dictionary with a 'type', such as "
                        "{'type': 'text', 'text': ...} or {'type': 'image'}."
                    )
                elif part["type"] in _OTHER_TYPES:
                    problem = (
                        f"[{index}] has the type {part['type']!r}; put its content in the column of images or videos, "
                        "and write {'type': 'image'} or {'type': 'video'} here."
                    )
        if problem is not None:
            raise ValueError(f"{place}{'' if problem.startswith('[') else ' '}{problem}")


def has_parts(messages: Messages) -> bool:
    """Whether a message has a part for an image or video."""
    return any(part["type"] in KINDS for message in messages for part in _own_parts(message["content"]))


def has_tags(prompt: str | Messages) -> bool:
    """Whether a text has the tag of an image or video (verl)."""
    contents = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    texts: list[Any] = list(contents)
    texts += [part.get("text") for content in contents if not isinstance(content, str) for part in _own_parts(content)]
    return any(isinstance(text, str) and _TAGS.search(text) for text in texts)


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
            kind = part["type"]
            raise ValueError(f"{where}: a part of type {kind!r} has {keys[0]!r}; put all {kind}s in the row's column.")
    users = [message for message in placed if message["role"] == "user"]
    if not any(found.values()) and users:
        users[0]["content"] = [{"type": kind} for kind in KINDS for _ in range(counts[kind])] + users[0]["content"]
        return placed
    for kind in KINDS:
        if found[kind] != counts[kind]:
            places = f"places for {found[kind]} (parts of type {kind!r}, or tags <{kind}>)"
            raise ValueError(f"{where}: the row has {counts[kind]} {kind}s and the messages have {places}.")
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
    cleaned = []
    for message in messages:
        content = message["content"]
        if _own_parts(content):
            content = [{name: value for name, value in part.items() if value is not None} for part in content]
        cleaned.append({**message, "content": content})
    return cleaned


def _parts(content: Any) -> Any:
    """Convert a content to a list of parts, split at tags; leaves other tool outputs unchanged."""
    if content is None:
        return []
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if len(_own_parts(content)) != len(content):
        return content
    pieces: list[dict[str, Any]] = []
    for part in content:
        if part["type"] != "text" or not isinstance(part.get("text"), str):
            pieces.append(part)
            continue
        texts = [text for text in _TAGS.split(part["text"]) if text]
        pieces += [{"type": t[1:-1]} if _TAGS.fullmatch(t) else {**part, "text": t} for t in texts]
    return pieces


def _own_parts(content: Any) -> Sequence[dict[str, Any]]:
    """The parts of a content if it is a list of parts; otherwise empty."""
    is_parts = isinstance(content, (list, tuple)) and all(_is_part(part) for part in content)
    return content if is_parts else ()


def _is_part(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("type"), str)


_GIVEN = ("text", "images", "videos", "return_tensors")
"""Arguments passed to the processor for each prompt."""


def language_model_class(config: Any) -> str:
    """Name of transformers' auto class for a language model, text-only or multimodal.

    Args:
        config: A transformers config.
    """
    from transformers.models.auto import modeling_auto as auto

    with_media = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys() - auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    return "AutoModelForImageTextToText" if config.model_type in with_media else "AutoModelForCausalLM"


def reads_media(source: Any) -> bool:
    """Whether a source's policy reads images or videos, by its processor or its config.

    Args:
        source: A source of a policy, or None.
    """
    if callable(getattr(source, "load_processor", None)):
        return True
    load_config = getattr(source, "load_config", None)
    if not callable(load_config):
        return False
    try:
        config = load_config()
    except (OSError, ValueError):  # loading the policy will report the bad path
        return False
    return any(isinstance(getattr(config, name, None), int) for name in PLACEHOLDERS)


def load_processor(source: Any) -> Any:
    """Load the processor that converts images, videos and text to a model's inputs.

    Args:
        source: Path or hub name of a Hugging Face model, a policy source that names one (`PretrainedPolicy`), or one
            with a method `load_processor`.

    Raises:
        ValueError: If the source names no model, or its model has no image processor.
    """
    if callable(load := getattr(source, "load_processor", None)):
        return load()
    path = source if isinstance(source, str) else getattr(source, "path", None)
    if path is None:
        raise ValueError(f"{source!r} does not name a processor; pass processor=... to PromptDataModule.")
    from transformers import AutoProcessor

    options = {name: getattr(source, name) for name in ("revision", "trust_remote_code") if hasattr(source, name)}
    processor = AutoProcessor.from_pretrained(str(Path(path).expanduser()) if path[:1] == "~" else path, **options)
    if not hasattr(processor, "image_processor"):
        raise ValueError(f"{path!r} has no image processor ({type(processor).__name__}); choose a model with one.")
    return processor


def check_processor_options(processor: Any, options: Mapping[str, Any]) -> None:
    """Check that a processor takes its options, instead of ignoring them, or failing only later.

    Args:
        processor: A transformers processor; if it does not declare its arguments, it must check them itself.
        options: Keyword arguments for it.

    Raises:
        ValueError: If it does not take an argument.
    """
    groups = getattr(getattr(processor, "valid_processor_kwargs", None), "__annotations__", None)
    if groups is None:
        return
    parts = {"images_kwargs": "image_processor", "videos_kwargs": "video_processor"}
    known: dict[str, set[str]] = {}  # by group such as `images_kwargs`, as declared by the class and its parts
    for group, declared in groups.items():
        own = getattr(getattr(processor, parts.get(group, ""), None), "valid_kwargs", None)
        known[group] = {name for source in (declared, own) for name in getattr(source, "__annotations__", ())}
    anywhere = {*known, *(name for names in known.values() for name in names), "common_kwargs"} - {*_GIVEN}
    unknown = [name for name in options if name not in anywhere]
    for group, names in known.items():
        unknown += [f"{group}.{name}" for name in options.get(group) or () if names and name not in names]
    if unknown:
        raise ValueError(
            f"processor_kwargs: {type(processor).__name__} takes no {', '.join(map(repr, unknown))}, or it is already "
            "set; see its documentation."
        )


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
            ValueError: If one cannot be read or processed; names the row.
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


def encode_images(
    load: Callable[[], Any], options: Mapping[str, Any], text: str, images: Sequence[str], control: ControlTokens
) -> tuple[list[int], Media]:
    """Encode a rendered conversation whose tools returned images.

    Args:
        load: Returns a transformers processor.
        options: Keyword arguments of the processor.
        text: The conversation, with the processor's token for each image.
        images: Image files in base64.
        control: Has marked the text.

    Returns:
        The model's tokens, without the tokens that a tokenizer adds before and after a text, and the media.

    Raises:
        ValueError: If the text has another number of places, or an image cannot be processed.
    """
    processor = load()
    token = str(processor.image_token)
    if (places := text.count(token)) != len(images):
        raise ValueError(
            f"tools returned {len(images)} images in a turn, and the chat template writes {token!r} {places} times for "
            "them; use a template that writes it for parts {'type': 'image'} of tool messages, such as "
            "episodes.chat_template='qwen3' (Qwen)."
        )
    media = {"image": [b64decode(image) for image in images], "video": []}
    return _encode(processor, text, media, {"add_special_tokens": False, **options}, control, 0, "a tool's result")


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
