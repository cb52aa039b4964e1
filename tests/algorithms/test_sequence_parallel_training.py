"""Two ranks that run each other's rows together train as one process does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.scripts import run_script

SCRIPT = Path(__file__).with_name("ddp_run.py")


def train(folder, devices, **options):
    folder.mkdir()
    options |= {"loss_type": "grpo", "scale_rewards": "batch", "beta": 0.1}
    run_script(SCRIPT, devices, folder, "", json.dumps(options), ranks=devices, cwd=folder)
    return torch.load(folder / "parameters.pt", weights_only=True), json.loads((folder / "metrics.json").read_text())


def test_a_sequence_group_trains_like_one_process(tmp_path):
    # Three prompts on one rank, two on the other, in rows that are cut where segments are not.
    one, one_metrics = train(tmp_path / "one", 1)
    two, two_metrics = train(tmp_path / "two", 2, sharing={"sequence_parallel_size": 2}, max_tokens_per_micro_batch=40)
    assert max((a - b).abs().max().item() for a, b in zip(one, two, strict=True)) < 1e-6
    for name in ("loss", "kl", "entropy", "grad_norm", "num_tokens", "val/reward"):
        assert two_metrics[name] == pytest.approx(one_metrics[name], abs=1e-5), name
