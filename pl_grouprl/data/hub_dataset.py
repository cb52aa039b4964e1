"""Rows of a data set of the Hugging Face hub, or of a folder laid out like one."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from pl_grouprl.types import Messages
from pl_grouprl.utilities.arguments import checked_arguments
from pl_grouprl.utilities.optional import DATASETS_AVAILABLE, require
from pl_grouprl.utilities.text import shorten

DEFAULT_SPLITS = {"train": "train", "val": "validation", "test": "test"}

BLOCK = 1000
"""Number of rows read at once."""

_MEDIA = ("Audio", "Image", "Nifti", "Pdf", "Video")


@checked_arguments
class HubDataset:
    """A data set of the hub by its name, or a local folder laid out like one, read by the library `datasets`.

    One object may serve `train`, `val` and `test` of `PromptDataModule`. The data is downloaded once and then read from
    the cache; with `HF_HUB_OFFLINE=1` the network is never asked. There is no streaming: runs resume at an exact row.

    A row is made in this order: columns are renamed (`columns`), answers are extracted (`extract`), and the prompt is
    written (`messages`). Images and videos stay encoded until their prompt is sampled.

    Args:
        path: Name at the hub, such as `openai/gsm8k`, or path of a folder of .parquet, .jsonl or .csv files (the README
            of the folder may declare configurations and splits).
        name: Configuration of the data set, such as `main`.
        split: The split of the data set that each of `train`, `val` and `test` reads, with slices as in `test[:200]` or
            `train[5%:]`. A string is for all three. In a mapping, those left out read `train`, `validation` and `test`.
        columns: Our name of a column -> the name in the data set, for example `{prompt: question}`.
        keep_other_columns: Keep the columns that are not in `columns`, under their own names.
        extract: Column -> a regular expression; its last match, or the first group of that, replaces the value, for
            example `{answer: '#### (.+)'}`.
        messages: Templates of the messages of the prompt, with columns in braces, for example
            `[{role: user, content: "{question} Think first."}]`. Other braces are doubled. None: the column `prompt`
            is the prompt.
        data_source: Name in validation metrics, passed to rewards with verl's signature. By default the row's column
            `data_source`, or else `path` (of a folder, its last part).
        revision: Branch, tag or commit at the hub.
        data_dir: Folder inside the data set to read.
        data_files: Files inside the data set to read, by split or as one list.
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
        self.splits = _splits(split)
        self.columns = dict(columns or {})
        self.keep_other_columns = keep_other_columns
        self.extract = {column: _compile(column, pattern) for column, pattern in (extract or {}).items()}
        if messages == []:
            raise ValueError("HubDataset.messages is empty; write at least one, or leave it out.")
        self.messages = messages
        self._named_in_messages = _columns_of(messages or [])
        self.data_source = data_source
        self.options = {"revision": revision, "data_dir": data_dir, "data_files": data_files, "cache_dir": cache_dir}

    def __repr__(self) -> str:
        return f"HubDataset({', '.join(map(repr, filter(None, (self.path, self.name))))})"

    def rows(self, split: str) -> Sequence[dict[str, Any]]:
        """Return the rows of `train`, `val` or `test`. They are read when indexed, a block at a time.

        Raises:
            ValueError: If the data set, its configuration, split or a column is not found, or a file is damaged.
        """
        with _progress_on_rank_zero():
            data = self._load(split)
        names = self._column_names(data.column_names, split)
        return _Rows(self, data, names, f"{self}, split {self.splits[split]!r}")

    def _load(self, split: str) -> Any:
        from datasets import load_dataset_builder

        options = {name: value for name, value in self.options.items() if value is not None}
        with self._naming_remedy("check path, name, revision, data_dir and data_files"):
            builder = load_dataset_builder(self.path, self.name, **options)
        with self._naming_remedy("correct or remove the file, or choose others with data_files"):
            builder.download_and_prepare()
        known = sorted(builder.info.splits or {})
        remedy = f"the data set has the splits {known}: pass split={{{split!r}: ...}}, a slice such as 'test[:200]' too"
        with self._naming_remedy(remedy):
            return builder.as_dataset(split=self.splits[split])

    @contextmanager
    def _naming_remedy(self, remedy: str) -> Iterator[None]:
        """Turn any error of `datasets` into one that names the data set and a remedy."""
        try:
            yield
        except Exception as error:
            reason = error.__cause__ if type(error).__name__ == "DatasetGenerationError" else None
            text = " ".join(str(reason or error).split()).rstrip(".") or type(reason or error).__name__
            if isinstance(error, ConnectionError):
                remedy = (
                    f"there is no folder {self.path!r} in {Path.cwd()}, and the hub cannot be asked; load it once with "
                    "a network, or pass the path of a folder"
                )
            raise ValueError(f"{self}: {text}; {remedy}.") from error

    def _column_names(self, present: Sequence[str], split: str) -> dict[str, str]:
        """The columns of a row: our name -> the name in the data set.

        Raises:
            ValueError: If an option names a column that does not exist.
        """
        renamed = set(self.columns.values())
        others = [name for name in present if name not in renamed] if self.keep_other_columns else []
        names = {name: name for name in others} | self.columns
        self._check_columns("columns", self.columns.values(), present, split)
        self._check_columns("extract", self.extract, names, split)
        self._check_columns("messages", self._named_in_messages, names, split)
        return names

    def _check_columns(self, option: str, wanted: Any, present: Any, split: str) -> None:
        missing = [name for name in wanted if name not in present]
        if missing:
            raise ValueError(
                f"{self}: {option} has the column {missing[0]!r}, and the split {self.splits[split]!r} has "
                f"{sorted(present)}; name one of them."
            )

    def convert(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        """Extract answers, and add `prompt` and `data_source`; return the row.

        Args:
            row: The renamed columns; changed in place.
            where: Data set, split and number of the row, for errors.

        Raises:
            ValueError: If a value has no match, or is missing from the prompt.
        """
        for column, pattern in self.extract.items():
            row[column] = _last_match(pattern, row[column], f"{where}: column {column!r}")
        if self.messages is not None:
            missing = [name for name in sorted(self._named_in_messages) if row[name] is None]
            if missing:
                raise ValueError(f"{where}: column {missing[0]!r} is null, and messages need it; remove the row.")
            row["prompt"] = _format(self.messages, row, where)
        if self.data_source is not None or row.get("data_source") is None:
            row["data_source"] = self.data_source or self._default_data_source()
        return row

    def _default_data_source(self) -> str:
        folder = Path(self.path)
        return folder.resolve().name if folder.is_dir() else self.path


class _Rows(Sequence[dict[str, Any]]):
    """The rows of one split, read in blocks when they are indexed."""

    def __init__(self, source: HubDataset, data: Any, names: Mapping[str, str], where: str) -> None:
        self._source, self._where = source, where
        self._names = dict(names)
        self._table = data.with_format("arrow")
        self._features = _with_encoded_media({own: data.features[theirs] for own, theirs in names.items()})
        self._length = len(data)
        self._start, self._block = -1, []  # type: tuple[int, list[dict[str, Any]]]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._length:
            raise IndexError(f"{self._where} has no row {index}; it has {self._length}.")
        start = index // BLOCK * BLOCK
        if start != self._start:
            table = self._table[start : start + BLOCK].select(list(self._names.values()))
            self._start, self._block = start, table.rename_columns(list(self._names)).to_pylist()
        row = self._features.decode_example(dict(self._block[index - start]))
        return self._source.convert(row, f"{self._where}, row {index}")


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
    """Show no progress bars of downloads on other ranks."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from huggingface_hub import utils as hub

    if getattr(rank_zero_only, "rank", 0) == 0:
        yield
        return
    shown = (
        (are_progress_bars_disabled, disable_progress_bars, enable_progress_bars),
        (hub.are_progress_bars_disabled, hub.disable_progress_bars, hub.enable_progress_bars),
    )
    enable = [show for disabled, _, show in shown if not disabled()]
    for _, disable, _ in shown:
        disable()
    try:
        yield
    finally:
        for show in enable:
            show()


def _splits(split: str | Mapping[str, str] | None) -> dict[str, str]:
    if isinstance(split, str):
        return dict.fromkeys(DEFAULT_SPLITS, split)
    unknown = sorted((split or {}).keys() - DEFAULT_SPLITS.keys())
    if unknown:
        raise ValueError(
            f"HubDataset.split has {unknown[0]!r}; it maps {', '.join(DEFAULT_SPLITS)} to splits of the data set, such "
            "as {'val': 'test[:200]'}."
        )
    return DEFAULT_SPLITS | dict(split or {})


def _compile(column: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"HubDataset.extract has {pattern!r} for {column!r}, which is no regular expression ({error}); correct it."
        ) from error


def _last_match(pattern: re.Pattern[str], value: Any, what: str) -> str:
    matches = list(pattern.finditer(value)) if isinstance(value, str) else []
    found = matches[-1].group(1 if pattern.groups else 0) if matches else None
    if found is None:
        raise ValueError(
            f"{what} is {shorten(value)}, where extract finds no {pattern.pattern!r}; correct the pattern or the row."
        )
    return found.strip()


def _columns_of(messages: Sequence[Mapping[str, str]]) -> set[str]:
    """The columns that the templates of messages name.

    Raises:
        ValueError: If a message lacks role or content, or its braces do not name columns.
    """
    names: set[str] = set()
    for message in messages:
        if set(message) != {"role", "content"}:
            raise ValueError(f"HubDataset.messages has {shorten(message)}; each message has 'role' and 'content'.")
        try:
            fields = [field for _, field, _, _ in string.Formatter().parse(message["content"]) if field is not None]
        except ValueError as error:
            fields = [str(error)]
        wrong = [field for field in fields if not field.isidentifier()]
        if wrong:
            raise ValueError(
                f"HubDataset.messages has {shorten(message['content'])}, whose braces do not hold the name of a column "
                f"({wrong[0]!r}); write {{{{ and }}}} for braces as such."
            )
        names.update(fields)
    return names


def _format(messages: Sequence[Mapping[str, str]], row: Mapping[str, Any], where: str) -> Messages:
    try:
        return [{"role": own["role"], "content": own["content"].format_map(row)} for own in messages]
    except (ValueError, TypeError, KeyError) as error:  # a format such as {number:.2f} that does not fit the value
        raise ValueError(f"{where}: messages cannot be filled in ({error}); correct them or the row.") from error
