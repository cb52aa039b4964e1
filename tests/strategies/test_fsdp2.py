"""FSDP2 on two ranks does what DDP does there: sampling, clipping, skipped steps, resume, export."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from run_ranks import exported_difference, largest_difference, run

CASE = {"tied": True, "module": {"beta": 0.1}, "trainer": {"gradient_clip_val": 0.01}, "poison": 1, "max_steps": 3}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp2")
    return run(folder / "ddp", "ddp", **CASE), run(folder / "fsdp2", "fsdp2", **CASE)


def test_sharded_weights_train_like_whole_weights(runs):
    whole, sharded = runs
    assert largest_difference(whole, sharded) < 1e-5
    assert exported_difference(sharded) == 0
    # An infinite gradient on one rank is skipped on both.
    assert [math.isinf(step["grad_norm"]) for step in sharded.steps] == [False, True, False]
    assert all(value.isfinite().all() for value in sharded.weights.values())
    assert {"kl", "grad_norm", "val/reward"} <= whole.steps[-1].keys()
    for one, other in zip(whole.steps, sharded.steps, strict=True):
        assert one.keys() == other.keys()
        for name in (name for name in one if not name.startswith(("time/", "perf/"))):
            if not math.isinf(other[name]):  # DDP's first rank does not see the other's gradient
                assert other[name] == pytest.approx(one[name], abs=1e-5), name


def test_resume_is_exact(tmp_path, runs):
    _, sharded = runs
    resumed = run(tmp_path / "resumed", "fsdp2", **CASE, checkpoint=str(sharded.folder / "step=2.ckpt"))
    assert largest_difference(resumed, sharded) == 0


def test_the_reference_is_not_in_checkpoints(runs):
    from torch.distributed.checkpoint import FileSystemReader

    names = FileSystemReader(runs[1].folder / "step=2.ckpt").read_metadata().state_dict_metadata
    assert any(name.startswith("state_dict.policy.") for name in names)
    assert not any("reference" in name for name in names)


@pytest.mark.slow
def test_rollouts_in_bfloat16_are_those_of_whole_weights(tmp_path):
    """The sampler's copies are made of gathered weights, and put away before the weights are sharded again."""
    case = {"trainer": {"precision": "bf16-mixed"}, "max_steps": 3, "rollout_dtype": "bfloat16"}
    whole, sharded = (run(tmp_path / name, name, **case) for name in ("ddp", "fsdp2"))
    assert [step["reward"] for step in whole.steps] == [step["reward"] for step in sharded.steps]
    assert largest_difference(whole, sharded) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        {"algorithm": "PPO", "module": {"beta": 0.1, "num_iterations": 2}, "optimizer": {"max_grad_norm": 0.01}},
        {"algorithm": "GroupPPO", "critic": "shared", "module": {"critic_warmup_steps": 1}},
        {"module": {"max_tokens_per_micro_batch": 32, "beta": 0.1, "num_iterations": 2}},
        {"module": {"max_tokens_per_micro_batch": 32}, "policy": {"gradient_checkpointing": True}},
        {"module": {"max_tokens_per_micro_batch": 32}, "policy": {"gradient_checkpointing": "attention"}},
        {"adapter": {"r": 4}, "module": {"beta": 0.1}},
        {"trainer": {"accumulate_grad_batches": 2}, "module": {"num_mini_batches": 2}},
        {"algorithm": "Distillation", "module": {"max_tokens_per_micro_batch": 32, "gamma": 0.5}},
    ],
    ids=[
        "ppo",
        "shared trunk",
        "budget",
        "checkpointing",
        "saved attention",
        "adapter",
        "accumulation",
        "distillation",
    ],
)
def test_every_way_to_train(tmp_path, case):
    assert largest_difference(run(tmp_path / "ddp", "ddp", **case), run(tmp_path / "fsdp2", "fsdp2", **case)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1", "zero3"])
def test_the_exported_critic(tmp_path, strategy):
    from safetensors.torch import load_file
    from transformers import AutoModelForTokenClassification

    folders = [run(tmp_path / name, name, algorithm="PPO").folder / "critic" for name in ("ddp", strategy)]
    whole, sharded = (load_file(folder / "model.safetensors") for folder in folders)
    assert whole.keys() == sharded.keys()
    assert max((whole[name] - sharded[name]).abs().max().item() for name in whole) < 1e-4  # of 0.02
    loaded = AutoModelForTokenClassification.from_pretrained(folders[1]).state_dict()
    assert all(loaded[name].equal(sharded[name]) for name in loaded)


@pytest.mark.slow
@pytest.mark.parametrize(("optim", "tolerance"), [("torch.optim.Muon", 1e-3), ("torch.optim.SGD", 1e-5)])
def test_another_optimizer(tmp_path, optim, tolerance):
    """Muon computes with matrices in bfloat16, which is rounded by shards: 5 % of three steps of 0.0067 on average."""
    case = {"optimizer": {"optim": optim, "weight_decay": 0.1, "schedule": "linear"}, "max_steps": 3}
    sharded = run(tmp_path / "fsdp2", "fsdp2", **case)
    assert largest_difference(run(tmp_path / "ddp", "ddp", **case), sharded) < tolerance
    resumed = run(tmp_path / "resumed", "fsdp2", **case, checkpoint=str(sharded.folder / "step=2.ckpt"))
    assert largest_difference(resumed, sharded) == 0


@pytest.mark.slow
def test_moments_of_8_bits_of_torchao(tmp_path):
    pytest.importorskip("torchao")
    case = {"policy": {"hidden_size": 128, "vocabulary": 64}, "max_steps": 3}  # equal shards
    plain = run(tmp_path / "plain", "fsdp2", **case)
    case["optimizer"] = {"optim": "torchao.optim.AdamW8bit", "optim_args": {"block_size": 64}}
    sharded = run(tmp_path / "fsdp2", "fsdp2", **case)
    assert 0 < largest_difference(plain, sharded) < 0.03  # three steps of at most 0.01
    resumed = run(tmp_path / "resumed", "fsdp2", **case, checkpoint=str(sharded.folder / "step=2.ckpt"))
    assert largest_difference(resumed, sharded) == 0
