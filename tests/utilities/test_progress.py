"""What a run says while it works: phases that take long, and lines in place of a bar."""

import io
import os
import re
import sys
import threading

import pytest

from pl_grouprl.utilities.progress import PROGRESS, PhaseDisplay, Progress, ProgressLines, shows_bars, tick


class Clock:
    """A display of a process's progress, with a clock that the test moves."""

    def __init__(self):
        self.time, self.lines, self.progress = 100.0, [], Progress()
        self.display = PhaseDisplay(self.lines.append, progress=self.progress, now=lambda: self.time)

    def enter(self, phase, seconds=0):
        self.progress.enter(phase)
        self.progress.since = self.time
        for _ in range(seconds):
            self.time += 1.0
            self.display.check()


def test_a_phase_is_named_after_two_seconds_and_every_half_minute():
    clock = Clock()
    for phase in ("start", "warm start"):
        clock.enter(phase, 100)
    clock.enter("update", 1)
    assert clock.lines == []
    clock.enter("update", 62)
    assert clock.lines == [f"Updating the policy: {seconds} s" for seconds in (2, 32, 62)]


def test_a_phase_that_has_been_named_is_named_again_only_if_it_takes_half_a_minute():
    clock = Clock()
    for _ in range(3):
        clock.enter("rollout", 10)
        clock.enter("reward", 1)
    assert clock.lines == ["Sampling rollouts: 2 s"]
    clock.enter("rollout", 31)
    assert clock.lines[1:] == ["Sampling rollouts: 30 s"]


def test_sampling_shows_its_tokens():
    clock = Clock()
    clock.enter("rollout")
    clock.progress.tokens += 4096
    clock.enter("rollout", 2)
    assert clock.lines == ["Sampling rollouts: 4,096 tokens, 2 s"]
    assert clock.progress.tokens == 4096
    clock.enter("update")
    assert clock.progress.tokens == 0
    clock.progress.tokens += 7  # sampled ahead, on another thread
    clock.enter("update", 2)
    assert clock.lines[1:] == ["Updating the policy: 2 s"]


def test_a_phase_within_another_ends_with_its_context():
    progress = Progress()
    progress.enter("training batch")
    with progress.during("Exporting the policy"):
        assert progress.phase == "Exporting the policy"
    assert progress.phase == "training batch"


def test_the_thread_ends():
    refreshed = threading.Event()
    display = PhaseDisplay(print, refreshed.set)
    display.start()
    assert refreshed.wait(60)
    for _ in range(2):
        display.stop()
    assert "phase display" not in {thread.name for thread in threading.enumerate()}


def test_the_count_and_the_tokens_of_a_tick():
    count, tokens = PROGRESS.count, PROGRESS.tokens
    tick(3)
    assert (PROGRESS.count, PROGRESS.tokens) == (count + 1, tokens + 3)


# Lines.


def printed(capsys):
    """Without durations."""
    return [re.sub(r"\d+:\d\d:\d\d", "TIME", line) for line in capsys.readouterr().out.splitlines()]


def test_a_line_at_the_start_at_every_tenth_and_at_the_end(capsys):
    lines = ProgressLines("Warm start", 20)
    for step in range(20):
        lines.update(step + 1, {"loss": 0.5, "v_num": "3"})
    expected = [f"Warm start: {done}/20, TIME elapsed, TIME left, loss 0.500" for done in range(2, 20, 2)]
    assert printed(capsys) == ["Warm start: 0/20", *expected, "Warm start: 20/20, TIME elapsed, loss 0.500"]


@pytest.mark.parametrize(
    ("total", "first", "last", "shown"),
    [(3, 0, 3, [0, 1, 2, 3]), (100, 37, 55, [37, 40, 50]), (float("inf"), 0, 1000, [0]), (0, 0, 0, [0])],
    ids=["fewer than tenths", "resumed", "without an end", "without steps"],
)
def test_which_steps_have_a_line(capsys, total, first, last, shown):
    lines = ProgressLines("Epoch 1", total, done=first)
    for step in range(first, last):
        lines.update(step + 1)
    assert [line.split(",")[0] for line in printed(capsys)] == [f"Epoch 1: {done}/{total}" for done in shown]


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
