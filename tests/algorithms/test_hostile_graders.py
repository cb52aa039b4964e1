"""GRPO goes on with graders that hang, blow up memory, fork, print, exit, signal or raise: time-limited and counted."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from helpers.hostile_graders import ATTACKS, FAILS, Hostile
from helpers.watched_processes import runs, until, zombies
from lightning.pytorch import Callback

from pl_grouprl.rewards.calls import Failure, PendingRewards

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux")

QUICK = {
    "hang", "take_all_memory", "fork_and_return_twice", "leave_a_child", "flood", "leave_at_once", "raise_no_exception",
    "leave_an_alarm", "kill_itself", "signal_in_a_thread", "change_everything",
}  # fmt: skip


class Failures(Callback):
    """Counts the rollouts without a reward of each step."""

    def __init__(self):
        self.counts = []

    def on_train_batch_end(self, trainer, module, *args):
        self.counts.append(module.last_rollouts.metrics["rewards/Hostile/invalid"])


@pytest.fixture
def seen(monkeypatch):
    """What went wrong in each call that failed."""
    whats, join = [], PendingRewards._join

    def join_and_see(self, reward, calls, outcomes):
        whats.extend(outcome.what for outcome in outcomes if isinstance(outcome, Failure))
        return join(self, reward, calls, outcomes)

    monkeypatch.setattr(PendingRewards, "_join", join_and_see)
    return whats


@pytest.mark.parametrize(
    ("names", "timeout"),
    [pytest.param(QUICK, 8.0, id="quick"), pytest.param(set(ATTACKS), 60.0, id="all", marks=pytest.mark.slow)],
)
def test_the_run_continues(names, timeout, make_module, make_data, make_trainer, parameters, tmp_path, capfd, seen):
    reward, failures = Hostile(tmp_path, sorted(names)), Failures()
    module = make_module(
        rewards=reward,
        reward_calls={"workers": 2, "timeout": timeout, "memory_limit_mb": 1024, "retries": 0, "max_failed_share": 1.0},
    )
    before = parameters(module) if module.policy is not None else None
    process = os.getcwd(), dict(os.environ), signal.getsignal(signal.SIGALRM)
    make_trainer(max_steps=3, callbacks=[failures], enable_checkpointing=False).fit(module, make_data())
    assert len(failures.counts) == 3
    assert sum(failures.counts) == len(names & {attack.__name__ for attack in FAILS}), "\n".join(sorted(seen))
    assert failures.counts[-1] == 0
    assert all(torch.isfinite(own).all() for own in module.policy.parameters())
    assert before is None or not all(map(torch.equal, before, parameters(module)))
    assert (os.getcwd(), dict(os.environ), signal.getsignal(signal.SIGALRM)) == process
    workers = [int((tmp_path / name).read_text()) for name in names]
    until(lambda: not any(map(runs, workers)) and zombies() == [])
