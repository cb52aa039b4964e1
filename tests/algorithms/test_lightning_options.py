"""Callbacks, plugins and limits of Lightning: what a run honors exactly, and what it refuses at setup."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.tuner import Tuner

from pl_grouprl.algorithms import PPO
from pl_grouprl.callbacks import SafeCheckpoint
from pl_grouprl.models import SharedTrunkCritic


class Trained(Callback):
    """The updates that were made: rollout and update index of each batch."""

    def __init__(self):
        self.updates = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.updates.append((batch.rollout_number, batch.update_index))


# The training data has 12 prompts, so 3 batches of rollouts in an epoch.


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"num_mini_batches": 2}, {"limit_train_batches": 3}),
        ({"num_mini_batches": 2}, {"limit_train_batches": 0.5}),  # 3 of 6
        ({"num_iterations": 2}, {"limit_train_batches": 1}),
        ({"num_iterations": 2, "num_mini_batches": 2}, {"limit_train_batches": 6}),
        ({"num_mini_batches": 2}, {"overfit_batches": 3}),
    ],
)
def test_an_epoch_that_ends_between_the_updates_of_a_batch_of_rollouts_is_refused(
    make_module, make_trainer, make_data, options, limit
):
    ((name, value),) = limit.items()
    trainer = make_trainer(max_epochs=2, **limit)
    with pytest.raises(ValueError, match=rf"trainer\.{name} is {value}, .* make it a multiple of [24]\."):
        trainer.fit(make_module(**options), make_data())


@pytest.mark.parametrize("limit", [4, 2, 7, 0.4, 1.0])  # 0.4 of 6 is 2
def test_an_epoch_that_ends_with_the_updates_of_a_batch_of_rollouts_trains_all(
    make_module, make_trainer, make_data, limit
):
    trained = Trained()
    trainer = make_trainer(max_epochs=2, limit_train_batches=limit, callbacks=[trained], enable_checkpointing=False)
    trainer.fit(make_module(num_mini_batches=2), make_data())
    per_epoch = {4: 2, 2: 1, 7: 3, 0.4: 1, 1.0: 3}[limit]
    rollouts = [epoch * 3 + number for epoch in (0, 1) for number in range(per_epoch)]
    assert trained.updates == [(number, update) for number in rollouts for update in (0, 1)]


def test_a_trial_may_end_between_updates(make_module, make_trainer, make_data):
    make_trainer(fast_dev_run=1).fit(make_module(num_mini_batches=2), make_data())


SCHEDULE = {0: 1, 2: 3}  # by epoch


def test_a_schedule_of_accumulation_is_checked_by_its_largest_value(make_module, make_trainer, make_data):
    callbacks = [GradientAccumulationScheduler(SCHEDULE)]
    message = "accumulate_grad_batches is 3 with num_mini_batches=1 and num_iterations=2"
    with pytest.raises(ValueError, match=message):
        make_trainer(callbacks=callbacks).fit(make_module(num_iterations=2), make_data())
    with pytest.raises(ValueError, match="accumulate_grad_batches is 3 with a critic"):
        make_trainer(callbacks=callbacks).fit(make_module(PPO, critic=SharedTrunkCritic()), make_data())


def test_a_run_with_a_schedule_of_accumulation_resumes_exactly(make_module, make_trainer, make_data, tmp_path):
    def fit(checkpoint=None):
        save = SafeCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        callbacks = [GradientAccumulationScheduler(SCHEDULE), *([] if checkpoint else [save])]
        trainer, module = make_trainer(max_epochs=4, callbacks=callbacks), make_module(num_mini_batches=2)
        trainer.fit(module, make_data(), ckpt_path=checkpoint)
        return trainer.global_step, module.policy.state_dict()

    steps, whole = fit()
    assert steps == 6 + 6 + 2 + 2
    for step in (11, 12, 13, 14):  # within the second epoch, at its end, within the third, at its end
        resumed_steps, resumed = fit(tmp_path / f"step={step}.ckpt")
        assert resumed_steps == steps
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize("finder", [BatchSizeFinder, LearningRateFinder])
def test_finders_are_refused(make_module, make_trainer, make_data, finder):
    with pytest.raises(ValueError, match=f"callbacks has a {finder.__name__}, .*; leave it out"):
        make_trainer(callbacks=[finder()], enable_checkpointing=False).fit(make_module(), make_data())


def test_the_tuner_is_refused(make_module, make_trainer, make_data):
    with pytest.raises(ValueError, match="callbacks has a LearningRateFinder, which compares losses"):
        Tuner(make_trainer()).lr_find(make_module(), datamodule=make_data())
    with pytest.raises(ValueError, match="callbacks has a BatchSizeFinder, but batch_size decides"):
        Tuner(make_trainer()).scale_batch_size(make_module(), datamodule=make_data(val=True), method="validate")


def test_an_asynchronous_plugin_is_refused_by_the_callback_that_verifies(make_module, make_trainer, make_data):
    trainer = make_trainer(callbacks=[SafeCheckpoint()], plugins=[AsyncCheckpointIO()])
    with pytest.raises(ValueError, match=r"plugins has AsyncCheckpointIO, .*; leave the plugin out, or use Model"):
        trainer.fit(make_module(), make_data())
