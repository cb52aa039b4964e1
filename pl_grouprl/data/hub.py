"""Reads a data set of the Hugging Face hub, or a local folder with the same layout."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from pl_grouprl.utilities.optional import DATASETS_AVAILABLE, require
from pl_grouprl.utilities.text import shorten

BLOCK = 1000
"""Number of rows read at a time."""

DEFAULT_SPLITS = {"train": "train", "val": "validation", "test": "test"}


@dataclass(eq=False, repr=False)
class HubDataset:
    """A data set on the hub, or a local folder with the same layout, read by the library `datasets`.

    The same object may be `train`, `val` and `test` of `PromptDataModule`. The data is downloaded once and then read
    from the cache; with `HF_HUB_OFFLINE=1` the network is never used. There is no streaming, because runs resume at an
    exact row.

    For each row, columns are renamed first (`columns`), then answers are extracted (`extract`), then the prompt is
    written (`messages`). Images and videos stay encoded until their prompt is sampled.

    Attributes:
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
            `[{role: user, content: "{question} Think first."}]`. Double all other braces. By default, the column
            `prompt` is the prompt.
        data_source: Name in validation metrics, passed to rewards with verl's signature. Defaults to the row's column
            `data_source`, or else to `path` (its last component, for a folder).
        revision: Branch, tag or commit on the hub.
        data_dir: Read only this folder of the data set.
        data_files: Read only these files of the data set, by split or as one list.
        cache_dir: Folder of the prepared data; defaults to the cache of `datasets`.

    Raises:
        ModuleNotFoundError: If `datasets` is not installed.
        ValueError: If an option is malformed.
    """

    path: str
    name: str | None = None
    split: str | dict[str, str] | None = None
    _: KW_ONLY
    columns: dict[str, str] | None = None
    keep_other_columns: bool = True
    extract: dict[str, str] | None = None
    messages: list[dict[str, str]] | None = None
    data_source: str | None = None
    revision: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, str | list[str]] | None = None
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        require(DATASETS_AVAILABLE, "HubDataset", "datasets")
        splits = dict.fromkeys(DEFAULT_SPLITS, self.split) if isinstance(self.split, str) else dict(self.split or {})
        if unknown := sorted(splits.keys() - DEFAULT_SPLITS.keys()):
            ours = ", ".join(DEFAULT_SPLITS)
            raise ValueError(f"HubDataset.split has {unknown[0]!r}; it maps {ours} to splits of the data set.")
        self._splits = DEFAULT_SPLITS | splits
        self._patterns = {column: re.compile(pattern) for column, pattern in (self.extract or {}).items()}
        fields = [f for turn in self.messages or () for _, f, _, _ in string.Formatter().parse(turn["content"])]
        self._prompt_columns = sorted({field for field in fields if field is not None})

    def __repr__(self) -> str:
        return f"HubDataset({', '.join(map(repr, filter(None, (self.path, self.name))))})"

    def rows(self, split: str) -> Sequence[dict[str, Any]]:
        """Return the rows of `train`, `val` or `test`, which are read when indexed, a block at a time.

        Downloads and prepares the data set unless it is cached.

        Raises:
            ValueError: If an option names a column that does not exist.
            Exception: Errors of `datasets`, such as a configuration or split that it does not find, or a damaged file.
        """
        from datasets import load_dataset_builder

        given = {name: getattr(self, name) for name in ("revision", "data_dir", "data_files", "cache_dir")}
        options = {name: value for name, value in given.items() if value is not None}
        builder = load_dataset_builder(self.path, self.name, **options)
        builder.download_and_prepare()
        data: Any = builder.as_dataset(split=self._splits[split])
        present, renamed = data.column_names, self.columns or {}
        others = [name for name in present if name not in renamed.values()] if self.keep_other_columns else []
        names = {name: name for name in others} | renamed
        for option, wanted, known in (
            ("columns", renamed.values(), present),
            ("extract", self._patterns, names),
            ("messages", self._prompt_columns, names),
        ):
            if missing := [name for name in wanted if name not in known]:
                raise ValueError(f"{self}: {option} has the column {missing[0]!r}; name one of {sorted(known)}.")
        return BlockRows(data, names, self, f"{self}, split {self._splits[split]!r}")

    def convert(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        """Extract answers and add `prompt` and `data_source`; return the row.

        Args:
            row: The renamed columns; changed in place.
            where: Data set, split and number of the row, for errors.

        Raises:
            ValueError: If `extract` finds no match, or a column of the prompt is null or does not fit its template.
        """
        for column, pattern in self._patterns.items():
            value = row[column]
            matches = list(pattern.finditer(value)) if isinstance(value, str) else []
            found = matches[-1].group(1 if pattern.groups else 0) if matches else None
            if found is None:
                problem = f"is {shorten(value)}, which extract does not match with {pattern.pattern!r}"
                raise ValueError(f"{where}: column {column!r} {problem}; correct the pattern or the row.")
            row[column] = found.strip()
        if missing := [name for name in self._prompt_columns if row[name] is None]:
            raise ValueError(f"{where}: column {missing[0]!r} is null, and messages need it; remove the row.")
        if self.messages is not None:
            try:
                prompt = [{"role": turn["role"], "content": turn["content"].format_map(row)} for turn in self.messages]
            except (ValueError, TypeError, KeyError) as error:  # {number:.2f} may not fit the value
                raise ValueError(
                    f"{where}: messages cannot be filled in ({error}); correct them or the row."
                ) from error
            row["prompt"] = prompt
        if self.data_source is not None or row.get("data_source") is None:
            folder = Path(self.path)
            row["data_source"] = self.data_source or (folder.resolve().name if folder.is_dir() else self.path)
        return row


class BlockRows(Sequence[dict[str, Any]]):
    """The rows of one split. Indexing a row reads its block; the last block is cached.

    Args:
        data: The split, a `datasets.Dataset`.
        names: The columns to read: our name -> the name in the data set.
        source: Completes the rows.
        where: Data set and split, for errors.
    """

    def __init__(self, data: Any, names: Mapping[str, str], source: HubDataset, where: str) -> None:
        self._table = data.with_format("arrow")
        self._names = dict(names)
        from datasets import Features

        def encoded(feature: Any) -> Any:  # media stay bytes or paths
            if isinstance(feature, list):
                return [encoded(inner) for inner in feature]
            if not isinstance(feature, dict):
                return feature
            inner = {name: encoded(value) for name, value in feature.items()}
            is_media = inner.get("_type") in ("Audio", "Image", "Nifti", "Pdf", "Video")
            return inner | {"decode": False} if is_media else inner

        features = Features({ours: data.features[theirs] for ours, theirs in names.items()})
        self._features = Features.from_dict(encoded(features.to_dict()))
        self._source, self._where = source, where
        self._length = len(data)
        self._block_start = -1
        self._block: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._length:
            raise IndexError(f"{self._where} has no row {index}; it has {self._length}.")
        start = index // BLOCK * BLOCK
        if start != self._block_start:
            table = self._table[start : start + BLOCK].select(list(self._names.values()))
            self._block = table.rename_columns(list(self._names)).to_pylist()
            self._block_start = start
        row = self._features.decode_example(dict(self._block[index - start]))
        return self._source.convert(row, f"{self._where}, row {index}")
