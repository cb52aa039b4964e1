"""A module lists its state; what is listed is saved and restored, for the ranks there were and for others."""

from __future__ import annotations

import itertools
import random
import re

import numpy as np
import pytest
import torch
from helpers.sweeps import sweep_pairs
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from pl_grouprl.algorithms import GRPO, PPO, GroupPPO, OptimizerConfig
from pl_grouprl.callbacks import SafeCheckpoint
from pl_grouprl.training.buffer import RolloutBuffer
from pl_grouprl.training.checkpoint import Attributes, redistribute
from pl_grouprl.types import Rollout, RolloutGroup, SamplingConfig
from pl_grouprl.utilities.modes import random_state, set_random_state

CPU = torch.device("cpu")


def drawn():
    return random.random(), np.random.random(), float(torch.rand(())), float(torch.randn(())), random.gauss(0, 1)


def test_random_numbers_continue_from_their_state(tmp_path):
    random.gauss(0, 1)
    np.random.standard_normal()
    torch.save(random_state(CPU), tmp_path / "state.pt")
    expected = [drawn() for _ in range(3)]
    set_random_state(torch.load(tmp_path / "state.pt", weights_only=True), CPU)
    assert [drawn() for _ in range(3)] == expected


@pytest.mark.parametrize("cls", [GRPO, PPO, GroupPPO])
def test_the_state_is_what_is_listed(make_module, make_data, make_trainer, tmp_path, cls):
    module = make_module(cls)
    trainer = make_trainer(max_steps=1)
    trainer.fit(module, make_data())
    trainer.save_checkpoint(tmp_path / "state.ckpt")
    saved = torch.load(tmp_path / "state.ckpt", weights_only=True)["pl_grouprl"]
    assert saved.keys() == module.saved_state().keys()
    always = {"random_numbers", "reference_fingerprint", "adapters", "run_options", "steps", "tokens", "rollouts"}
    assert always < saved.keys()
    assert ("threshold_controller" in saved) == (cls is GroupPPO)


class Curriculum(GRPO):
    """A user's module with state of its own."""

    level = 0

    def saved_state(self):
        return super().saved_state() | {"curriculum": Attributes(self, "level")}

    def on_train_batch_end(self, *args):
        self.level += 1
        super().on_train_batch_end(*args)


def test_a_subclass_adds_to_it(make_module, make_data, make_trainer, tmp_path):
    module, trainer = make_module(Curriculum), make_trainer(max_steps=2)
    trainer.fit(module, make_data())
    trainer.save_checkpoint(tmp_path / "state.ckpt")
    resumed = make_module(Curriculum)
    make_trainer(max_steps=3).fit(resumed, make_data(), ckpt_path=tmp_path / "state.ckpt", weights_only=True)
    assert resumed.level == 3


class Draws(Callback):
    """What each rollout's reward could draw."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.seen.append((batch.rollout_number, drawn()))

    def on_validation_batch_start(self, *args):
        drawn()


def saving(folder, **options):
    return ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1, **options)


def test_validations_do_not_change_the_random_numbers_of_a_resumed_run(make_module, make_data, make_trainer, tmp_path):
    options = {"max_epochs": 2, "check_val_every_n_epoch": None, "val_check_interval": 2, "num_sanity_val_steps": 0}
    schedule = {
        "optimizer": OptimizerConfig(1e-2, schedule="cosine")
    }  # asks for the number of steps before the restore
    whole = Draws()
    make_trainer(callbacks=[whole, saving(tmp_path)], **options).fit(make_module(**schedule), make_data(val=True))
    assert len(whole.seen) == 6
    for step in (1, 2, 3, 4):
        drawn()
        resumed = Draws()
        trainer = make_trainer(callbacks=[resumed], enable_checkpointing=False, **options)
        checkpoint = tmp_path / f"step={step}.ckpt"
        trainer.fit(make_module(**schedule), make_data(val=True), ckpt_path=checkpoint, weights_only=True)
        assert resumed.seen == whole.seen[step:], step


LIMITS = [{"max_epochs": 2}, {"max_epochs": 2, "max_steps": 100}, {"max_steps": 6}]


@pytest.mark.parametrize(
    ("save", "limits"),
    sweep_pairs(
        itertools.product(["batch", "epoch", "end"], LIMITS),
        quick=[("batch", LIMITS[0]), ("epoch", LIMITS[1]), ("end", LIMITS[2]), ("end", LIMITS[0])],
    ),
)
def test_a_run_that_stopped_at_the_end_of_an_epoch_continues_with_the_next(
    make_module, make_data, make_trainer, tmp_path, save, limits
):
    class Save(Callback):
        def __init__(self):
            self.hook = {"batch": "on_train_batch_end", "epoch": "on_train_epoch_end", "end": "on_train_end"}[save]
            setattr(self, self.hook, self.store)

        def store(self, trainer, *args):
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "stopped.ckpt")

    undisturbed, resumed = Draws(), Draws()
    runs = (
        [([undisturbed], limits), ([Save()], {"max_steps": 3})] if save == "end" else [([undisturbed, Save()], limits)]
    )
    for callbacks, limit in runs:
        make_trainer(callbacks=callbacks, enable_checkpointing=False, **limit).fit(make_module(), make_data())
    trainer = make_trainer(callbacks=[resumed], enable_checkpointing=False, **limits)
    trainer.fit(make_module(), make_data(), ckpt_path=tmp_path / "stopped.ckpt", weights_only=True)
    assert [number for number, _ in resumed.seen] == [number for number, _ in undisturbed.seen][3:]
    assert trainer.global_step == 6
    assert trainer.current_epoch == 2


def ranks_of(numbers_per_rank):
    """Buffers whose groups have the given numbers, each in the mini-batch number % 2."""
    states = []
    for numbers in numbers_per_rank:
        groups = [RolloutGroup(prompt_ids=[n], rollouts=[Rollout([n, n], reward=1.0)], group_id=n) for n in numbers]
        buffer = RolloutBuffer(groups, 3, 2, mini_batches=[n % 2 for n in numbers], updates_done=1)
        buffer.put("advantages", torch.tensor([float(n) for n in numbers for _ in range(2)]))
        states.append(buffer.state_dict())
    return states


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_rollouts_are_redistributed_within_their_mini_batches(num_ranks):
    per_rank = ranks_of([[0, 3, 4], [1, 2]])
    buffers = [RolloutBuffer.from_state_dict(redistribute(per_rank, rank, num_ranks)) for rank in range(num_ranks)]
    found = sorted(group.group_id for buffer in buffers for group in buffer.groups)
    assert found == [0, 1, 2, 3, 4]
    for buffer in buffers:
        assert buffer.mini_batches == [group.group_id % 2 for group in buffer.groups]
        assert buffer.joined("advantages").tolist() == [float(g.group_id) for g in buffer.groups for _ in range(2)]
        assert (buffer.rollout_number, buffer.updates_done) == (3, 1)


def test_a_rank_for_which_no_rollouts_are_left_trains_nothing():
    per_rank = ranks_of([[0], [1]])
    buffer = RolloutBuffer.from_state_dict(redistribute(per_rank, 2, 3))
    assert buffer.mini_batches == [-1]
    assert not buffer.joined("loss_mask").any()


class Hyperparameters(GRPO):
    """A user's module that saves some of its arguments."""

    def __init__(self, policy, rewards, scale=1.0, names=(), **options):
        super().__init__(policy, rewards, **options)
        self.save_hyperparameters(*names)


def test_plain_hyperparameters_are_loaded_and_others_refused_before_training(
    make_module, make_data, make_trainer, tmp_path
):
    plain = {"cls": Hyperparameters, "names": ["scale"]}
    make_trainer(max_steps=1, callbacks=[SafeCheckpoint(dirpath=tmp_path, every_n_train_steps=1)]).fit(
        make_module(**plain, scale=2.0), make_data()
    )
    resumed = make_trainer(max_steps=2)
    resumed.fit(make_module(**plain, scale=2.0), make_data(), ckpt_path=next(tmp_path.glob("*.ckpt")))
    assert resumed.global_step == 2
    trainer = make_trainer(max_steps=1)
    with pytest.raises(
        TypeError, match=r"checkpoint\['hyper_parameters'\]\['policy'\] is a TinyPolicy, and loading .*"
    ):
        trainer.fit(make_module(Hyperparameters), make_data())
    assert trainer.global_step == 0


class NumPyRate(GRPO):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.policy.parameters(), lr=np.float64(1e-3) * np.ones(1)[0])


class ExtraState(GRPO):
    def get_extra_state(self):
        return SamplingConfig()

    def set_extra_state(self, state):
        pass


@pytest.mark.parametrize(
    ("cls", "named"), [(NumPyRate, r"['optimizer_states'][0]['param_groups'][0]['lr']"), (ExtraState, "['state_dict']")]
)
def test_every_part_of_a_checkpoint_is_tried(make_module, make_data, make_trainer, tmp_path, cls, named):
    saves = SafeCheckpoint(dirpath=tmp_path, every_n_train_steps=1)
    with pytest.raises(TypeError, match=re.escape(f"checkpoint{named}")):
        make_trainer(max_steps=2, callbacks=[saves]).fit(make_module(cls), make_data())
    assert not list(tmp_path.rglob("*.ckpt"))


class Saves(Callback):
    """Puts something into each checkpoint, as a part of its state or of the checkpoint."""

    def __init__(self, value, place):
        self.value, self.place = value, place

    def state_dict(self):
        return {"numbers": [1, self.value]} if self.place == "state" else {}

    def on_save_checkpoint(self, trainer, module, checkpoint):
        if self.place == "checkpoint":
            checkpoint["mine"] = {"value": self.value}


@pytest.mark.parametrize(
    ("place", "named"), [("state", "['callbacks']['Saves']['numbers'][1]"), ("checkpoint", "['mine']['value']")]
)
@pytest.mark.parametrize("kind", [SafeCheckpoint, ModelCheckpoint])
def test_what_would_not_load_is_found_at_the_first_save(
    make_module, make_data, make_trainer, tmp_path, kind, place, named
):
    def fit(value):
        saves = kind(dirpath=tmp_path / type(value).__name__, every_n_train_steps=1, save_top_k=-1)
        make_trainer(max_steps=2, callbacks=[Saves(value, place), saves]).fit(make_module(), make_data())
        return len(list(tmp_path.rglob("*.ckpt")))

    for value in (SamplingConfig(), lambda: None, {1: object()}):
        with pytest.raises(TypeError, match=re.escape(f"checkpoint{named}")):
            fit(value)
    assert not list(tmp_path.rglob("*.ckpt"))
    assert fit(torch.ones(2, requires_grad=True)) == 2
    assert fit((1, "a", None, {"b": 2.0})) == 4
