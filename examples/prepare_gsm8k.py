"""Write GSM8K as parquet files in verl's format, for `configs/grpo_qwen3_gsm8k.yaml`.

    python examples/prepare_gsm8k.py --output data/gsm8k                       # downloads from the Hugging Face hub
    python examples/prepare_gsm8k.py --output data/gsm8k --input folder        # reads train.jsonl and test.jsonl there

The input has the columns `question` and `answer`, where the answer ends in `#### 42`. Each output row has
`data_source`, `prompt` (one message), `ability`, `reward_model` with the number as `ground_truth`, and `extra_info`.
The matching reward is `pl_grouprl.rewards.NumericAnswer`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = "Work it out step by step. Then write the final number on a line of its own, after ####."
SPLITS = ("train", "test")


def convert_rows(rows: Iterable[dict[str, Any]], split: str, instruction: str = INSTRUCTION) -> list[dict[str, Any]]:
    """Convert rows of GSM8K to verl's format.

    Args:
        rows: Dictionaries with `question` and `answer`.
        split: Recorded in `extra_info`.
        instruction: Appended to each question; empty for none.

    Raises:
        ValueError: If a row lacks a column or its answer has no `#### number`. The row is named.
    """
    return [_convert_row(row, split, index, instruction) for index, row in enumerate(rows)]


def read_rows(source: Path | None, split: str) -> list[dict[str, Any]]:
    """Read a split from `{source}/{split}.jsonl` or `.parquet`, or, without a folder, from the hub."""
    from pyarrow import parquet

    if source is None:
        from huggingface_hub import hf_hub_download

        file = hf_hub_download(DATA_SOURCE, f"main/{split}-00000-of-00001.parquet", repo_type="dataset")
        return parquet.read_table(file).to_pylist()
    if (source / f"{split}.parquet").is_file():
        return parquet.read_table(source / f"{split}.parquet").to_pylist()
    lines = (source / f"{split}.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line.strip()]


def write_rows(rows: list[dict[str, Any]], file: Path) -> None:
    """Write rows as a parquet file, atomically, so no reader sees half of it."""
    import pyarrow
    from pyarrow import parquet

    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    parquet.write_table(pyarrow.Table.from_pylist(rows), unfinished)
    unfinished.replace(file)


def main(arguments: list[str] | None = None) -> None:
    """Convert both splits."""
    parser = argparse.ArgumentParser(description="Write GSM8K as parquet files in verl's format.")
    parser.add_argument("--output", type=Path, default=Path("data/gsm8k"), help="folder of the parquet files")
    parser.add_argument("--input", type=Path, help="folder with train.jsonl and test.jsonl; by default the hub")
    options = parser.parse_args(arguments)
    files = {split: options.output / f"{split}.parquet" for split in SPLITS}
    for file in files.values():
        if file.exists():
            raise SystemExit(f"--output: {file} exists and is left untouched; move it away, or pass another folder.")
    for split, file in files.items():
        rows = convert_rows(read_rows(options.input, split), split)
        write_rows(rows, file)
        print(f"{file}: {len(rows)} rows")


def _convert_row(row: dict[str, Any], split: str, index: int, instruction: str) -> dict[str, Any]:
    missing = {"question", "answer"} - row.keys()
    if missing:
        raise ValueError(f"{split}, row {index}: no column {sorted(missing)}; the row has {sorted(row)}.")
    _, mark, number = row["answer"].rpartition("####")
    number = number.strip().replace(",", "")
    if not mark or not number:
        raise ValueError(f"{split}, row {index}: the answer does not end in '#### number'; correct or remove the row.")
    content = f"{row['question']}\n\n{instruction}" if instruction else row["question"]
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": number},
        "extra_info": {"split": split, "index": index, "question": row["question"], "answer": row["answer"]},
    }


if __name__ == "__main__":
    main()
