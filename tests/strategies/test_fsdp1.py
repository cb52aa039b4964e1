"""FSDP1 on two ranks (Lightning refuses it on CPU, so a subclass of its strategy) does what DDP does there."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from run_ranks import exported_difference, largest_difference, run

pytestmark = pytest.mark.slow  # the default run has FSDP2, which is the one to choose

CASE = {
    "tied": True,
    "module": {"beta": 0.1},
    "optimizer": {"max_grad_norm": 0.01, "weight_decay": 0.3},
    "poison": 1,
    "max_steps": 3,
}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return run(tmp_path_factory.mktemp("fsdp1") / "fsdp1", "fsdp1", **CASE)


def test_sharded_weights_train_like_whole_weights(tmp_path, sharded):
    whole = run(tmp_path / "ddp", "ddp", **CASE)
    assert largest_difference(whole, sharded) < 1e-5  # weights decay by their shapes when whole
    assert [math.isinf(step["grad_norm"]) for step in sharded.steps] == [False, True, False]
    for one, other in zip(whole.steps, sharded.steps, strict=True):
        for name in {"loss", "kl", "reward", "grad_norm", "val/reward", "balance/max_over_mean"} & one.keys():
            if not math.isinf(other[name]):  # DDP's first rank does not see the other's gradient
                assert other[name] == pytest.approx(one[name], abs=1e-5), name


def test_resume_is_exact(tmp_path, sharded):
    resumed = run(tmp_path / "resumed", "fsdp1", **CASE, checkpoint=str(sharded.folder / "step=2.ckpt"))
    assert largest_difference(resumed, sharded) == 0
    later = run(tmp_path / "later", "fsdp1", **CASE, before=["validate", "test"])  # a module runs again
    assert largest_difference(later, sharded) == 0
    assert exported_difference(sharded) == 0


@pytest.mark.parametrize(
    "case",
    [
        {"algorithm": "PPO", "module": {"num_iterations": 2}, "trainer": {"gradient_clip_val": 0.01}},
        {"algorithm": "GroupPPO", "critic": "shared"},
        {"algorithm": "Distillation", "module": {"beta": 0.1}},
    ],
    ids=["ppo", "shared trunk", "distillation"],
)
def test_other_models(tmp_path, case):
    assert largest_difference(run(tmp_path / "ddp", "ddp", **case), run(tmp_path / "fsdp1", "fsdp1", **case)) < 1e-5
