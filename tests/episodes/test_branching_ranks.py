"""Two ranks sample the trees that one samples, and train the same, whatever their numbers of rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.scripts import run_script

SCRIPT = Path(__file__).with_name("branching_ranks.py")
EVERY_N = {"branching": {"points": "every_n", "width": 2, "depth": 4, "every_n": 1}}
TURN = {"branching": {"points": "turn", "width": 2, "depth": 2, "budget": 90}}
QUICK = {
    "every_n, single": EVERY_N | {"strategy": "single"},
    "every_n, copied": EVERY_N | {"strategy": "ddp", "copied": True},
}
MORE = {
    "every_n, single": EVERY_N | {"strategy": "single"},
    "every_n, ddp": EVERY_N | {"strategy": "ddp"},
    "turn, single": TURN | {"strategy": "single"},
    "turn, ddp": TURN | {"strategy": "ddp"},
    "turn, copied": TURN | {"strategy": "ddp", "copied": True},
}


@pytest.fixture(scope="module", params=[QUICK, pytest.param(MORE, marks=pytest.mark.slow)], ids=["quick", "more"])
def runs(request, tmp_path_factory):
    """What each rank wrote of each case."""
    folder = tmp_path_factory.mktemp("runs")
    run_script(SCRIPT, folder, json.dumps(request.param), cwd=folder, timeout=600)
    return {name: [torch.load(path) for path in sorted((folder / name).glob("rank?.pt"))] for name in request.param}


def test_two_ranks_sample_and_train_as_one(runs):
    names = [name for name in runs if "single" not in name]
    assert names
    for name in names:
        (one,) = runs[f"{name.split(',')[0]}, single"]
        assert one["error"] is None
        for rank in runs[name]:
            assert rank["error"] is None
            for theirs, own in zip(rank["groups"], one["groups"], strict=True):
                assert leaves(theirs) == leaves(own)
            for kind in ("gradients", "weights"):
                for step, (theirs, own) in enumerate(zip(rank[kind], one[kind], strict=True)):
                    for key, value in own.items():
                        assert torch.allclose(theirs[key], value, rtol=1e-6, atol=1e-9), (name, kind, step, key)
        assert any(value.abs().max() > 1e-3 for step in one["gradients"] for value in step.values())


def leaves(groups):
    names = ("token_ids", "branch_points", "branch_path", "finish_reason", "reward", "loss_mask")
    return {place: [[rollout[name] for name in names] for rollout in own] for place, own in groups.items()}


def test_the_ranks_have_different_numbers_of_rounds_and_rollouts(runs):
    (one,) = runs["every_n, single"]
    most = [
        [
            max(len(r["branch_points"]) for place in groups if place % 2 == rank for r in groups[place])
            for rank in (0, 1)
        ]
        for groups in one["groups"]
    ]
    assert any(first != second for first, second in most)
    assert len({len(own) for groups in one["groups"] for own in groups.values()}) > 3
