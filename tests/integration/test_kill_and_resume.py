"""kill -9 at 100 random moments, in saves, rollouts, rewards and updates: all resumed runs end bit-identical."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kill_and_resume.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "algorithm", "runs"), [("single", "group_ppo", 50), ("ddp", "group_ppo", 25), ("fsdp2", "grpo", 25)]
)
def test_killed_runs_end_as_the_undisturbed_one(strategy, algorithm, runs, record_property):
    options = ["--strategy", strategy, "--algorithm", algorithm, "--runs", str(runs)]
    done = subprocess.run([sys.executable, str(SCRIPT), *options], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"{runs} of {runs} runs end bit-identical\n")
    *_, killed, equal = done.stdout.splitlines()
    record_property("figure", f"{strategy}, {algorithm}: {killed}; {equal}")
