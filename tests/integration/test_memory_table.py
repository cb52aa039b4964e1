"""The memory table of docs/memory.md is the tool's of today."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import memory_table

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_has_the_table_of_today():
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    assert memory_table.with_table(page) == page


def test_a_page_that_differs_is_told(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{memory_table.BEGIN}| old |\n{memory_table.END}behind\n")
    assert memory_table.main(["--check", str(page)]) == 1
    assert memory_table.main(["--write", str(page)]) == 0
    assert memory_table.main(["--check", str(page)]) == 0
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "behind")
    with pytest.raises(ValueError, match="has no lines '<!-- memory table -->"):
        memory_table.with_table("nothing")


def test_cells():
    room = memory_table.Room(53_999, 58)
    assert room.cells() == ("53k", "58")
    assert replace(room, tokens=1000).cells() == replace(room, sequences=0).cells() == ("-", "-")
