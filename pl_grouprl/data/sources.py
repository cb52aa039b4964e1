"""Where prompts come from: files, objects that make rows, or rows in memory. Everything becomes a list of rows."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable


@runtime_checkable
class PromptSource(Protocol):
    """An object that provides rows, for example a built-in task."""

    def rows(self, split: str) -> Any:
        """Return the rows of a split (`train`, `val` or `test`): a sequence of dictionaries.

        (The annotation is `Any` so that a class in a YAML file may annotate its own `rows` as it likes.)
        """


Source = str | list[str] | PromptSource | Sequence[dict[str, Any]]
"""A path or glob, or several; a PromptSource; or rows: a list, a `datasets.Dataset`, anything sized and indexable."""


class SourceRow(NamedTuple):
    """A row and where it is from.

    Attributes:
        where: For error messages: `data/train.jsonl, line 17` or `train, row 17` (rows are counted from 0).
        values: The columns.
    """

    where: str
    values: dict[str, Any]


def read_source(source: Any, split: str) -> list[SourceRow]:
    """Read all rows of a source.

    Args:
        source: See `Source`.
        split: `train`, `val` or `test`; names the rows in error messages and is handed to a PromptSource.

    Raises:
        FileNotFoundError: If a path or pattern matches no file.
        ValueError: If a file's type is unknown, a row is malformed, or there is no row at all.
        TypeError: If the source is none of the above.
    """
    if _is_paths(source):
        files = _find_files([source] if isinstance(source, (str, Path)) else list(source), split)
        rows = [row for file in files for row in _read_file(file)]
        origin = ", ".join(str(file) for file in files)
    else:
        if isinstance(source, PromptSource):
            source = source.rows(split)
        rows = [SourceRow(f"{split}, row {index}", values) for index, values in enumerate(_iterate(source, split))]
        origin = type(source).__name__
    if not rows:
        raise ValueError(f"PromptDataModule(`{split}`): {origin} holds no rows; give a data set with at least one.")
    for where, values in rows:
        if not isinstance(values, Mapping):
            raise ValueError(
                f"{where}: a row must be an object with columns, not {type(values).__name__}; "
                'write {"prompt": ..., ...}.'
            )
    return rows


def _is_paths(source: Any) -> bool:
    if isinstance(source, (str, Path)):
        return True
    return isinstance(source, (list, tuple)) and bool(source) and all(isinstance(item, (str, Path)) for item in source)


def _iterate(source: Any, split: str) -> Iterator[Any]:
    if isinstance(source, Mapping):
        raise TypeError(
            f"PromptDataModule(`{split}`) is a mapping with the keys {list(source)[:10]}; pass one split of it."
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
        if not found:
            raise FileNotFoundError(
                f"PromptDataModule(`{split}`): no file matches {str(pattern)!r}; give the path (or a pattern with *) "
                f"of a .jsonl, .json or .parquet file, absolute or relative to {Path.cwd()}."
            )
        files.extend(found)
    return files


def _read_file(file: Path) -> list[SourceRow]:
    if file.suffix == ".parquet":
        return _read_parquet(file)
    if file.suffix in (".jsonl", ".json"):
        return _read_json(file)
    raise ValueError(f"{file}: unknown file type {file.suffix!r}; use .jsonl, .json or .parquet.")


def _read_parquet(file: Path) -> list[SourceRow]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(file)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{file}: not a readable parquet file ({error}); write it anew.") from error
    return [SourceRow(f"{file}, row {index}", values) for index, values in enumerate(table.to_pylist())]


def _read_json(file: Path) -> list[SourceRow]:
    """Read JSON lines, or a single JSON array (which only a `.json` file may hold)."""
    try:
        text = file.read_text(encoding="utf-8-sig")  # a byte order mark is skipped
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 ({error}); save the file in that encoding.") from error
    if file.suffix == ".json" and text.lstrip().startswith("["):
        return [SourceRow(f"{file}, row {index}", values) for index, values in enumerate(_parse(text, str(file)))]
    # Split at line feeds only: str.splitlines would also split at separators that JSON strings may contain.
    lines = ((number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip())
    wheres = ((f"{file}, line {number}", line) for number, line in lines)
    return [SourceRow(where, _parse(line, where)) for where, line in wheres]


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON ({error}); correct or remove it.") from error
