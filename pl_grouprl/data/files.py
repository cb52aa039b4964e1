"""Reads files of rows: JSON lines, JSON arrays and parquet. Errors name the file and the position in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

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
