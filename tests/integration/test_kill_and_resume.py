"""kill -9 at random moments, in saves, rollouts, episodes, rewards and updates: resumed runs end bit-identical."""

from pathlib import Path

import pytest
from helpers.scripts import run_script

SCRIPT = Path(__file__).with_name("kill_and_resume.py")


def run(strategy, algorithm, runs, *flags):
    """All runs end bit-identical; where they were killed."""
    options = ["--strategy", strategy, "--algorithm", algorithm, "--runs", runs, *flags]
    done = run_script(SCRIPT, *options, timeout=3600)
    assert done.stdout.endswith(f"{runs} of {runs} runs end bit-identical\n")
    return done.stdout.splitlines()[-2:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "algorithm", "runs", "flags"),
    [
        ("single", "group_ppo", 50, []),
        ("ddp", "group_ppo", 25, []),
        ("fsdp2", "grpo", 25, []),
        ("single", "group_ppo", 21, ["--tools"]),
        ("single", "group_ppo", 14, ["--tools", "--ahead"]),
        ("ddp", "group_ppo", 14, ["--tools"]),
        ("fsdp2", "grpo", 14, ["--tools"]),
    ],
)
def test_killed_runs_end_as_the_undisturbed_one(strategy, algorithm, runs, flags, record_property):
    killed, equal = run(strategy, algorithm, runs, *flags)
    record_property("figure", f"{' '.join([strategy, *flags])}, {algorithm}: {killed}; {equal}")


@pytest.mark.slow
def test_runs_killed_within_an_episode_end_as_the_undisturbed_one():
    killed, _ = run("single", "grpo", 2, "--tools", "--epochs", 1, "--seed", 10)
    assert killed == "killed: 1 by tool, 1 by turn"
