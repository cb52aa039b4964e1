"""Callbacks, plugins and limits of Lightning: what a run honors exactly, and what it refuses at setup."""

from __future__ import annotations

import pickle
import random

import pytest
import torch
from helpers.sweeps import sweep
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import GradientAccumulationScheduler, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from pl_grouprl.algorithms import GRPO, PPO
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


def test_an_asynchronous_plugin_is_refused_by_the_callback_that_verifies(make_module, make_trainer, make_data):
    trainer = make_trainer(callbacks=[SafeCheckpoint()], plugins=[AsyncCheckpointIO()])
    with pytest.raises(ValueError, match=r"plugins has AsyncCheckpointIO"):
        trainer.fit(make_module(), make_data())


def noisy_share_of_letters(completions, **columns):
    """Rewards that draw from a global generator, which a checkpoint saves."""
    return [sum(c.isalpha() for c in text) / max(len(text), 1) + 0.1 * random.random() for text in completions]


class Broken(GRPO):
    """Raises in one place, once, after `step` optimizer steps."""

    def break_at(self, place, step):
        self.place, self.step = place, step
        return self

    def maybe_break(self, place):
        if place == self.place and self.global_step == self.step:
            raise RuntimeError("broken")

    def compute_advantages(self, groups):
        self.maybe_break("compute_advantages")
        return super().compute_advantages(groups)

    def compute_loss(self, batch):
        self.maybe_break("compute_loss")
        return super().compute_loss(batch)

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        self.maybe_break("optimizer_step")


class Breaks(Callback):
    """Calls the module's `maybe_break` in hooks that run before the module's own."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        module.maybe_break("on_train_batch_start")

    def on_before_optimizer_step(self, trainer, module, optimizer):
        module.maybe_break("on_before_optimizer_step")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        module.maybe_break("on_train_batch_end")


@pytest.fixture
def fit_broken(make_module, make_trainer, make_data, tmp_path):
    """Fit with a callback that saves on the exception; returns counts, updates and weights."""

    def fit(options, limits, place=None, step=0, checkpoint=None):
        seed_everything(1, verbose=False)
        options = {"rewards": noisy_share_of_letters, **options}
        module, trained = make_module(Broken, **options).break_at(place, step), Trained()
        callbacks = [Breaks(), trained, OnExceptionCheckpoint(tmp_path)]
        trainer = make_trainer(max_steps=8, callbacks=callbacks, **limits)
        trainer.fit(module, make_data(val=True), ckpt_path=checkpoint)
        counts = trainer.global_step, trainer.fit_loop.epoch_loop._batches_that_stepped, module.num_tokens
        return counts, trained.updates, module.policy.state_dict()

    return fit


PLACES = [  # an epoch has 6 steps, two for each batch of rollouts
    ("on_train_batch_start", 3),
    ("on_train_batch_start", 6),
    ("compute_advantages", 0),
    ("compute_advantages", 4),
    ("compute_loss", 0),
    ("compute_loss", 3),
    ("compute_loss", 5),
    ("on_before_optimizer_step", 4),
    ("on_train_batch_end", 3),
]
WITHIN = {
    **{f"{place} {step}": ({}, {"num_mini_batches": 2}, place, step) for place, step in PLACES},
    # an epoch has 6 steps of 2 batches each, four for each batch of rollouts
    "accumulating 1": ({"accumulate_grad_batches": 2}, {"num_mini_batches": 4}, "compute_loss", 1),
    "accumulating 6": ({"accumulate_grad_batches": 2}, {"num_mini_batches": 4}, "compute_loss", 6),
}
_WHOLE = {}


QUICK = {"compute_advantages 4", "compute_loss 3", "compute_loss 5", "accumulating 6"}


@pytest.mark.parametrize("case", sweep(WITHIN, QUICK))
def test_a_checkpoint_written_within_a_batch_resumes_exactly(fit_broken, tmp_path, case):
    trainer, options, place, step = WITHIN[case]
    limits = {"val_check_interval": 2, **trainer}
    key = str((options, limits))
    _WHOLE[key] = _WHOLE.get(key) or fit_broken(options, limits)
    counts, updates, weights = _WHOLE[key]
    with pytest.raises(RuntimeError, match="broken"):
        fit_broken(options, limits, place, step)
    resumed_counts, resumed, resumed_weights = fit_broken(options, limits, checkpoint=tmp_path / "on_exception.ckpt")
    assert resumed == updates[step * trainer.get("accumulate_grad_batches", 1) :]
    assert resumed_counts == counts
    assert all(torch.equal(weights[name], resumed_weights[name]) for name in weights)


AHEAD = {"max_staleness": 1, "importance_sampling": {"mode": "token_truncate"}, "num_generations": 2}


@pytest.mark.parametrize(
    ("options", "limits", "place", "reason"),
    [
        ({}, {}, "optimizer_step", "the optimizer's step has begun"),
        (AHEAD, {}, "compute_advantages", "rollouts have left the queue"),
        (
            {},
            {"accumulate_grad_batches": 2},
            "on_before_optimizer_step",
            "gradients are accumulating over several batches",
        ),
    ],
)
def test_a_checkpoint_within_a_batch_that_cannot_be_repeated_is_refused(
    fit_broken, tmp_path, options, limits, place, reason
):
    with pytest.raises(RuntimeError, match=f"no checkpoint is saved within this batch, .*: {reason}"):
        fit_broken(options, limits, place, 1 if place == "optimizer_step" else 0)
    assert not list(tmp_path.glob("*.ckpt"))


def test_weights_trained_in_processes_that_a_launcher_forked_come_back(
    make_module, make_trainer, make_data, monkeypatch
):
    """`ddp_notebook`, which Lightning chooses in notebooks, has the same launcher."""
    monkeypatch.setenv("MASTER_PORT", "0")  # the launcher sets it
    modules = {strategy: make_module(beta=0.1) for strategy in ("auto", "ddp_fork")}
    for strategy, module in modules.items():
        make_trainer(max_steps=2, strategy=strategy).fit(module, make_data())
    alone, forked = modules.values()
    torch.testing.assert_close(forked.policy.state_dict(), alone.policy.state_dict())
    torch.testing.assert_close(forked.reference.state_dict(), alone.reference.state_dict())


def test_a_module_can_be_sent_to_a_process_that_a_launcher_spawns(make_module):
    module = pickle.loads(pickle.dumps(make_module(beta=0.1)))
    module.configure_model()
    assert not [name for name in module.state_dict() if name.startswith("reference")]
    assert not module.load_state_dict(module.state_dict()).missing_keys
