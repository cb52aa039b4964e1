"""Text files in other encodings than plain UTF-8."""

import pytest

from pl_grouprl.data.rows import read_source


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_latin_1_is_refused_by_file_name(tmp_path, name):
    file = tmp_path / name
    file.write_bytes('{"prompt": "caf\u00e9"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"{name}: not UTF-8") as caught:
        read_source(str(file), "train")
    assert type(caught.value) is ValueError


@pytest.mark.parametrize(
    ("name", "text"), [("rows.jsonl", '{"prompt": "\u00e9"}'), ("rows.json", '[{"prompt": "\u00e9"}]')]
)
def test_a_byte_order_mark_is_skipped(tmp_path, name, text):
    file = tmp_path / name
    file.write_bytes(text.encode("utf-8-sig"))
    (row,) = read_source(str(file), "train")
    assert row.values == {"prompt": "\u00e9"}
