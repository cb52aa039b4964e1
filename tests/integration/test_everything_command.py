"""The command behind `make test-all`: a line for each part, also after one that failed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import check_everything as command


@pytest.fixture
def made_up(monkeypatch):
    """Parts that run code; torch finds no GPU."""

    def make(**parts):
        own = [
            command.Part(name, (sys.executable, "-c", code), needs_gpu=name == "graphics")
            for name, code in parts.items()
        ]
        monkeypatch.setattr(command, "parts", lambda: own)
        monkeypatch.setattr(command, "has_gpu", lambda: False)

    return make


def test_parts_after_a_failed_one_run(tmp_path, made_up, capsys):
    made_up(first="print('gone'); raise SystemExit(3)", second="print('=== 5 passed, 1 skipped in 2.10s ===')")
    assert command.main(["--logs", str(tmp_path)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"first          FAILED with exit code 3, see {tmp_path / 'first.txt'}")
    assert (tmp_path / "first.txt").read_text() == "gone\n"
    assert second.split()[:2] == ["second", "passed"]
    assert second.endswith("5 passed, 1 skipped")


def test_what_needs_a_gpu_is_not_run_without_one_and_parts_are_picked_by_words(tmp_path, made_up, capsys):
    made_up(first="", graphics="raise SystemExit(3)", last="raise SystemExit(3)")
    assert command.main(["--logs", str(tmp_path), "--only", "graph"]) == 0
    assert "graphics       not run here: no GPU" in capsys.readouterr().out
    assert command.main(["--logs", str(tmp_path), "--only", "fir"]) == 0
    with pytest.raises(SystemExit):
        command.main(["--only", "third"])
    assert "--only third matches no part" in capsys.readouterr().err


def test_the_parts_name_files_and_targets_that_exist():
    targets = (command.ROOT / "Makefile").read_text()
    for part in command.parts():
        if part.command[0] == "make":
            assert f"\n{part.command[1]}:" in targets
        for argument in part.command:
            if argument.endswith((".py", ".md")):
                assert (command.ROOT / argument).is_file()
