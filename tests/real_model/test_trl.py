"""TRL's GRPOTrainer trains the same inside `shared_prefix` as outside. Needs the package trl."""

import copy

import pytest
from helpers.smollm2 import rewards_right, rows

from pl_grouprl.attention import shared_prefix
from pl_grouprl.models import PretrainedPolicy

pytest.importorskip("trl")


def train(model, tokenizer, folder):
    """Two steps of TRL's trainer; returns what it logged."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(folder),
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
        max_steps=2,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=12,
        beta=0.05,
        seed=1,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=rewards_right,
        args=config,
        train_dataset=Dataset.from_list(rows()[:1]),
        processing_class=copy.deepcopy(tokenizer),
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_the_trainer_of_trl(converted, tokenizer, tmp_path):
    logs = {}  # the reference is loaded by TRL, from the policy's folder
    for sharing in (False, True):
        policy = PretrainedPolicy(str(converted)).load().train()
        if not sharing:
            logs[sharing] = train(policy, tokenizer, tmp_path)
            continue
        with shared_prefix(policy) as context:
            logs[sharing] = train(policy, tokenizer, tmp_path)
        assert context.last_call.layout is not None, context.last_call
    assert len(logs[True]) == len(logs[False]) == 2
    for shared, repeated in zip(logs[True], logs[False], strict=True):
        print("\n", {name: (shared[name], repeated[name]) for name in ("loss", "reward", "grad_norm", "step_time")})
        for name, tolerance in {"loss": 1e-3, "grad_norm": 2e-2, "reward": 1e-6, "entropy": 1e-3}.items():
            assert shared[name] == pytest.approx(repeated[name], abs=tolerance, rel=1e-3), name
    assert max(abs(entry["grad_norm"]) for entry in logs[True]) > 0.1
