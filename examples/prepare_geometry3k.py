r"""Write Geometry3K as parquet files in verl's format, for `configs/grpo_qwen2.5_vl_geometry3k.yaml`.

    python examples/prepare_geometry3k.py --output data/geometry3k                   # downloads from the hub
    python examples/prepare_geometry3k.py --output data/geometry3k --input folder    # train.parquet and test.parquet

The input has the columns `images` (a list of images as bytes), `problem` (with an `<image>` tag for each) and `answer`.
Each output row has `data_source`, `prompt` (one message), `images`, `reward_model` with the number as `ground_truth`,
and `extra_info`. Rows whose answer is not a number (`4 \sqrt{3}`) are left out, because the matching reward,
`pl_grouprl.rewards.NumericAnswer`, compares numbers.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

DATA_SOURCE = "hiyouga/geometry3k"
INSTRUCTION = "Work it out step by step. Then write the final number on a line of its own, after ####."
SPLITS = ("train", "test")


def convert_rows(rows: Iterable[dict[str, Any]], split: str, instruction: str = INSTRUCTION) -> list[dict[str, Any]]:
    """Convert rows of Geometry3K to verl's format.

    Args:
        rows: Dictionaries with `images`, `problem` and `answer`.
        split: Recorded in `extra_info`.
        instruction: Appended to each problem; empty for none.

    Raises:
        ValueError: If a row lacks a column; names the row.
    """
    converted = (_convert_row(row, split, index, instruction) for index, row in enumerate(rows))
    return [row for row in converted if row is not None]


def read_rows(source: Path | None, split: str) -> list[dict[str, Any]]:
    """Read a split from `{source}/{split}.parquet`, or, without a folder, from the hub."""
    from pyarrow import parquet

    if source is None:
        from huggingface_hub import hf_hub_download

        file = hf_hub_download(DATA_SOURCE, f"data/{split}-00000-of-00001.parquet", repo_type="dataset")
        return parquet.read_table(file).to_pylist()
    return parquet.read_table(source / f"{split}.parquet").to_pylist()


def write_rows(rows: list[dict[str, Any]], file: Path) -> None:
    """Write rows as a parquet file atomically, so no reader sees half of it."""
    import pyarrow
    from pyarrow import parquet

    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    parquet.write_table(pyarrow.Table.from_pylist(rows), unfinished)
    unfinished.replace(file)


def main(arguments: list[str] | None = None) -> None:
    """Convert both splits."""
    parser = argparse.ArgumentParser(description="Write Geometry3K as parquet files in verl's format.")
    parser.add_argument("--output", type=Path, default=Path("data/geometry3k"), help="folder of the parquet files")
    parser.add_argument("--input", type=Path, help="folder with train.parquet and test.parquet; by default the hub")
    options = parser.parse_args(arguments)
    files = {split: options.output / f"{split}.parquet" for split in SPLITS}
    for file in files.values():
        if file.exists():
            raise SystemExit(f"--output: {file} exists and is left untouched; move it away, or pass another folder.")
    for split, file in files.items():
        read = read_rows(options.input, split)
        rows = convert_rows(read, split)
        if not rows:
            raise SystemExit(f"{split}: none of {len(read)} rows has a number as answer; nothing is written.")
        write_rows(rows, file)
        print(f"{file}: {len(rows)} of {len(read)} rows, those with a number as answer")


def _convert_row(row: dict[str, Any], split: str, index: int, instruction: str) -> dict[str, Any] | None:
    missing = {"images", "problem", "answer"} - row.keys()
    if missing:
        raise ValueError(f"{split}, row {index}: no column {sorted(missing)}; the row has {sorted(row)}.")
    answer = row["answer"].strip().replace(",", "")
    try:
        finite = Decimal(answer).is_finite()
    except InvalidOperation:
        return None
    if not finite:
        return None
    content = f"{row['problem']}\n\n{instruction}" if instruction else row["problem"]
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": content}],
        "images": row["images"],
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index},
    }


if __name__ == "__main__":
    main()
