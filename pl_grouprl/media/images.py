"""Images and videos as data sets hold them: PIL images, paths, and dictionaries with bytes or a path."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def as_list(value: Any) -> list[Any]:
    """The images or videos of a row: a list as it is, a single one as a list, None and nothing as an empty one."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def check_image(image: Any) -> None:
    """Read as much of an image as tells that it is one.

    Raises:
        ValueError: If it is none, or cannot be opened.
    """
    opened = _open(image)
    if opened is not image:
        with _naming(image), opened:
            opened.verify()


def read_image(image: Any) -> Any:
    """Decode an image, turned upright as its camera says, in RGB.

    Raises:
        ValueError: If it is none, or cannot be decoded.
    """
    from PIL import ImageOps

    with _naming(image):
        return ImageOps.exif_transpose(_open(image)).convert("RGB")


def check_video(video: Any) -> None:
    """See that a video's file is there, or that its frames are images.

    Raises:
        ValueError: If not.
    """
    video = _inside(video, "video")
    if _is_frames(video):
        for frame in video:
            check_image(frame)
    elif isinstance(video, str) and not _path(video).is_file():
        raise ValueError(f"there is no file {video!r}")
    elif not isinstance(video, str) and not hasattr(video, "shape"):
        raise ValueError(f"a video of type {type(video).__name__} is not a path, a list of frames or an array")


def read_video(video: Any) -> Any:
    """Decode the frames of a video that is given by frames; a file is left to the processor.

    Raises:
        ValueError: If a frame cannot be decoded.
    """
    video = _inside(video, "video")
    if _is_frames(video):
        return [read_image(frame) for frame in video]
    return str(_path(video)) if isinstance(video, str) else video


def _open(image: Any) -> Any:
    from PIL import Image

    image = _inside(image, "image")
    if isinstance(image, Image.Image):
        return image
    if not isinstance(image, (str, Path, bytes)):
        raise ValueError(
            f"an image of type {type(image).__name__} is not a PIL image, a path, or a dictionary with bytes or a path"
        )
    with _naming(image):
        return Image.open(io.BytesIO(image) if isinstance(image, bytes) else _path(image))


def _inside(value: Any, kind: str) -> Any:
    """What a dictionary holds: bytes before a path, which may be that of another machine."""
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
        raise ValueError(f"{text!r} is on another machine; download it and give its path")
    return Path(text.removeprefix("file://")).expanduser()


@contextmanager
def _naming(image: Any) -> Iterator[None]:
    """Turn what PIL raises about an image into one kind of error that names it."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:  # PIL's formats raise almost anything for broken files
        name = repr(str(image)) if isinstance(image, (str, Path)) else "the image"
        raise ValueError(f"{name} cannot be read: {error}") from error
