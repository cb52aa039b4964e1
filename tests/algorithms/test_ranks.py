"""Several ranks do what one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("ddp_run.py")


def run(folder, devices, checkpoint="", **options):
    folder.mkdir()
    command = [sys.executable, str(SCRIPT), str(devices), str(folder), str(checkpoint), json.dumps(options)]
    subprocess.run(
        command, check=True, timeout=120, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=folder
    )
    return torch.load(folder / "parameters.pt", weights_only=True), json.loads((folder / "metrics.json").read_text())


def largest_difference(left, right):
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("options", [{"loss_type": "dapo", "scale_rewards": "batch"}, {"loss_type": "grpo", "beta": 0.1}])
def test_two_ranks_train_like_one(tmp_path, options):
    # Five prompts: one rank has three of them, the other two, and their completions differ in length.
    one, one_metrics = run(tmp_path / "one", 1, **options)
    two, two_metrics = run(tmp_path / "two", 2, **options)
    assert largest_difference(one, two) < 1e-5
    for name, value in one_metrics.items():
        if not name.startswith(("time/", "perf/")):
            assert two_metrics[name] == pytest.approx(value, abs=1e-5), name


def test_two_ranks_resume_amid_rollouts(tmp_path):
    whole, _ = run(tmp_path / "whole", 2)
    saved = torch.load(tmp_path / "whole" / "step=1.ckpt", weights_only=True)
    assert [len(state["groups"]) for state in saved["pl_grouprl"]["rollouts"]] == [3, 2]
    resumed, _ = run(tmp_path / "resumed", 2, tmp_path / "whole" / "step=1.ckpt")
    assert largest_difference(whole, resumed) == 0
    # On one rank the prompts are sampled again for the second update; the scripted engine gives the same completions.
    other, _ = run(tmp_path / "other", 1, tmp_path / "whole" / "step=1.ckpt")
    assert largest_difference(whole, other) < 1e-2
