"""Reading files and rows, with errors that name the row."""

import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from pl_grouprl.data.rows import read_source

ROWS = [{"prompt": "a", "answer": "1"}, {"prompt": "b\u2028c", "answer": "2"}]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def values(rows):
    return [row.values for row in rows]


def test_json_lines(tmp_path):
    rows = read_source(write_lines(tmp_path / "x.jsonl", ROWS), "train")
    assert values(rows) == ROWS
    assert [row.where for row in rows] == [f"{tmp_path / 'x.jsonl'}, line {line}" for line in (1, 2)]


def test_json_array_json_file_of_lines_and_parquet(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps(ROWS, indent=1))
    assert values(read_source(str(tmp_path / "x.json"), "train")) == ROWS
    assert values(read_source(write_lines(tmp_path / "y.json", ROWS), "train")) == ROWS
    row = {"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"style": "rule", "ground_truth": "2"}}
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "x.parquet")
    (read,) = read_source(tmp_path / "x.parquet", "train")
    assert read == (f"{tmp_path / 'x.parquet'}, row 0", row)


def test_patterns_and_lists(tmp_path):
    for name in "ba":
        write_lines(tmp_path / f"{name}.jsonl", [{"prompt": name}])
    write_lines(tmp_path / "z.json", [{"prompt": "z"}])
    assert values(read_source(str(tmp_path / "*.jsonl"), "train")) == [{"prompt": "a"}, {"prompt": "b"}]
    listed = [str(tmp_path / "z.json"), str(tmp_path / "[ab].jsonl")]
    assert [row["prompt"] for row in values(read_source(listed, "train"))] == ["z", "a", "b"]


def test_rows_in_memory_and_source_objects():
    class Dataset:  # what a datasets.Dataset looks like
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return ROWS[index]

    class Source:
        def rows(self, split):
            return [{"prompt": split}]

    assert values(read_source(Dataset(), "train")) == ROWS
    assert read_source(ROWS, "val")[1].where == "val, row 1"
    assert values(read_source(Source(), "test")) == [{"prompt": "test"}]


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("empty.jsonl", "\n", ValueError, r"PromptDataModule\(`val`\): .* has no rows"),
        (".", None, FileNotFoundError, "no file matches"),
        ("nothing.jsonl", None, FileNotFoundError, r"`val`\): no file matches '.*nothing\.jsonl'"),
        ("x.csv", "a", ValueError, r"unknown file type '\.csv'"),
        ("x.parquet", "not parquet", ValueError, r"x\.parquet: damaged"),
    ],
)
def test_what_cannot_be_read(tmp_path, name, content, error, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(error, match=message):
        read_source(str(tmp_path / name), "val")
