"""Two ranks play episodes as one does, whatever their numbers of turns, and lose a sampler or fail together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.scripts import run_script

SCRIPT = Path(__file__).with_name("episode_ranks.py")

GROUP_PPO = {"algorithm": "GROUP PPO"}
BRIEF = {"brief": True}
COPIED = {"copied": True, "strategy": "ddp"}
QUICK = {
    "GRPO": {},
    "GRPO, fsdp2": {"strategy": "fsdp2"},
    "copied": COPIED | BRIEF,
    "lost": COPIED | BRIEF | {"faults": {"1": [["generate", 2, "lost"]]}},
}
MORE = {
    "GROUP PPO": GROUP_PPO,
    "GROUP PPO, brief": GROUP_PPO | BRIEF,
    "GRPO, brief": BRIEF,
    "GROUP PPO, fsdp2": GROUP_PPO | {"strategy": "fsdp2"},
    "copied": COPIED,
    "lost": COPIED | {"faults": {"0": [["generate", 3, "lost at once"]], "1": [["generate", 6, "lost"]]}},
    "unfit": COPIED | {"unfit": 6},  # in the second batch, on rank 1
}


@pytest.fixture(scope="module", params=[QUICK, pytest.param(MORE, marks=pytest.mark.slow)], ids=["quick", "more"])
def runs(request, tmp_path_factory):
    """What each rank wrote of each case; those without a strategy run as one rank and as two."""
    folder = tmp_path_factory.mktemp("runs")
    cases = {}
    for name, case in request.param.items():
        strategies = {"": {}} if "strategy" in case else {f", {s}": {"strategy": s} for s in ("single", "ddp")}
        cases |= {name + suffix: case | strategy for suffix, strategy in strategies.items()}
    run_script(SCRIPT, folder, json.dumps(cases), cwd=folder, timeout=600)
    return {name: [torch.load(path) for path in sorted((folder / name).glob("rank?.pt"))] for name in cases}


def turns(rollouts):
    return [sum(message["role"] == "assistant" for message in rollout["messages"]) for rollout in rollouts]


def test_two_ranks_play_and_train_as_one(runs):
    names = [name.removesuffix(", ddp") for name in runs if name.endswith(", ddp")]
    assert names
    for name in names:
        (one,), two = runs[f"{name}, single"], runs[f"{name}, ddp"]
        assert [rank["error"] for rank in (one, *two)] == [None] * 3
        assert len(two) == 2
        for rank in two:
            assert rank["groups"] == one["groups"], name
            assert rank["validation"] == pytest.approx(one["validation"], abs=1e-6)
            for kind in ("gradients", "weights"):
                for step, (theirs, own) in enumerate(zip(rank[kind], one[kind], strict=True)):
                    assert theirs.keys() == own.keys()
                    for key, value in own.items():
                        assert value.dtype == torch.float64
                        assert torch.allclose(theirs[key], value, rtol=1e-6, atol=1e-9), (name, kind, step, key)
        assert max(value.abs().max() for value in one["gradients"][-1].values()) > 1e-3
        assert {"val/reward", "val/episode/turns"} <= one["validation"].keys()


def test_the_ranks_have_different_numbers_of_turns(runs):
    for name, (first, *_) in runs.items():
        for groups in first["groups"]:
            most = [max(max(turns(groups[place])) for place in groups if place % 2 == rank) for rank in (0, 1)]
            assert most[0] > 1, name
            assert (most[1] == 1) == first["brief"], name


def test_the_weights_are_gathered_once_for_the_episodes_of_a_batch(runs):
    name = next(name for name in runs if name.endswith("fsdp2"))
    batches = len(runs[name][0]["groups"]) // 2 + 1  # two updates to a batch, and validation
    assert [rank["gathers"] for rank in runs[name]] == [[batches, 1]] * 2


def test_rollouts_use_tools_and_environments(runs):
    groups = next(iter(runs.values()))[0]["groups"]
    rollouts = [rollout for step in groups for own in step.values() for rollout in own]
    results = {message["name"] for rollout in rollouts for message in rollout["messages"] if message["role"] == "tool"}
    assert results == {"add", "double"}
    assert len({rollout["rewards"]["Tally"] for rollout in rollouts}) > 3


def test_a_lost_sampler_restarts_the_episodes_of_all_ranks(runs):
    for lost, copied in zip(runs["lost"], runs["copied"], strict=True):
        assert lost["error"] is None
        assert sum(lost["restarts"][::2]) == (2 if "unfit" in runs else 1)
        assert lost["calls"] > copied["calls"]
        assert lost["groups"] == copied["groups"]
        assert lost["validation"] == copied["validation"]
        for kind in ("gradients", "weights"):
            for left, right in zip(lost[kind], copied[kind], strict=True):
                assert all(torch.equal(left[name], right[name]) for name in left)
        assert lost["environments"] == copied["environments"]  # those of abandoned episodes play the next ones
    assert len({rank["calls"] for rank in runs["lost"]}) == 1  # also where a rank's episodes had ended


def test_an_environment_that_refuses_a_row_on_one_rank_ends_both(runs):
    if "unfit" not in runs:
        return
    told = "The environment Tally cannot begin an episode with the row"
    errors = [rank["error"] for rank in runs["unfit"]]
    assert errors[1].startswith(f"RuntimeError: {told}")
    assert errors[0].startswith(f"RuntimeError: rank 1 failed with RuntimeError: {told}")
    assert all(error.endswith("ValueError: no start") for error in errors)
    assert [len(rank["groups"]) for rank in runs["unfit"]] == [2, 2]  # the first batch was trained
