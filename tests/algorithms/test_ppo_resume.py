"""A run of PPO or GROUP PPO that is resumed, at whatever step, ends where the undisturbed one did, bit by bit."""

from __future__ import annotations

import pytest
import torch
from helpers.sweeps import sweep
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from pl_grouprl.algorithms import PPO, GroupPPO, OptimizerConfig
from pl_grouprl.models import PolicyCopyCritic, SharedTrunkCritic
from pl_grouprl.models.critic import LoRACritic
from pl_grouprl.types import SamplingConfig

STEPS = 9  # an epoch has 2 batches of rollouts; each serves 2 passes of 2 mini-batches
KL = {"beta": 0.1, "kl": {"target": 0.01, "horizon": 100}}
KL_IN_REWARD = {"beta": 0.1, "kl": {"place": "reward", **KL["kl"]}}
RUNS = {
    "ppo, copy, KL in the reward": (PPO, {"critic": PolicyCopyCritic(head_std=0.1), **KL_IN_REWARD}),
    "ppo, shared trunk, KL in the loss": (PPO, {"critic": SharedTrunkCritic(head_std=0.1), **KL}),
    "group_ppo, lora": (GroupPPO, {"critic": LoRACritic(r=4, head_std=0.1), **KL_IN_REWARD}),
    "group_ppo, sketch, warm-up": (GroupPPO, {"score_norm": "sketch", "critic_warmup_steps": 3}),
}


def state_of(module):
    state = {
        "beta": module.beta,
        "num_tokens": module.num_tokens,
        "nonfinite_steps": module.optimization.nonfinite_steps,
    }
    if isinstance(module, GroupPPO):
        state["threshold"] = module.threshold_controller.threshold
    return state


@pytest.fixture
def fit(make_module, make_data, make_trainer):
    def run(cls, options, checkpoint=None, callbacks=(), steps=STEPS):
        module = make_module(
            cls, num_iterations=2, num_mini_batches=2, optimizer=OptimizerConfig(1e-2, weight_decay=0.1),
            critic_optimizer=OptimizerConfig(3e-2, schedule="cosine"), **options,
        )  # fmt: skip
        trainer = make_trainer(max_steps=steps, callbacks=list(callbacks))
        trainer.fit(module, make_data(train_size=8), ckpt_path=checkpoint, weights_only=True)
        assert trainer.global_step == steps
        return module, trainer

    return run


# Amid the first pass; between the passes over the second batch; at the end of the epoch, with no updates left.
@pytest.mark.parametrize("resumed_at", [(1, 6, 8), pytest.param((2, 3, 4, 5, 7), marks=pytest.mark.slow)])
@pytest.mark.parametrize("run", sweep(RUNS, quick=["ppo, copy, KL in the reward", "group_ppo, lora"]))
def test_resume_at_every_step_is_exact(fit, tmp_path, run, resumed_at):
    cls, options = RUNS[run]
    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    undisturbed, trainer = fit(cls, options, callbacks=[saving])
    whole, moments = undisturbed.state_dict(), trainer.optimizers[0].state_dict()["state"]
    for step in resumed_at:
        resumed, again = fit(cls, options, tmp_path / f"step={step}.ckpt")
        assert state_of(resumed) == state_of(undisturbed), step
        assert all(torch.equal(value, whole[name]) for name, value in resumed.state_dict().items()), step
        for key, own in again.optimizers[0].state_dict()["state"].items():
            assert all(torch.equal(value, moments[key][name]) for name, value in own.items()), step


def test_the_checkpoint_holds_coefficient_and_threshold(fit, tmp_path):
    cls, options = RUNS["group_ppo, lora"]
    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    module, _ = fit(cls, options, callbacks=[saving], steps=1)
    saved = torch.load(tmp_path / "step=1.ckpt", weights_only=True)
    assert saved["pl_grouprl"]["kl_controller"] == {"coef": module.beta}
    assert saved["pl_grouprl"]["threshold_controller"] == {"threshold": module.threshold_controller.threshold}
    assert module.beta != 0.1
    assert module.threshold_controller.threshold != 4.0
    # What the policy's storage holds is saved once.
    tied = {f"critic.own_trunk.{name}" for name in module.critic.tied}
    assert tied
    assert not tied & saved["state_dict"].keys()


def test_a_fixed_coefficient_and_a_fixed_threshold_are_the_options(fit, tmp_path):
    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit(GroupPPO, {"beta": 0.1}, callbacks=[saving], steps=4)
    options = {"beta": 0.3, "adaptive_threshold": False, "group_variance_threshold": 2.5}
    options["guards"] = {"allow_changed": list(options)}
    module, _ = fit(GroupPPO, options, tmp_path / "step=4.ckpt", steps=5)
    assert module.beta == 0.3
    assert module.token_group_threshold == 2.5


def test_token_groups_survive_a_checkpoint(fit, tmp_path):
    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    first, _ = fit(GroupPPO, {}, callbacks=[saving], steps=1)
    resumed, _ = fit(GroupPPO, {}, tmp_path / "step=1.ckpt", steps=2)
    for left, right in zip(first.token_groups, resumed.token_groups, strict=True):
        assert torch.equal(left, right)
    assert resumed.token_group_threshold == 4.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 5}, "seed is 5"),
        ({"num_generations": 2}, "num_generations is 2"),
        ({"sampling": SamplingConfig(max_new_tokens=5, temperature=0.5)}, "sampling.temperature is 0.5"),
    ],
)
def test_other_rollouts_between_updates_are_refused(fit, tmp_path, change, message):
    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit(GroupPPO, {}, callbacks=[saving], steps=1)
    with pytest.raises(ValueError, match=message):
        fit(GroupPPO, change, tmp_path / "step=1.ckpt", steps=2)
    with pytest.warns(UserWarning, match="gamma +1.0 +0.5"):  # applies from the next batch of rollouts
        fit(GroupPPO, {"gamma": 0.5}, tmp_path / "step=1.ckpt", steps=2)


@pytest.mark.parametrize(
    "saving", [{"every_n_train_steps": 60}, {}, {"every_n_epochs": 1, "save_on_train_epoch_end": True}]
)
def test_a_run_that_stopped_mid_epoch_continues_there(make_module, make_data, make_trainer, tmp_path, saving):
    """Lightning saves the last checkpoint of a run after it has counted the epoch as processed, or as completed."""
    data = {"train_size": 12}  # 3 batches of 4
    undisturbed = make_module()
    make_trainer(max_epochs=2).fit(undisturbed, make_data(**data))
    callback = ModelCheckpoint(dirpath=tmp_path, save_last=True, **saving)
    make_trainer(max_steps=1, max_epochs=2, callbacks=[callback]).fit(make_module(), make_data(**data))
    resumed, trainer = make_module(), make_trainer(max_epochs=2)
    trainer.fit(resumed, make_data(**data), ckpt_path=tmp_path / "last.ckpt")
    assert trainer.global_step == 6
    for name, weight in undisturbed.policy.state_dict().items():
        assert torch.equal(weight, resumed.policy.state_dict()[name]), name


def test_a_run_limited_to_one_epoch_continues_in_it(make_module, make_data, make_trainer, tmp_path):
    saving = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=60, save_last=True)
    make_trainer(max_steps=3, max_epochs=1, callbacks=[saving]).fit(make_module(), make_data(train_size=24))
    trainer = make_trainer(max_steps=5, max_epochs=1)
    trainer.fit(make_module(), make_data(train_size=24), ckpt_path=tmp_path / "last.ckpt")
    assert trainer.global_step == 5


def test_a_checkpoint_of_before_the_first_step(make_module, make_data, make_trainer, tmp_path):
    class SaveAtOnce(Callback):
        def on_train_start(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / "start.ckpt")

    make_trainer(max_steps=1, callbacks=[SaveAtOnce()]).fit(make_module(), make_data())
    trainer = make_trainer(max_steps=2)
    trainer.fit(make_module(), make_data(), ckpt_path=tmp_path / "start.ckpt")
    assert trainer.global_step == 2
