"""A step that leaves NaN or infinity in a weight ends the run there, on every rank, with the parameter's name."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.scripts import run_script
from lightning.pytorch import Callback

from pl_grouprl.algorithms import GRPO, PPO, OptimizerConfig
from pl_grouprl.models import SharedTrunkCritic


class BrokenClipping(GRPO):
    """Clips the gradient of one parameter by NaN, after the gradient was found finite."""

    def configure_gradient_clipping(self, *args, **kwargs):
        self.policy.model.norm.weight.grad *= float("nan")


class Steps(Callback):
    def __init__(self):
        self.done = []

    def on_train_batch_end(self, trainer, module, *args):
        self.done.append(trainer.global_step)


def test_a_step_that_leaves_nan_ends_the_run_there(make_module, make_data, make_trainer):
    steps = Steps()
    trainer = make_trainer(max_steps=5, callbacks=[steps], gradient_clip_val=1.0, enable_checkpointing=False)
    message = (
        r"NaN or infinity in 1 parameters after optimizer step 1: policy.model.norm.weight. The gradient was finite, "
        r"so clipping or the step itself .*learning_rate=0.01, .* of policy; trainer.gradient_clip_val=1.0"
    )
    with pytest.raises(RuntimeError, match=message):
        trainer.fit(make_module(BrokenClipping), make_data())
    assert steps.done == []


def test_float16_is_named_as_the_cause(make_module, make_data, make_trainer):
    module, trainer = make_module(BrokenClipping), make_trainer(max_steps=1, precision="16-true", gradient_clip_val=1.0)
    with pytest.raises(RuntimeError, match=r"Use trainer\.precision='bf16-mixed' or 'bf16-true', since an eps below"):
        trainer.fit(module, make_data())


def test_the_critic_is_checked_and_named(make_module, make_data, make_trainer):
    class Breaks(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            module.critic.head.weight.data[0, 0] = float("inf")

    module = make_module(PPO, critic=SharedTrunkCritic(), critic_optimizer=OptimizerConfig(3e-3))
    trainer = make_trainer(max_steps=3, callbacks=[Breaks()], enable_checkpointing=False)
    with pytest.raises(RuntimeError, match=r"after optimizer step 1: critic\..*learning_rate=0.003, .* of critic;"):
        trainer.fit(module, make_data())


def test_weights_that_were_broken_before_are_told_apart(make_module, make_data, make_trainer, scripted_engine):
    module = make_module(engine=scripted_engine, sharing={"mode": "repeated"})
    module.configure_model()
    module.policy.model.layers[0].mlp.up_proj.weight.data[0, 0] = float("nan")
    message = "after optimizer step 1: policy.model.layers.0.mlp.up_proj.weight. The step was skipped"
    with pytest.raises(RuntimeError, match=message):
        make_trainer(max_steps=3).fit(module, make_data())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_all_ranks_end_where_one_ranks_part_is_broken(tmp_path, strategy):
    run_script(Path(__file__).with_name("broken_weight_ranks.py"), strategy, tmp_path, timeout=300)
    told = [(tmp_path / f"error-{rank}.txt").read_text() for rank in range(2)]
    for text in told:
        assert "NaN or infinity in 1 parameters after optimizer step 1: policy.model.norm.weight" in text


def test_large_weights_whose_norm_overflows_are_no_error(make_module, make_data, make_trainer, scripted_engine):
    class Grows(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            module.policy.lm_head.weight.data[0, 0] = 1e30  # its square is not finite

    module, trainer = make_module(engine=scripted_engine), make_trainer(max_steps=1, callbacks=[Grows()])
    trainer.fit(module, make_data())
    assert trainer.global_step == 1
