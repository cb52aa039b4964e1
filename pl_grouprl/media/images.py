"""Reads images and videos in the formats of data sets: PIL images, paths, dictionaries with bytes or a path."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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
    if not isinstance(image, (str, Path, bytes)):
        raise ValueError(
            f"an image of type {type(image).__name__} is not a PIL image, a path, or a dictionary with bytes or a path"
        )
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
