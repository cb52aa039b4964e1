"""Loads a split with the library `datasets`, and reads its rows a block at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only

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
