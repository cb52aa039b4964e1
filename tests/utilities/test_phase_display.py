import threading

from pl_grouprl.utilities.progress import PROGRESS, PhaseDisplay, Progress, tick


class Clock:
    """A display of a process's progress, with a clock that the test moves."""

    def __init__(self):
        self.time = 100.0
        self.lines = []
        self.progress = Progress()
        self.display = PhaseDisplay(self.lines.append, progress=self.progress, now=lambda: self.time)

    def enter(self, phase):
        self.progress.enter(phase)
        self.progress.since = self.time

    def wait(self, seconds):
        for _ in range(seconds):
            self.time += 1.0
            self.display.check()


def test_a_phase_is_named_after_two_seconds_and_every_half_minute():
    clock = Clock()
    clock.enter("update")
    clock.wait(1)
    assert clock.lines == []
    clock.wait(61)
    assert clock.lines == [f"Updating the policy: {seconds} s" for seconds in (2, 32, 62)]


def test_a_phase_that_has_been_named_is_named_again_only_if_it_takes_half_a_minute():
    clock = Clock()
    for _ in range(3):
        clock.enter("rollout")
        clock.wait(10)
        clock.enter("reward")
        clock.wait(1)
    assert clock.lines == ["Sampling rollouts: 2 s"]
    clock.enter("rollout")
    clock.wait(31)
    assert clock.lines[1:] == ["Sampling rollouts: 30 s"]


def test_sampling_shows_its_tokens():
    clock = Clock()
    clock.enter("rollout")
    clock.progress.tokens += 4096
    clock.wait(2)
    assert clock.lines == ["Sampling rollouts: 4,096 tokens, 2 s"]
    clock.progress.enter("rollout")
    assert clock.progress.tokens == 4096
    clock.enter("update")
    assert clock.progress.tokens == 0
    clock.progress.tokens += 7  # sampled ahead, on another thread
    clock.wait(2)
    assert clock.lines[1:] == ["Updating the policy: 2 s"]


def test_before_the_first_phase_and_during_a_warm_start_nothing_is_shown():
    clock = Clock()
    for phase in ("start", "warm start"):
        clock.enter(phase)
        clock.wait(100)
    assert clock.lines == []


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
    display.stop()
    display.stop()
    assert "phase display" not in {thread.name for thread in threading.enumerate()}


def test_the_count_and_the_tokens_of_a_tick():
    count, tokens = PROGRESS.count, PROGRESS.tokens
    tick(3)
    assert (PROGRESS.count, PROGRESS.tokens) == (count + 1, tokens + 3)
