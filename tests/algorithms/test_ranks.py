"""Several ranks do what one does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.scripts import run_script

SCRIPT = Path(__file__).with_name("ddp_run.py")


def run(folder, devices, checkpoint="", **options):
    folder.mkdir()
    run_script(SCRIPT, devices, folder, checkpoint, json.dumps(options), ranks=devices, cwd=folder)
    return torch.load(folder / "parameters.pt", weights_only=True), json.loads((folder / "metrics.json").read_text())


def largest_difference(left, right):
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True))


OPTIONS = {"loss_type": "grpo", "scale_rewards": "batch", "beta": 0.1}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks") / "two"
    return folder, *run(folder, 2, **OPTIONS)


def test_two_ranks_train_like_one(tmp_path, two_ranks):
    # Five prompts: one rank has three of them, the other two, and their completions differ in length.
    one, one_metrics = run(tmp_path / "one", 1, **OPTIONS)
    _, two, two_metrics = two_ranks
    assert largest_difference(one, two) < 1e-5
    assert {"loss", "kl", "reward", "reward_std", "num_tokens", "grad_norm", "val/reward"} <= one_metrics.keys()
    for name, value in one_metrics.items():
        if not name.startswith(("time/", "perf/")):
            assert two_metrics[name] == pytest.approx(value, abs=1e-5), name


def test_two_ranks_resume_between_updates(tmp_path, two_ranks):
    folder, whole, _ = two_ranks
    saved = torch.load(folder / "step=1.ckpt", weights_only=True)
    assert sorted(len(state["groups"]) for state in saved["pl_grouprl"]["rollouts"]) == [2, 3]
    resumed, _ = run(tmp_path / "resumed", 2, folder / "step=1.ckpt", **OPTIONS)
    assert largest_difference(whole, resumed) == 0


@pytest.mark.slow
def test_another_number_of_ranks_resumes_between_updates(tmp_path, two_ranks):
    # The rollouts of both ranks are dealt again, not sampled again.
    resumed, metrics = run(tmp_path / "resumed", 1, two_ranks[0] / "step=1.ckpt", **OPTIONS)
    assert largest_difference(resumed, two_ranks[1]) < 1e-5
    assert metrics["reward"] == pytest.approx(two_ranks[2]["reward"])


DISTILLED = {"distillation_coef": 0.5, "gamma": 0.9, "num_mini_batches": 1, "scale_rewards": "batch"}


def test_two_ranks_distill_like_one(tmp_path):
    one, one_metrics = run(tmp_path / "one", 1, **DISTILLED)
    two, two_metrics = run(tmp_path / "two", 2, **DISTILLED)
    assert largest_difference(one, two) < 1e-5
    assert one_metrics["distillation/reverse_kl"] > 0.01
    for name in ("loss", "distillation/reverse_kl", "distillation/teacher_logprob", "reward", "grad_norm"):
        assert two_metrics[name] == pytest.approx(one_metrics[name], abs=1e-5), name
