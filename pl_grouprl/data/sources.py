"""Reads prompt sources (files, objects that create rows, or rows in memory) into a list of rows."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from pl_grouprl.data.files import read_file
from pl_grouprl.data.row_checks import check_values


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
