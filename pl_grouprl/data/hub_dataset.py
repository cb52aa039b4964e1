"""Reads a data set of the Hugging Face hub, or a local folder with the same layout."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pl_grouprl.data.hub_columns import PromptTemplates, compile_pattern, last_match
from pl_grouprl.data.hub_loading import BlockRows, HubLoader
from pl_grouprl.utilities.arguments import checked_arguments
from pl_grouprl.utilities.optional import DATASETS_AVAILABLE, require

DEFAULT_SPLITS = {"train": "train", "val": "validation", "test": "test"}


@checked_arguments
class HubDataset:
    """A data set on the hub, or a local folder with the same layout, read by the library `datasets`.

    The same object may be `train`, `val` and `test` of `PromptDataModule`. The data is downloaded once and then read
    from the cache; with `HF_HUB_OFFLINE=1` the network is never used. There is no streaming, because runs resume at an
    exact row.

    For each row, columns are renamed first (`columns`), then answers are extracted (`extract`), then the prompt is
    written (`messages`). Images and videos stay encoded until their prompt is sampled.

    Args:
        path: Name on the hub, such as `openai/gsm8k`, or path of a folder of .parquet, .jsonl or .csv files (the README
            of the folder may declare configurations and splits).
        name: Configuration of the data set, such as `main`.
        split: The data set's split for each of `train`, `val` and `test`, possibly a slice such as `test[:200]` or
            `train[5%:]`. A string applies to all three. By default, and where a mapping omits one, `train`,
            `validation` and `test`.
        columns: Our name of a column -> the name in the data set, for example `{prompt: question}`.
        keep_other_columns: Keep columns that are not in `columns`, under their original names.
        extract: Column -> a regular expression. Its last match, or that match's first group if it has groups, replaces
            the value, for example `{answer: '#### (.+)'}`.
        messages: Templates of the messages of the prompt, with columns in braces, for example
            `[{role: user, content: "{question} Think first."}]`. Double all other braces. None: the column `prompt`
            is the prompt.
        data_source: Name in validation metrics, passed to rewards with verl's signature. None: the row's column
            `data_source`, or else `path` (its last component, for a folder).
        revision: Branch, tag or commit on the hub.
        data_dir: Read only this folder of the data set.
        data_files: Read only these files of the data set, by split or as one list.
        cache_dir: Folder of the prepared data; by default that of `datasets`.

    Raises:
        ModuleNotFoundError: If `datasets` is not installed.
        ValueError: If an option is malformed.
    """

    def __init__(
        self,
        path: str,
        name: str | None = None,
        split: str | dict[str, str] | None = None,
        *,
        columns: dict[str, str] | None = None,
        keep_other_columns: bool = True,
        extract: dict[str, str] | None = None,
        messages: list[dict[str, str]] | None = None,
        data_source: str | None = None,
        revision: str | None = None,
        data_dir: str | None = None,
        data_files: str | list[str] | dict[str, str | list[str]] | None = None,
        cache_dir: str | None = None,
    ) -> None:
        require(DATASETS_AVAILABLE, "HubDataset", "datasets")
        self.path, self.name = path, name
        self.splits = _read_splits(split)
        self.columns = dict(columns or {})
        self.keep_other_columns = keep_other_columns
        self.extract = {column: compile_pattern(column, pattern) for column, pattern in (extract or {}).items()}
        self.messages = messages
        self._templates = None if messages is None else PromptTemplates(messages)
        self.data_source = data_source
        self.options = {"revision": revision, "data_dir": data_dir, "data_files": data_files, "cache_dir": cache_dir}

    def __repr__(self) -> str:
        return f"HubDataset({', '.join(map(repr, filter(None, (self.path, self.name))))})"

    def rows(self, split: str) -> Sequence[dict[str, Any]]:
        """Return the rows of `train`, `val` or `test`, which are read when indexed, a block at a time.

        Raises:
            ValueError: If the data set, its configuration, split or a column is not found, or a file is damaged.
        """
        data = HubLoader(self.path, self.name, self.options, repr(self)).load(split, self.splits[split])
        names = self._column_names(data.column_names, split)
        return BlockRows(data, names, self.convert, f"{self}, split {self.splits[split]!r}")

    def convert(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        """Extract answers and add `prompt` and `data_source`; return the row.

        Args:
            row: The renamed columns; changed in place.
            where: Data set, split and number of the row, for errors.

        Raises:
            ValueError: If `extract` finds no match, or a column of the prompt is null or does not fit its template.
        """
        for column, pattern in self.extract.items():
            row[column] = last_match(pattern, row[column], f"{where}: column {column!r}")
        if self._templates is not None:
            row["prompt"] = self._templates.fill_in(row, where)
        if self.data_source is not None or row.get("data_source") is None:
            row["data_source"] = self.data_source or self._default_data_source()
        return row

    def _column_names(self, present: Sequence[str], split: str) -> dict[str, str]:
        """The columns to read: our name -> the name in the data set.

        Raises:
            ValueError: If an option names a column that does not exist.
        """
        renamed = set(self.columns.values())
        others = [name for name in present if name not in renamed] if self.keep_other_columns else []
        names = {name: name for name in others} | self.columns
        self._check_columns("columns", self.columns.values(), present, split)
        self._check_columns("extract", self.extract, names, split)
        if self._templates is not None:
            self._check_columns("messages", self._templates.columns, names, split)
        return names

    def _check_columns(self, option: str, wanted: Iterable[str], present: Collection[str], split: str) -> None:
        missing = [name for name in wanted if name not in present]
        if missing:
            raise ValueError(
                f"{self}: {option} has the column {missing[0]!r}, and the split {self.splits[split]!r} has "
                f"{sorted(present)}; name one of them."
            )

    def _default_data_source(self) -> str:
        folder = Path(self.path)
        return folder.resolve().name if folder.is_dir() else self.path


def _read_splits(split: str | Mapping[str, str] | None) -> dict[str, str]:
    """The split of the data set that each of `train`, `val` and `test` reads."""
    if isinstance(split, str):
        return dict.fromkeys(DEFAULT_SPLITS, split)
    unknown = sorted((split or {}).keys() - DEFAULT_SPLITS.keys())
    if unknown:
        raise ValueError(
            f"HubDataset.split has {unknown[0]!r}; it maps {', '.join(DEFAULT_SPLITS)} to splits of the data set, such "
            "as {'val': 'test[:200]'}."
        )
    return DEFAULT_SPLITS | dict(split or {})
