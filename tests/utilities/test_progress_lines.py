import io
import os
import re
import sys

import pytest

from pl_grouprl.utilities.progress import ProgressLines, shows_bars


def printed(capsys):
    """Without durations."""
    return [re.sub(r"\d+:\d\d:\d\d", "TIME", line) for line in capsys.readouterr().out.splitlines()]


def test_a_line_at_the_start_at_every_tenth_and_at_the_end(capsys):
    lines = ProgressLines("Warm start", 20)
    for step in range(20):
        lines.update(step + 1, {"loss": 0.5, "v_num": "3"})
    expected = [f"Warm start: {done}/20, TIME elapsed, TIME left, loss 0.500" for done in range(2, 20, 2)]
    assert printed(capsys) == ["Warm start: 0/20", *expected, "Warm start: 20/20, TIME elapsed, loss 0.500"]


def test_fewer_steps_than_tenths_print_one_line_each(capsys):
    lines = ProgressLines("Epoch 1", 3)
    for step in range(3):
        lines.update(step + 1)
    assert [line.split(",")[0] for line in printed(capsys)] == [f"Epoch 1: {done}/3" for done in range(4)]


def test_a_resumed_loop_starts_where_it_is(capsys):
    lines = ProgressLines("Epoch 1", 100, done=37)
    for step in range(37, 55):
        lines.update(step + 1)
    assert [line.split(",")[0] for line in printed(capsys)] == [f"Epoch 1: {done}/100" for done in (37, 40, 50)]


def test_a_loop_without_an_end_and_one_without_steps_print_their_start(capsys):
    ProgressLines("Epoch 1", float("inf")).update(1000)
    ProgressLines("Warm start", 0)
    assert printed(capsys) == ["Epoch 1: 0/inf", "Warm start: 0/0"]


def test_a_file_shows_no_bars_and_a_terminal_does(capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert not shows_bars()
    assert shows_bars(force_terminal=True)


class FullDisk(io.StringIO):
    def flush(self):
        raise OSError(28, "No space left on device")


def test_output_that_cannot_be_written_is_one_warning(monkeypatch):
    monkeypatch.setattr(sys, "stdout", FullDisk())
    with pytest.warns(UserWarning, match="cannot write to standard output: .*No space left") as caught:
        ProgressLines("Epoch 1", 2).update(1)
    assert len(caught) == 1


def test_characters_that_the_output_cannot_encode_are_escaped(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "cp1252"))
    ProgressLines("Epoch 1", 1).update(1, {"val/漢": 0.5})
    assert written.getvalue().endswith(b"val/\\u6f22 0.500" + os.linesep.encode())
