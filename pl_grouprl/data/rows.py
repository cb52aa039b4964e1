"""Reads prompt sources (files, objects that create rows, or rows in memory) into rows, and hashes rows."""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from pl_grouprl.utilities.describe import array_facts, field_values, ordered
from pl_grouprl.utilities.text import shorten


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
        where: Its origin for error messages, such as `data/train.jsonl, line 17` (lines are counted from 1),
            `data/train.parquet, row 16` or `train, row 17` (rows are counted from 0).
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
    """
    paths = [source] if isinstance(source, (str, Path)) else source
    if isinstance(paths, (list, tuple)) and paths and all(isinstance(path, (str, Path)) for path in paths):
        rows, files = [], []
        for pattern in paths:
            path = Path(pattern).expanduser()
            names = [path] if path.is_file() else sorted(map(Path, glob.glob(str(path), recursive=True)))
            found = [name for name in names if name.is_file()]
            if not found:
                raise FileNotFoundError(
                    f"PromptDataModule(`{split}`): no file matches {str(pattern)!r}; pass the path (or a pattern with "
                    f"*) of a .jsonl, .json or .parquet file, absolute or relative to {Path.cwd()}."
                )
            files += found
        for file in files:
            readers = {".parquet": _read_parquet, ".jsonl": _read_json, ".json": _read_json}
            if file.suffix not in readers:
                raise ValueError(f"{file}: unknown file type {file.suffix!r}; use .jsonl, .json or .parquet.")
            found_rows = readers[file.suffix](file)
            if not found_rows:
                rank_zero_warn(f"{file} has no rows.")
            rows += found_rows
        origin = ", ".join(map(str, files))
    else:
        if isinstance(source, PromptSource):
            source = source.rows(split)
        rows = [SourceRow(f"{split}, row {index}", source[index]) for index in range(len(source))]
        origin = type(source).__name__
    if not rows:
        raise ValueError(f"PromptDataModule(`{split}`): {origin} has no rows; pass a data set with at least one.")
    for where, values in rows:
        if not isinstance(values, Mapping):
            raise ValueError(
                f'{where}: a row is an object with columns, not {type(values).__name__}; write {{"prompt": ..., ...}}.'
            )
        for name, value in values.items():
            try:
                json.dumps([name, value], ensure_ascii=False, skipkeys=True, default=lambda other: None).encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"{where}: column {name!r} has the code point U+{ord(error.object[error.start]):04X}, half of a "
                    "surrogate pair, which is not a character and cannot be encoded; correct the row or the program "
                    "that wrote it."
                ) from error
            except (ValueError, RecursionError):
                pass  # `digest_rows` names rows that are nested too deeply
    return rows


def _read_parquet(file: Path) -> list[SourceRow]:
    """Read one row group at a time, so errors can name it. Verifies page checksums if present."""
    from pyarrow import parquet

    with open(file, "rb"):  # a plain OSError if it cannot be opened
        pass
    where = str(file)
    rows: list[Any] = []
    try:
        opened = parquet.ParquetFile(file, page_checksum_verification=True)
        if repeated := _repeated(opened.schema_arrow.names):
            raise ValueError(f"several columns have the names {repeated}")
        for group in range(opened.num_row_groups):
            size = opened.metadata.row_group(group).num_rows
            where = f"{file}, row group {group} (rows {len(rows)} to {len(rows) + size - 1})"
            rows += opened.read_row_group(group, use_threads=False).to_pylist()
        if len(rows) != opened.metadata.num_rows:
            raise ValueError(f"it has {len(rows)} rows, and its footer says {opened.metadata.num_rows}")
    except Exception as error:  # damaged bytes raise almost anything, even out of memory because of damaged sizes
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        raise ValueError(f"{where}: damaged ({reason}); write the file again.") from error
    return [SourceRow(f"{file}, row {index}", values) for index, values in enumerate(rows)]


def _read_json(file: Path) -> list[SourceRow]:
    """Read JSON lines, or a single JSON array (only in a `.json` file)."""
    try:
        text = file.read_text(encoding="utf-8-sig")  # a byte order mark is skipped
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{file}: not UTF-8 in line {line} ({error}); save the file in that encoding.") from error
    is_array = file.suffix == ".json" and text.lstrip().startswith("[")
    # Split at line feeds only: str.splitlines would also split at separators that JSON strings may contain.
    lines = [] if is_array else [(f"{file}, line {number}", line) for number, line in enumerate(text.split("\n"), 1)]
    parts = [(str(file), text)] if is_array else [(where, line) for where, line in lines if line.strip()]

    def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            raise ValueError(f"duplicate names {_repeated(name for name, _ in pairs)} in {shorten(values)}")
        return values

    decoder = json.JSONDecoder(object_pairs_hook=without_repetition)
    values: list[Any] = []
    for where, written in parts:
        try:
            values.append(decoder.decode(written))
        except (ValueError, RecursionError) as error:  # also a number with too many digits, or nested too deeply
            raise ValueError(f"{where}: not usable JSON ({error}); correct or remove it.") from error
    if is_array:
        return [SourceRow(f"{file}, row {index}", row) for index, row in enumerate(values[0])]
    return [SourceRow(where, row) for (where, _), row in zip(parts, values, strict=True)]


def _repeated(names: Iterable[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


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
