"""Two ranks give a sampler their weights together, lose it together, and none waits for one that has failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.scripts import run_script
from helpers.sweeps import sweep

SCRIPT = Path(__file__).with_name("weight_sync_ranks.py")

COPIED = {"adapter": "merged"}
LORA = {"lora": True}
LOST = {"faults": {"1": [["update", 2, "lost"]], "0": [["generate", 4, "lost at once"]]}}
CASES = {
    "ddp": {
        "own weights": {},
        "copied": COPIED,
        "lost": COPIED | LOST,
        "failed": COPIED | {"faults": {"1": [["generate", 2, "failed"]], "0": [["generate", 2, "lost"]]}},
    },
    "ddp, more": {
        "own weights": {},
        "copied": COPIED,
        "resumed": COPIED | {"checkpoint": "copied/step=3.ckpt"},
        "written to by one": COPIED | {"writes": 1},
    },
    "fsdp2": {"own weights": LORA, "separate": LORA | {"adapter": "separate"}},
    "fsdp2, more": {
        # In the middle of the weights, which the other rank gathers to their end.
        "failed": LORA | COPIED | {"faults": {"1": [["update", 2, "failed"]]}},
        "own weights": LORA,
        "copied": LORA | COPIED,
        "resumed": LORA | COPIED | {"checkpoint": "copied/step=3.ckpt"},
        "lost": LORA | {"adapter": "separate"} | LOST,
    },
}


@pytest.fixture(scope="module", params=sweep(CASES, quick=["ddp", "fsdp2"]))
def runs(request, tmp_path_factory):
    """What each rank wrote of each case. A run that hangs ends the script with an error."""
    folder = tmp_path_factory.mktemp(request.param)
    cases = {name: dict(case) for name, case in CASES[request.param].items()}
    for case in cases.values():
        if "checkpoint" in case:
            case["checkpoint"] = str(folder / case["checkpoint"])
    run_script(SCRIPT, request.param.split(",")[0], folder, json.dumps(cases), cwd=folder, timeout=650)
    return {name: [torch.load(folder / name / f"rank{rank}.pt") for rank in (0, 1)] for name in cases}


def same_weights(left, right):
    return all(
        one["weights"].keys() == other["weights"].keys()
        and all(torch.equal(one["weights"][name], other["weights"][name]) for name in one["weights"])
        for one, other in zip(left, right, strict=True)
    )


def versions(run):
    return [[version for version, *_ in rank["updates"]] for rank in run]


def test_a_copy_gives_the_same_trajectory(runs):
    for name in ("copied", "separate", "lost", "written to by one"):
        if name in runs:
            assert [rank["tokens"] for rank in runs[name]] == [rank["tokens"] for rank in runs["own weights"]], name
            assert same_weights(runs[name], runs["own weights"]), name
            assert [rank["closes"] for rank in runs[name]] == [1, 1]


def test_weights_are_sent_once_per_step_with_a_rollout(runs):
    # Six steps, two to each batch of rollouts; validation behind the fourth shares what the last rollouts need.
    for name in (name for name in ("copied", "separate") if name in runs):
        assert versions(runs[name]) == [[1, 2, 3]] * 2
        # Also a rank without prompts samples: the last batch in validation has one.
        assert [rank["calls"]["generate"] for rank in runs[name]] == [5, 5]
        assert [[step["sync/count"] for step in rank["steps"]] for rank in runs[name]] == [[1.0] * 6] * 2


def test_resume_is_exact(runs):
    if "resumed" not in runs:
        return
    assert [rank["tokens"] for rank in runs["resumed"]] == [rank["tokens"][3:] for rank in runs["copied"]]
    assert same_weights(runs["resumed"], runs["copied"])
    assert versions(runs["resumed"]) == [[1]] * 2


def test_all_ranks_sample_again_what_one_has_lost(runs):
    if "lost" not in runs:
        return
    # Rank 1 loses the second sync, rank 0 the fourth sampling, of rank 1's other calls nothing is lost.
    assert versions(runs["lost"]) == [[1, 2, 3, 4, 5], [1, 3, 4, 5]]
    assert [[step["sync/restarts"] for step in rank["steps"]] for rank in runs["lost"]] == [[0, 0, 1, 1, 1, 1]] * 2


def test_what_one_rank_raises_ends_the_run_on_all(runs):
    if "failed" not in runs:
        return
    errors = [rank["error"] for rank in runs["failed"]]
    assert errors[1] == "OSError: no space left"
    assert errors[0].startswith("RuntimeError: rank 1 failed with OSError: no space left")
    assert [rank["closes"] for rank in runs["failed"]] == [1, 1]


def test_a_write_on_one_rank_is_noticed_by_all(runs):
    if "written to by one" in runs:
        assert versions(runs["written to by one"]) == [[1, 2, 3, 4]] * 2
