"""Reads a data set of the Hugging Face hub, or a local folder with the same layout."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from pl_grouprl.types import Messages
from pl_grouprl.utilities.optional import DATASETS_AVAILABLE, require
from pl_grouprl.utilities.options import checked_arguments
from pl_grouprl.utilities.text import shorten

# Derived columns of `HubDataset`: answers extracted by patterns, prompts filled into templates.
#
# Errors name the option of `HubDataset` to correct.


def compile_pattern(column: str, pattern: str) -> re.Pattern[str]:
    """Compile the pattern of a column in the option `extract`.

    Raises:
        ValueError: If it is not a regular expression.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"HubDataset.extract has {pattern!r} for {column!r}, not a regular expression ({error}); correct it."
        ) from error


def last_match(pattern: re.Pattern[str], value: Any, where: str) -> str:
    """The last match of a pattern in a value, or the first group of that match; stripped.

    Args:
        pattern: From `compile_pattern`.
        value: The value of a column; anything but a string has no match.
        where: Row and column, for the error.

    Raises:
        ValueError: If there is no match.
    """
    matches = list(pattern.finditer(value)) if isinstance(value, str) else []
    found = matches[-1].group(1 if pattern.groups else 0) if matches else None
    if found is None:
        raise ValueError(
            f"{where} is {shorten(value)}, which extract does not match with {pattern.pattern!r}; correct the "
            "pattern or the row."
        )
    return found.strip()


class PromptTemplates:
    """Writes prompts by the option `messages`.

    Args:
        messages: Templates of the messages, with column names in braces.

    Attributes:
        columns: Names of the columns that the templates use.

    Raises:
        ValueError: If there is no message, one lacks role or content, or its braces do not name columns.
    """

    def __init__(self, messages: Sequence[Mapping[str, str]]) -> None:
        if not messages:
            raise ValueError("HubDataset.messages is empty; pass at least one message, or leave it out.")
        self._messages = messages
        self.columns: set[str] = set()
        for message in messages:
            if set(message) != {"role", "content"}:
                raise ValueError(f"HubDataset.messages has {shorten(message)}; each message has 'role' and 'content'.")
            self.columns.update(_columns_in(message["content"]))

    def fill_in(self, row: Mapping[str, Any], where: str) -> Messages:
        """Write the prompt of a row.

        Args:
            row: The columns.
            where: The row's origin, for errors.

        Raises:
            ValueError: If one of the `columns` is null, or its value does not fit a template.
        """
        missing = [name for name in sorted(self.columns) if row[name] is None]
        if missing:
            raise ValueError(f"{where}: column {missing[0]!r} is null, and messages need it; remove the row.")
        try:
            return [{"role": turn["role"], "content": turn["content"].format_map(row)} for turn in self._messages]
        except (ValueError, TypeError, KeyError) as error:  # a format such as {number:.2f} that does not fit the value
            raise ValueError(f"{where}: messages cannot be filled in ({error}); correct them or the row.") from error


def _columns_in(template: str) -> list[str]:
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    except ValueError as error:
        fields = [str(error)]
    wrong = [field for field in fields if not field.isidentifier()]
    if wrong:
        raise ValueError(
            f"HubDataset.messages has {shorten(template)}, where braces do not contain the name of a column "
            f"({wrong[0]!r}); write {{{{ and }}}} for literal braces."
        )
    return fields


# Loads a split with the library `datasets`, and reads its rows a block at a time.

BLOCK = 1000
"""Number of rows read at a time."""

_MEDIA = ("Audio", "Image", "Nifti", "Pdf", "Video")


class HubLoader:
    """Loads splits of one data set. Errors of `datasets` become ValueErrors that name the data set and a remedy.

    Args:
        path: Hub name or folder.
        name: Configuration of the data set.
        options: Further arguments of `datasets.load_dataset_builder`; None values are left out.
        label: Name of the data set in errors.
    """

    def __init__(self, path: str, name: str | None, options: Mapping[str, Any], label: str) -> None:
        self._path, self._name = path, name
        self._options = {option: value for option, value in options.items() if value is not None}
        self._label = label

    def load(self, split: str, hub_split: str) -> Any:
        """Return a split as a `datasets.Dataset`. Downloads and prepares the data set unless it is cached.

        Args:
            split: Our name of the split, for errors.
            hub_split: The name in the data set, possibly with a slice.

        Raises:
            ValueError: If the data set, its configuration or split is not found, or a file is damaged.
        """
        from datasets import load_dataset_builder

        with _progress_on_rank_zero():
            with self._naming_remedy("check path, name, revision, data_dir and data_files"):
                builder = load_dataset_builder(self._path, self._name, **self._options)
            with self._naming_remedy("correct or remove the file, or choose others with data_files"):
                builder.download_and_prepare()
            known = sorted(builder.info.splits or {})
            with self._naming_remedy(
                f"the data set has the splits {known}: pass split={{{split!r}: ...}}, a slice such as 'test[:200]' too"
            ):
                return builder.as_dataset(split=hub_split)

    @contextmanager
    def _naming_remedy(self, remedy: str) -> Iterator[None]:
        """Turn errors of `datasets` into ValueErrors that end with a remedy."""
        try:
            yield
        except Exception as error:
            reason = error.__cause__ if type(error).__name__ == "DatasetGenerationError" else None
            text = " ".join(str(reason or error).split()).rstrip(".") or type(reason or error).__name__
            if isinstance(error, ConnectionError):
                remedy = (
                    f"there is no folder {self._path!r} in {Path.cwd()}, and the hub cannot be reached; load it once "
                    "while online, or pass the path of a folder"
                )
            raise ValueError(f"{self._label}: {text}; {remedy}.") from error


class BlockRows(Sequence[dict[str, Any]]):
    """The rows of one split. Indexing a row reads its block; the last block is cached.

    Args:
        data: The split, a `datasets.Dataset`.
        names: The columns to read: our name -> the name in the data set.
        convert: Completes a row in place and returns it; takes the row and its origin.
        where: Data set and split, for errors.
    """

    def __init__(
        self,
        data: Any,
        names: Mapping[str, str],
        convert: Callable[[dict[str, Any], str], dict[str, Any]],
        where: str,
    ) -> None:
        self._table = data.with_format("arrow")
        self._names = dict(names)
        self._features = _with_encoded_media({ours: data.features[theirs] for ours, theirs in names.items()})
        self._convert = convert
        self._where = where
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
            self._block_start, self._block = start, self._read_block(start)
        row = self._features.decode_example(dict(self._block[index - start]))
        return self._convert(row, f"{self._where}, row {index}")

    def _read_block(self, start: int) -> list[dict[str, Any]]:
        table = self._table[start : start + BLOCK].select(list(self._names.values()))
        rows: list[dict[str, Any]] = table.rename_columns(list(self._names)).to_pylist()
        return rows


def _with_encoded_media(features: Mapping[str, Any]) -> Any:
    """Features that decode JSON, and leave media as bytes or paths."""
    from datasets import Features

    def encoded(feature: Any) -> Any:
        if isinstance(feature, list):
            return [encoded(inner) for inner in feature]
        if not isinstance(feature, dict):
            return feature
        inner = {name: encoded(value) for name, value in feature.items()}
        return inner | {"decode": False} if inner.get("_type") in _MEDIA else inner

    return Features.from_dict(encoded(Features(features).to_dict()))


@contextmanager
def _progress_on_rank_zero() -> Iterator[None]:
    """Hide download progress bars on all ranks but 0."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from huggingface_hub import utils as hub

    if getattr(rank_zero_only, "rank", 0) == 0:
        yield
        return
    switches = (
        (are_progress_bars_disabled, disable_progress_bars, enable_progress_bars),
        (hub.are_progress_bars_disabled, hub.disable_progress_bars, hub.enable_progress_bars),
    )
    enable_again = [enable for are_disabled, _, enable in switches if not are_disabled()]
    for _, disable, _ in switches:
        disable()
    try:
        yield
    finally:
        for enable in enable_again:
            enable()


# Reads a data set of the Hugging Face hub, or a local folder with the same layout.

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
