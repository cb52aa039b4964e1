"""Rollouts from a copy of the policy: those of the weights before, the same when resumed, refused where impossible."""

from pathlib import Path

import pytest
import torch
from helpers.scripts import run_script


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def run_ranks(devices, folder, checkpoint="", strategy="ddp"):
    folder.mkdir()
    script = Path(__file__).with_name("rollouts_ahead_ranks.py")
    run_script(script, devices, folder / "weights.pt", strategy, checkpoint, ranks=devices, cwd=folder, timeout=180)
    return torch.load(folder / "weights.pt", weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_do_what_one_does_and_resume_exactly(tmp_path, strategy):
    one, two = run_ranks(1, tmp_path / "one"), run_ranks(2, tmp_path / "two", strategy=strategy)
    for left, right in zip(one, two, strict=True):
        torch.testing.assert_close(right, left, rtol=0, atol=1e-5)
    assert same(two, run_ranks(2, tmp_path / "resumed", tmp_path / "two" / "step=1.ckpt", strategy))
