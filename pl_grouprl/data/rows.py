"""Reads prompt sources (files, objects that create rows, or rows in memory) into rows."""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from pl_grouprl.data.row_checks import check_values
from pl_grouprl.utilities.describe import array_facts, field_values, ordered

# Hashes the data; equal rows give the same hash in every process.

_TEXTS = ("datetime", "decimal", "enum", "fractions", "pathlib", "uuid")
"""Modules whose classes, and subclasses of them, are known by their text."""


def digest_rows(rows: Sequence[SourceRow]) -> str:
    """Hash all columns of all rows, in order, but not the files and lines they came from.

    Nothing is decoded: images and videos are hashed by their bytes or paths, an image that was opened and not read by
    its name, size and mode. Arrays, tensors, sets, dataclasses and images in memory are hashed by their contents, and
    any other object by its class.

    Returns:
        SHA-256 in hexadecimal.

    Raises:
        ValueError: If a row is nested too deeply. Names it.
    """
    digest = hashlib.sha256()
    for where, values in rows:
        try:
            text = _encode(values)
        except (RecursionError, ValueError) as error:
            raise ValueError(f"{where}: nested too deeply, or within itself ({error}); correct the row.") from error
        digest.update(text.encode("ascii"))
        digest.update(b"\n")
    return digest.hexdigest()


def plain(value: Any) -> Any:
    """Convert a value to lists, dictionaries, numbers and strings."""
    return json.loads(_encode(value))


def _encode(value: Any) -> str:
    try:
        return _ENCODER.encode(value)
    except TypeError:  # keys that are not strings, or cannot be sorted
        return _ENCODER.encode(_with_text_names(value))


def _with_text_names(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {f"{type(name).__name__} {ordered(name)}": _with_text_names(inner) for name, inner in value.items()}
    return [_with_text_names(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _describe(value: Any) -> Any:
    """Replace an object that JSON cannot encode."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return ["bytes", hashlib.sha256(value).hexdigest()]
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, (set, frozenset)):
        return [kind, sorted(map(_encode, value))]
    if isinstance(value, (complex, range)):
        return [kind, repr(value)]
    if isinstance(value, re.Pattern):
        return [kind, value.pattern, value.flags]
    if is_dataclass(value) and not isinstance(value, type):
        return [kind, field_values(value)]
    if (array := array_facts(value)) is not None:
        return [kind, *array]
    if any(base.__module__ in _TEXTS for base in type(value).__mro__):
        return [kind, str(value)]
    parts = (getattr(value, name, "") for name in ("size", "mode", "filename"))
    in_memory = hasattr(value, "tobytes") and getattr(value, "fp", None) is None  # a PIL image
    pixels = [hashlib.sha256(value.tobytes()).hexdigest()] if in_memory else []
    return [kind, *(str(part) for part in parts if not callable(part)), *pixels]


_ENCODER = json.JSONEncoder(sort_keys=True, default=_describe)


# Reads files of rows: JSON lines, JSON arrays and parquet. Errors name the file and the position in it.

_SPACE = re.compile(r"[ \t\n\r]*")


def read_file(file: Path) -> list[tuple[str, Any]]:
    """Read all rows of a file.

    Returns:
        Origin and value of each row. An origin is `data/train.jsonl, line 17` (lines are counted from 1) or
        `data/train.parquet, row 16` (rows of other files are counted from 0).

    Raises:
        ValueError: If the file type is unknown, or its content is damaged.
        OSError: If it cannot be opened.
    """
    readers = {".parquet": _read_parquet, ".jsonl": _read_json, ".json": _read_json}
    if file.suffix not in readers:
        raise ValueError(f"{file}: unknown file type {file.suffix!r}; use .jsonl, .json or .parquet.")
    rows = list(readers[file.suffix](file))
    if not rows:
        rank_zero_warn(f"{file} has no rows.")
    return rows


def _read_parquet(file: Path) -> Iterator[tuple[str, Any]]:
    """Read one row group at a time, so errors can name it. Verifies page checksums if present."""
    from pyarrow import parquet

    with open(file, "rb"):  # a plain OSError if it cannot be opened
        pass
    try:
        opened = parquet.ParquetFile(file, page_checksum_verification=True)
        names, expected = opened.schema_arrow.names, opened.metadata.num_rows
        sizes = [opened.metadata.row_group(group).num_rows for group in range(opened.num_row_groups)]
    except Exception as error:  # a damaged footer raises almost anything
        raise ValueError(f"{file}: not a readable parquet file ({_first_line(error)}); write it again.") from error
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"{file}: has several columns with the names {repeated}; rename them.")
    start = 0
    for group, size in enumerate(sizes):
        try:
            rows = opened.read_row_group(group, use_threads=False).to_pylist()
        except Exception as error:  # decompression, decoding, UTF-8, or out of memory because of damaged sizes
            raise ValueError(
                f"{file}, row group {group} (rows {start} to {start + size - 1}): damaged ({_first_line(error)}); "
                "write the file again."
            ) from error
        yield from ((f"{file}, row {start + index}", values) for index, values in enumerate(rows))
        start += len(rows)
    if start != expected:
        raise ValueError(f"{file}: damaged: it has {start} rows, and its footer says {expected}; write it again.")


def _read_json(file: Path) -> Iterator[tuple[str, Any]]:
    """Read JSON lines, or a single JSON array (only in a `.json` file)."""
    try:
        text = file.read_text(encoding="utf-8-sig")  # a byte order mark is skipped
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{file}: not UTF-8 in line {line} ({error}); save the file in that encoding.") from error
    if file.suffix == ".json" and text.lstrip().startswith("["):
        yield from _array_rows(text, file)
        return
    # Split at line feeds only: str.splitlines would also split at separators that JSON strings may contain.
    for number, written in enumerate(text.split("\n"), start=1):
        if written.strip():
            yield f"{file}, line {number}", _parse(written, 0, f"{file}, line {number}", ends=True)[0]


def _array_rows(text: str, file: Path) -> Iterator[tuple[str, Any]]:
    """Parse the elements of a JSON array one by one, so errors can name them."""
    place, mark, index = _skip_space(text, text.index("[") + 1), ",", 0
    if text[place : place + 1] == "]":
        place, mark = place + 1, "]"
    while mark == ",":
        where = f"{file}, row {index}"
        value, place = _parse(text, place, where)
        yield where, value
        place = _skip_space(text, place)
        mark, place = text[place : place + 1], _skip_space(text, place + 1)
        index += 1
    if mark != "]":
        raise ValueError(
            f"{file}: not valid JSON ({mark or 'the end'!r} after row {index - 1}, instead of ',' or ']'); correct "
            "the file."
        )
    if text[place:].strip():
        raise ValueError(f"{file}: not valid JSON (something follows the closing ']'); correct the file.")


def _parse(text: str, start: int, where: str, *, ends: bool = False) -> tuple[Any, int]:
    """Parse the value at a position; returns it and where it ends. With `ends`, nothing may follow it."""
    try:
        return (_DECODER.decode(text), len(text)) if ends else _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if ends else f"line {error.lineno} column {error.colno}"
        raise ValueError(f"{where}: not valid JSON ({error.msg} at {place}); correct or remove it.") from error
    except (ValueError, RecursionError) as error:  # a duplicate name, a number with too many digits, nested too deeply
        raise ValueError(f"{where}: not usable JSON ({error}); correct or remove it.") from error


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate names {sorted({name for name in names if names.count(name) > 1})}")
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=_without_repetition)


def _skip_space(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    return match.end() if match else place


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


# Reads prompt sources (files, objects that create rows, or rows in memory) into a list of rows.


@runtime_checkable
class PromptSource(Protocol):
    """An object that provides rows, for example a built-in task."""

    def rows(self, split: str) -> Any:
        """Return the rows of a split (`train`, `val` or `test`): a sequence of dictionaries.

        (Annotated as `Any`, so a class in a YAML file may annotate its `rows` freely.)
        """


Source = str | list[str] | PromptSource | Sequence[dict[str, Any]]
"""A path or glob, or several; a PromptSource; or rows: a list, a `datasets.Dataset`, anything sized and indexable."""


class SourceRow(NamedTuple):
    """A row and its origin.

    Attributes:
        where: Its origin for error messages, such as `data/train.jsonl, line 17` or `train, row 17` (counted from 0).
        values: The columns.
    """

    where: str
    values: dict[str, Any]


def read_source(source: Any, split: str) -> list[SourceRow]:
    """Read all rows of a source.

    Args:
        source: See `Source`.
        split: `train`, `val` or `test`; names the rows in error messages and is passed to a PromptSource.

    Raises:
        FileNotFoundError: If a path or pattern matches no file.
        ValueError: If a file's type is unknown, a file is damaged, a row is malformed, or there are no rows.
        OSError: If a file cannot be opened.
        TypeError: If the source is none of the above.
    """
    if _is_paths(source):
        files = _find_files([source] if isinstance(source, (str, Path)) else list(source), split)
        rows = [SourceRow(where, values) for file in files for where, values in read_file(file)]
        origin = ", ".join(str(file) for file in files)
    else:
        if isinstance(source, PromptSource):
            source = source.rows(split)
        rows = [SourceRow(f"{split}, row {index}", values) for index, values in enumerate(_iterate(source, split))]
        origin = type(source).__name__
    if not rows:
        raise ValueError(f"PromptDataModule(`{split}`): {origin} has no rows; pass a data set with at least one.")
    for where, values in rows:
        check_values(values, where)
    return rows


def _is_paths(source: Any) -> bool:
    if isinstance(source, (str, Path)):
        return True
    return isinstance(source, (list, tuple)) and bool(source) and all(isinstance(item, (str, Path)) for item in source)


def _iterate(source: Any, split: str) -> Iterator[Any]:
    if isinstance(source, Mapping):
        raise TypeError(
            f"PromptDataModule(`{split}`) is a mapping with the keys {list(source)[:10]}; pass one of its splits."
        )
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise TypeError(
            f"PromptDataModule(`{split}`) is of type {type(source).__name__}; pass a path to .jsonl, .json or .parquet "
            "files, a list of dictionaries, a sized data set, or an object with rows(split)."
        )
    return (source[index] for index in range(len(source)))


def _find_files(patterns: list[str | Path], split: str) -> list[Path]:
    files: list[Path] = []
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_file():
            files.append(path)
            continue
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
        if path.is_dir():
            raise FileNotFoundError(
                f"PromptDataModule(`{split}`): {str(pattern)!r} is a folder; name the files in it, for example "
                f"{str(Path(pattern) / '*.parquet')!r}."
            )
        if not found:
            raise FileNotFoundError(
                f"PromptDataModule(`{split}`): no file matches {str(pattern)!r}; pass the path (or a pattern with *) "
                f"of a .jsonl, .json or .parquet file, absolute or relative to {Path.cwd()}."
            )
        files.extend(found)
    return files
