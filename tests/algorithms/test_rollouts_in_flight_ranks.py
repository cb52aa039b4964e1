"""Two ranks take as many groups each as they have prompts, get weights together, and end together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.scripts import run_script
from helpers.sweeps import sweep

SCRIPT = Path(__file__).with_name("rollouts_in_flight_ranks.py")
CASES = {"plain": "", "lost": "lost", "failed": "failed", "resumed": ""}


@pytest.fixture(scope="module", params=sweep(["ddp", "fsdp2"], quick=["fsdp2"]))
def runs(request, tmp_path_factory):
    """What each rank wrote of each case. A run that hangs ends the script with an error."""
    folder = tmp_path_factory.mktemp(request.param)
    run_script(SCRIPT, request.param, folder, json.dumps(CASES), cwd=folder, timeout=450)
    return {name: [torch.load(folder / name / f"rank{rank}.pt") for rank in (0, 1)] for name in CASES}


@pytest.mark.parametrize("name", ["plain", "lost"])
def test_every_prompt_is_trained_once(runs, name):
    ranks = runs[name]
    assert [rank["error"] for rank in ranks] == [None, None]
    trained = [tuple(prompt) for rank in ranks for step in rank["prompts"] for prompt in step]
    assert len(trained) == len(set(trained)) == 20
    for step in range(4):
        assert sum(len(rank["prompts"][step]) for rank in ranks) == 5
        ages = [step - v for rank in ranks for versions in rank["versions"][step] for v in versions]
        for rank in ranks:
            assert rank["steps"][step]["rollout/staleness/max"] == max(ages) <= 2
            assert rank["steps"][step]["rollout/staleness/mean"] == pytest.approx(sum(ages) / len(ages))


def test_what_one_rank_raises_ends_the_run_on_all(runs):
    errors = [rank["error"] for rank in runs["failed"]]
    assert errors[1] == "OSError: no space left"
    assert errors[0].startswith("RuntimeError: rank 1 failed with OSError: no space left")


def test_a_resumed_run_trains_what_was_queued(runs):
    before = [tuple(prompt) for rank in runs["plain"] for step in rank["prompts"][:2] for prompt in step]
    after = [tuple(prompt) for rank in runs["resumed"] for step in rank["prompts"] for prompt in step]
    assert len(after) == len(set(after)) == 10
    assert not set(before) & set(after)
