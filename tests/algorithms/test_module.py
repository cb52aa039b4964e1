"""A module in a run: copies and overrides of it, Lightning's options and callbacks, loggers, and times of a step."""

from __future__ import annotations

import copy
import csv
import logging
import pickle
import posixpath
import random
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from helpers import tiny_runs
from helpers.copied_engine import CopiedPolicyEngine
from helpers.full_disk import full_disk
from helpers.sweeps import sweep
from helpers.tiny_runs import AHEAD, ScriptedEngine, TinyPolicy, same, share_of_letters
from helpers.worker_rewards import length, ruin
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelSummary,
    OnExceptionCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
)
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from transformers import AutoModelForCausalLM

from pl_grouprl.algorithms import GRPO, PPO, GroupPPO, OptimizerConfig
from pl_grouprl.callbacks import CompletionsTable, ExportPolicy, RunProgressBar, RunSummary, SafeCheckpoint
from pl_grouprl.data import PromptDataModule
from pl_grouprl.demo.tasks import digit_tokenizer
from pl_grouprl.models import LoRACritic, SharedTrunkCritic
from pl_grouprl.report import different_options, read_runs
from pl_grouprl.rollout.branching import Branching
from pl_grouprl.training import checks
from pl_grouprl.utilities.loggers import prepare_loggers

# A deep copy of a module, as callbacks that average weights make it.


@pytest.mark.parametrize("cls", [GRPO, PPO, GroupPPO])
def test_the_parts_of_a_copy_belong_to_the_copy(make_module, make_data, make_trainer, cls):
    module = make_module(cls)
    copied = copy.deepcopy(module)
    assert copied.rewarder._run is copied.sampler._run is copied.scorer._run is copied.collector._run is copied
    assert copied.sampler.tooling is copied.tooling
    assert copied.micro_batcher._choose_max_tokens.__self__ is copied.device_choices
    assert copied.device_choices._module is copied
    make_trainer(max_steps=1).fit(copied, make_data())
    assert copied.last_rollouts is not None
    assert module.policy is None


COPIED = [
    {},
    {"beta": 0.1, "reward_calls": {"workers": 1}, "rewards": length},
    AHEAD,
    {"sampling": {"max_new_tokens": 5, "stop": ("a",)}, "episodes": {"branching": Branching("every_n", every_n=2)}},
]


class Copies(Callback):
    """Copies the module in hooks, though the Trainer holds what cannot be copied, as it does with several ranks."""

    def __init__(self):
        self.copies = []

    def copy(self, trainer, module, *args, **options):
        trainer.strategy.lock = threading.Lock()
        self.copies.append(copy.deepcopy(module))

    setup = on_fit_start = on_train_batch_end = on_validation_batch_start = on_train_end = copy


@pytest.mark.parametrize("options", COPIED)
def test_a_copy_can_be_made_in_any_hook_and_has_the_models(fit, options):
    copies = Copies()
    trainer = {"val_check_interval": 1, "num_sanity_val_steps": 0}
    module = fit(steps=2, data={"val": True}, callbacks=[copies], trainer=trainer, **options).module
    assert len(copies.copies) == 7
    for copied in copies.copies:
        assert copied._trainer is None
        assert [p.shape for p in copied.parameters()] == [p.shape for p in module.parameters()]
        copied.configure_model()
        assert copied.engine is not module.engine


def test_an_engine_in_other_processes_is_shared_with_copies(make_module):
    module = make_module(engine=CopiedPolicyEngine())
    assert copy.deepcopy(module).engine is module.engine


class Average(Callback):
    """What a user writes: the mean of the weights after each step, from those at `setup` on."""

    def setup(self, trainer, module, stage):
        self.mean = [p.detach().clone() for p in module.parameters()]

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        for mean, weight in zip(self.mean, module.parameters(), strict=True):
            mean.lerp_(weight.detach(), 1 / (trainer.global_step + 1))

    def on_train_end(self, trainer, module):
        for mean, weight in zip(self.mean, module.parameters(), strict=True):
            weight.data.copy_(mean)


@pytest.mark.parametrize(("kind", "order"), [("ema", 1), ("swa", -1), ("own", 1), ("own", -1)])
def test_the_exported_policy_is_the_averaged_one(fit, tmp_path, kind, order):
    """Three steps in three epochs; w0 to w3 are the weights before and after each."""
    average = {
        "ema": EMAWeightAveraging(decay=0.5),
        "swa": StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1),
        "own": Average(),
    }[kind]
    callbacks = [average, ExportPolicy(tokenizer_attribute=None)][::order]
    run = fit(callbacks=callbacks, trainer={"max_epochs": 3, "limit_train_batches": 1, "max_steps": -1})
    w0, (w1, w2, w3) = list(TinyPolicy().load().parameters()), (list(weights.values()) for weights in run.weights)
    expected = {
        "ema": [b / 4 + c / 4 + d / 2 for b, c, d in zip(w1, w2, w3, strict=True)],  # it begins with w1
        "swa": [(a + b + c) / 3 for a, b, c in zip(w0, w1, w2, strict=True)],  # at the start of each epoch
        "own": [(a + b + c + d) / 4 for a, b, c, d in zip(w0, w1, w2, w3, strict=True)],
    }[kind]
    exported = AutoModelForCausalLM.from_pretrained(next(tmp_path.rglob("policy")))
    for weights in (run.module.policy.parameters(), exported.parameters()):
        torch.testing.assert_close(list(weights), expected, rtol=1e-6, atol=1e-7)
    assert not torch.equal(expected[0], w3[0])


@pytest.mark.parametrize(("cls", "options"), [(GRPO, {"beta": 0.1}), (PPO, {"critic": LoRACritic(r=2)})])
def test_a_run_with_an_average_resumes_exactly(fit, tmp_path, cls, options):
    def run(folder, steps, **kwargs):
        saves = SafeCheckpoint(dirpath=tmp_path / folder, every_n_train_steps=2)
        return fit(cls, steps=steps, callbacks=[EMAWeightAveraging(decay=0.5), saves], **kwargs, **options).module

    expected = run("whole", 4)
    run("kept", 2)
    resumed = run("again", 4, resume=str(next((tmp_path / "kept").glob("*step=2*.ckpt"))))
    assert same(resumed.policy.state_dict(), expected.policy.state_dict())


def test_a_module_is_set_up_once_and_before_its_models_are_loaded(fit, make_module, make_data):
    class Mine(GRPO):
        seen = ()

        def setup(self, stage):
            self.seen += (stage,)
            super().setup(stage)

        def load_models(self):
            self.seen += ("load",)
            super().load_models()

    class Clock(Callback):
        def setup(self, trainer, module, stage):
            self.had_models = module.policy is not None

    clock, module = Clock(), make_module(Mine)
    fit(module=module, data={"val": True}, callbacks=[clock]).trainer.validate(module, make_data(val=True))
    assert clock.had_models
    assert module.seen == ("fit", "load", "validate")


# Rewards, engines, callbacks and overrides that change what they are handed: the run is the same, bit for bit.


ROWS = [{"prompt": str(11 * n), "answer": "one", "extra_info": {"tags": [n]}} for n in range(10, 18)]


class RuinsBatches(Callback):
    """Ruins the prompts of a batch once the module has used them."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        for prompt in batch.prompts:
            ruin([prompt.token_ids, prompt.columns])


class RuinsOutputs(Callback):
    """Ruins what validation hands to callbacks."""

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        for group in outputs["groups"]:
            ruin([group.prompt_ids, group.columns, *(rollout.token_ids for rollout in group.rollouts)])


class RuinsGroups(GRPO):
    """Ruins the groups from which it computes advantages."""

    def compute_advantages(self, groups):
        advantages = super().compute_advantages(groups)
        for group in groups:
            ruin([group.prompt_ids, group.columns, *(rollout.token_ids for rollout in group.rollouts)])
        return advantages


class RuinsPrompts(ScriptedEngine):
    """An engine that changes the prompts that it was given."""

    def generate(self, prompts, sampling, **options):
        rollouts = super().generate(copy.deepcopy(prompts), sampling, **options)
        ruin(prompts)
        return rollouts


def letters(completions, completion_ids, prompts, **columns):
    return share_of_letters(completions)


def ruins_arguments(completions, completion_ids, prompts, **columns):
    rewards = share_of_letters(completions)
    ruin([completions, completion_ids, prompts, columns])
    return rewards


RUINS = {
    "reward": {"rewards": ruins_arguments},
    "engine": {"engine": RuinsPrompts()},
    "callback, batches": {"callbacks": [RuinsBatches()]},
    "callback, outputs": {"callbacks": [RuinsOutputs()]},
    "compute_advantages": {"cls": RuinsGroups},
}


def train_on_rows(folder, **options):
    """Two epochs with validation; the weights and the prompts of the data set."""
    data = PromptDataModule(ROWS, ROWS[:2], batch_size=4, tokenizer=digit_tokenizer())
    defaults = {"rewards": letters, "num_mini_batches": 2, "engine": ScriptedEngine()}
    run = tiny_runs.fit(folder, data=data, trainer={"max_epochs": 2, "max_steps": -1}, **{**defaults, **options})
    return run.weights[-1], [vars(prompt) for split in ("train", "val") for prompt in data.prompts[split]]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    return train_on_rows(tmp_path_factory.mktemp("untouched"))


@pytest.mark.parametrize("case", RUINS)
def test_training_and_data_are_those_of_a_run_that_changes_nothing(tmp_path, untouched, case):
    weights, prompts = train_on_rows(tmp_path, **RUINS[case])
    assert prompts == untouched[1]
    assert same(weights, untouched[0])


# What overridden methods return and raise.


def grpo(**methods):
    return type("Mine", (GRPO,), methods)


def advantages(value):
    return grpo(compute_advantages=lambda self, groups: value(sum(len(group.rollouts) for group in groups)))


def estimate(change):
    def own(self, rows, buffer, scores):
        return change(PPO.estimate(self, rows, buffer, scores))

    return type("Mine", (PPO,), {"estimate": own})


RESULTS = {
    "a list": (advantages(lambda n: [0.0] * n), "compute_advantages"),
    "per token": (advantages(lambda n: torch.zeros(40)), "compute_advantages"),
    "two axes": (advantages(lambda n: torch.zeros(n, 1)), "compute_advantages"),
    "nan": (advantages(lambda n: torch.full((n,), torch.nan)), "compute_advantages"),
    "bool": (advantages(lambda n: torch.ones(n).bool()), "compute_advantages"),
    "none": (advantages(lambda n: None), "compute_advantages"),
    "flat": (estimate(lambda own: own._replace(advantages=own.advantages.flatten())), "estimate: advantages"),
    "returns": (estimate(lambda own: own._replace(returns=own.returns * torch.nan)), "estimate: returns"),
    "numbers": (estimate(lambda own: own._replace(value_mask=own.value_mask.float())), "estimate: value_mask"),
}


@pytest.mark.parametrize("case", RESULTS)
def test_wrong_results_are_named(case, fit):
    cls, name = RESULTS[case]
    with pytest.raises((TypeError, ValueError), match=rf"Mine\.{name}"):
        fit(cls)


def end(*args, **kwargs):
    return next(iter([]))


@pytest.mark.parametrize(
    "method", ["generate", "compute_advantages", "compute_loss", "on_train_batch_start", "on_train_epoch_start"]
)
def test_a_stop_iteration_of_an_override_ends_the_run_with_an_error(fit, method):
    """Lightning would take it for the end of the data: `fit` would return, or with max_epochs=-1 never end."""
    with pytest.raises(RuntimeError, match=r"\w+\.\w+ raised StopIteration") as raised:
        fit(type("Mine", (GRPO,), {method: end, "__module__": __name__}), steps=2)
    assert isinstance(raised.value.__cause__, StopIteration)


@pytest.mark.parametrize(
    "hook",
    [
        *("on_train_epoch_start", "on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end"),
        *("on_validation_batch_start", "on_validation_end", "on_train_epoch_end"),
    ],
)
def test_a_stop_iteration_of_a_callback_ends_the_run_with_an_error(fit, hook):
    trainer = {"max_epochs": 2, "max_steps": -1, "num_sanity_val_steps": 0}
    with pytest.raises(RuntimeError, match=rf"Mine\.{hook} raised StopIteration"):
        fit(data={"train_size": 4, "val": True}, trainer=trainer, callbacks=[type("Mine", (Callback,), {hook: end})()])


@pytest.mark.parametrize("stage", ["validate", "predict"])
def test_a_stop_iteration_in_evaluation_is_an_error(make_module, make_trainer, make_data, stage):
    engine = type("Broken", (ScriptedEngine,), {"generate": end})()
    with pytest.raises(RuntimeError, match="batch_start raised StopIteration"):
        getattr(make_trainer(), stage)(make_module(engine=engine), make_data(val=True))


class Short(GRPO):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 1 else super().on_train_batch_start(batch, batch_idx)


class Manual(GRPO):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False


def test_other_overrides(fit, make_module):
    assert fit(Short, trainer={"max_epochs": 2, "max_steps": -1}).trainer.global_step == 2  # a hook ends the epoch
    whole = advantages(lambda n: torch.ones(n, dtype=torch.float64, requires_grad=True))
    assert fit(whole).trainer.global_step == 1
    with pytest.raises(ValueError, match=r"Manual\.automatic_optimization is False"):
        fit(Manual)
    with pytest.raises(ValueError, match=r"Mine\.compute_advantages would never be called: .*'reinforce_plus_plus'"):
        make_module(grpo(compute_advantages=lambda self, groups: None), advantage_estimator="reinforce_plus_plus")


# Callbacks, plugins and limits of Lightning. The training data has 12 prompts, so 3 batches of rollouts in an epoch.


def updates_of(callbacks=()):
    """The updates that were made: rollout and update index of each batch."""
    updates = []

    class Trained(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            updates.append((batch.rollout_number, batch.update_index))

    return updates, [Trained(), *callbacks]


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
def test_an_epoch_that_ends_between_the_updates_of_a_batch_of_rollouts_is_refused(fit, options, limit):
    ((name, value),) = limit.items()
    with pytest.raises(ValueError, match=rf"trainer\.{name} is {value}, .* make it a multiple of [24]\."):
        fit(trainer=limit, **options)


@pytest.mark.parametrize(("limit", "per_epoch"), [(4, 2), (7, 3), (0.4, 1), (1.0, 3)])  # 0.4 of 6 is 2
def test_an_epoch_that_ends_with_the_updates_of_a_batch_of_rollouts_trains_all(fit, limit, per_epoch):
    updates, callbacks = updates_of()
    trainer = {"max_epochs": 2, "max_steps": -1, "limit_train_batches": limit}
    fit(trainer=trainer, callbacks=callbacks, num_mini_batches=2)
    rollouts = [epoch * 3 + number for epoch in (0, 1) for number in range(per_epoch)]
    assert updates == [(number, update) for number in rollouts for update in (0, 1)]
    fit(trainer={"fast_dev_run": 1}, num_mini_batches=2)  # a trial may end between updates


def test_a_schedule_of_accumulation_is_checked_by_its_largest_value_and_resumes_exactly(fit, tmp_path):
    schedule = {0: 1, 1: 3}  # by epoch
    with pytest.raises(ValueError, match="accumulate_grad_batches is 3 with num_mini_batches=1 and num_iterations=2"):
        fit(callbacks=[GradientAccumulationScheduler(schedule)], num_iterations=2)
    with pytest.raises(ValueError, match="accumulate_grad_batches is 3 with a critic"):
        fit(PPO, callbacks=[GradientAccumulationScheduler(schedule)], critic=SharedTrunkCritic())

    def run(resume=None):
        saves = SafeCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        callbacks = [GradientAccumulationScheduler(schedule), *([] if resume else [saves])]
        trainer = {"max_epochs": 3, "max_steps": -1}
        return fit(callbacks=callbacks, trainer=trainer, num_mini_batches=2, resume=resume)

    whole = run()
    assert whole.trainer.global_step == 6 + 2 + 2
    for step in (5, 6, 7):  # within the first epoch, at its end, within the second
        resumed = run(resume=step)
        assert resumed.trainer.global_step == 10
        assert same(whole.weights[-1], resumed.weights[-1])


def test_an_asynchronous_plugin_is_refused_by_the_callback_that_verifies(fit):
    with pytest.raises(ValueError, match=r"plugins has AsyncCheckpointIO"):
        fit(callbacks=[SafeCheckpoint()], trainer={"plugins": [AsyncCheckpointIO()]})


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
def fit_broken(fit, make_module, tmp_path):
    """Fit with a callback that saves on the exception; returns counts, updates and weights."""

    def run(options, limits, place=None, step=0, resume=None):
        seed_everything(1, verbose=False)
        module = make_module(Broken, **{"rewards": noisy_share_of_letters, **options}).break_at(place, step)
        updates, callbacks = updates_of([Breaks(), OnExceptionCheckpoint(tmp_path)])
        trainer = {"val_check_interval": 2, **limits}
        own = fit(module=module, steps=8, data={"val": True}, callbacks=callbacks[::-1], trainer=trainer, resume=resume)
        counts = own.trainer.global_step, own.trainer.fit_loop.epoch_loop._batches_that_stepped, module.num_tokens
        return counts, updates, own.weights[-1]

    return run


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


@pytest.mark.parametrize(
    "case", sweep(WITHIN, {"compute_advantages 4", "compute_loss 3", "compute_loss 5", "accumulating 6"})
)
def test_a_checkpoint_written_within_a_batch_resumes_exactly(fit_broken, tmp_path, case):
    limits, options, place, step = WITHIN[case]
    key = str((options, limits))
    _WHOLE[key] = _WHOLE.get(key) or fit_broken(options, limits)
    counts, updates, weights = _WHOLE[key]
    with pytest.raises(RuntimeError, match="broken"):
        fit_broken(options, limits, place, step)
    resumed_counts, resumed, resumed_weights = fit_broken(options, limits, resume=tmp_path / "on_exception.ckpt")
    assert resumed == updates[step * limits.get("accumulate_grad_batches", 1) :]
    assert resumed_counts == counts
    assert same(weights, resumed_weights)


@pytest.mark.parametrize(
    ("options", "limits", "place", "reason"),
    [
        ({}, {}, "optimizer_step", "the optimizer's step has begun"),
        ({**AHEAD, "num_generations": 2}, {}, "compute_advantages", "rollouts have left the queue"),
        ({}, {"accumulate_grad_batches": 2}, "on_before_optimizer_step", "gradients are accumulating over several"),
    ],
)
def test_a_checkpoint_within_a_batch_that_cannot_be_repeated_is_refused(
    fit_broken, tmp_path, options, limits, place, reason
):
    with pytest.raises(RuntimeError, match=f"no checkpoint is saved within this batch, .*: {reason}"):
        fit_broken(options, limits, place, 1 if place == "optimizer_step" else 0)
    assert not list(tmp_path.glob("*.ckpt"))


def test_weights_trained_in_processes_that_a_launcher_forked_come_back(fit, monkeypatch):
    """`ddp_notebook`, which Lightning chooses in notebooks, has the same launcher."""
    monkeypatch.setenv("MASTER_PORT", "0")  # the launcher sets it
    alone, forked = (fit(steps=2, beta=0.1, trainer={"strategy": name}).module for name in ("auto", "ddp_fork"))
    torch.testing.assert_close(forked.policy.state_dict(), alone.policy.state_dict())
    torch.testing.assert_close(forked.reference.state_dict(), alone.reference.state_dict())


def test_a_module_can_be_sent_to_a_process_that_a_launcher_spawns(make_module):
    module = pickle.loads(pickle.dumps(make_module(beta=0.1)))
    module.configure_model()
    assert not [name for name in module.state_dict() if name.startswith("reference")]
    assert not module.load_state_dict(module.state_dict()).missing_keys


# A run by `Trainer(max_steps=...)` and nothing else.


SUMMARY = RunSummary(curves_filename=None)  # drawing takes longer than a step


@pytest.fixture
def fit_plain(make_module, make_data, tmp_path):
    def run(**options):
        options = {"logger": CSVLogger(tmp_path, name="", version=0)} | options
        options = {"enable_progress_bar": False, "enable_checkpointing": False, "max_steps": 2} | options
        trainer = Trainer(accelerator="cpu", default_root_dir=tmp_path, **options)
        trainer.fit(make_module(engine=ScriptedEngine(), beta=0.1), make_data())
        return trainer

    return run


def test_it_keeps_curves_a_summary_and_every_step(fit_plain, tmp_path, capfd):
    fit_plain()
    folder = tmp_path / "version_0"
    assert {"curves.png", "summary.json", "metrics.csv"} <= {path.name for path in folder.iterdir()}
    with (folder / "metrics.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file) if row["reward"]] == ["0", "1"]
    printed = capfd.readouterr()
    assert "Run summary: 2 steps" in printed.out
    assert "FLOPs" not in printed.out + printed.err
    assert "weights are trained" in printed.out


@pytest.mark.parametrize(("cls", "name"), [(GRPO, "grpo"), (GroupPPO, "group_ppo"), (type("Mine", (PPO,), {}), "ppo")])
def test_the_trainers_own_logger_writes_where_the_configurations_do(make_module, make_trainer, tmp_path, cls, name):
    trainer, module, folder = make_trainer(logger=True), make_module(cls), tmp_path / "runs" / name
    assert "lightning_logs" in trainer.log_dir
    module.trainer = trainer
    assert Path(trainer.log_dir) == folder / "version_0"
    (folder / "version_0").mkdir(parents=True)
    for logger, place in (
        (True, folder / "version_1"),
        (CSVLogger(tmp_path / "own"), tmp_path / "own" / "lightning_logs" / "version_0"),
        (CSVLogger(tmp_path, version="mine"), tmp_path / "lightning_logs" / "mine"),
        (TensorBoardLogger(tmp_path, version=7), tmp_path / "lightning_logs" / "version_7"),
    ):
        module.trainer = trainer = make_trainer(logger=logger)
        assert Path(trainer.log_dir) == place


def test_a_run_and_its_evaluations_are_in_one_place(make_module, make_data, make_trainer, tmp_path):
    callbacks = [SafeCheckpoint(), CompletionsTable(filename=None, console=False), ExportPolicy(), RunSummary()]
    make_trainer(callbacks=callbacks).validate(make_module(), make_data(val=True), verbose=False)
    assert not list(tmp_path.iterdir())  # nothing was written
    callbacks = [SafeCheckpoint(every_n_train_steps=1), CompletionsTable(console=False)]
    trainer = make_trainer(logger=True, max_steps=1, callbacks=callbacks)
    trainer.fit(make_module(engine=ScriptedEngine()), make_data())
    trainer.validate(make_module(engine=ScriptedEngine()), make_data(val=True), ckpt_path="last", verbose=False)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    run = tmp_path / "runs" / "grpo" / "version_0"
    assert list(run.parent.iterdir()) == [run]
    assert {"checkpoints", "completions.jsonl", "val_completions.jsonl"} < {path.name for path in run.iterdir()}


def test_without_a_logger_it_writes_nothing(fit_plain, make_module, make_data, monkeypatch, tmp_path, caplog):
    lines = []
    monkeypatch.setattr(checks, "rank_zero_info", lines.append)
    trainer = fit_plain(logger=False)
    assert len(lines) == 1  # models that share are named once
    assert "encoded once by policy and reference (Qwen3ForCausalLM, attention backend 'auto'" in lines[0]
    assert not any(isinstance(own, RunSummary) for own in trainer.callbacks)
    assert not list(tmp_path.iterdir())
    first = list(trainer.callbacks)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        trainer.validate(make_module(), make_data(val=True), verbose=False)
    assert "override" not in caplog.text  # another run of the Trainer reports no overridden callbacks
    assert [type(own) for own in trainer.callbacks] == [type(own) for own in first]


def test_what_the_trainer_is_given_stays(fit_plain):
    summary, table = RunSummary(curves_filename=None), ModelSummary(max_depth=0)
    theme = RichProgressBarTheme(metrics="red")
    callbacks = [summary, table, RichProgressBar(refresh_rate=3, theme=theme)]
    trainer = fit_plain(callbacks=callbacks, log_every_n_steps=49, enable_progress_bar=True)
    assert [own for own in trainer.callbacks if isinstance(own, RunSummary)] == [summary]
    assert [own._max_depth for own in trainer.callbacks if isinstance(own, ModelSummary)] == [0]
    assert trainer.log_every_n_steps == 49
    bar = trainer.progress_bar_callback  # Lightning's is replaced, with its options
    assert type(bar) is RunProgressBar
    assert (bar.refresh_rate, bar.theme) == (3, theme)


def test_options_of_runs_are_recorded_for_the_report(fit, tmp_path):
    for seed, rate in enumerate((1e-2, 1e-2, 1e-3)):
        logger = CSVLogger(tmp_path, name="", version=seed)
        own = {"engine": ScriptedEngine(), "optimizer": OptimizerConfig(rate)}
        fit(seed=seed, callbacks=[SUMMARY], trainer={"logger": logger}, **own)
    runs = read_runs([tmp_path / f"version_{seed}" for seed in range(3)])
    assert different_options(runs) == {"seed": [0, 1, 2], "optimizer.learning_rate": [1e-2, 1e-2, 1e-3]}
    assert runs[0].options["engine"].endswith("tiny_runs.ScriptedEngine")
    assert runs[0].options["trainer.max_steps"] == 1


# Loggers: what they cannot write is a warning, and what a former run wrote stays.


def loggers(folder, **options):
    return [CSVLogger(folder, name="own", **options), TensorBoardLogger(folder, name="own", **options)]


@pytest.mark.usefixtures("capsys")  # output that is captured in memory has no limit
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_loggers_that_cannot_write_warn_once_and_training_continues(fit, tmp_path):
    own = loggers(tmp_path)
    own[0]._flush_logs_every_n_steps = 1
    with full_disk(1500), pytest.warns(UserWarning, match="cannot write to") as recorded:
        run = fit(steps=6, trainer={"logger": own, "log_every_n_steps": 1})
    assert run.trainer.global_step == 6
    told = sorted(str(one.message) for one in recorded if "cannot write to" in str(one.message))
    assert {warning.partition(" ")[0] for warning in told} == {"CSVLogger", "RunSummary", "TensorBoardLogger"}
    assert len(set(told)) == len(told)
    assert all(f" cannot write to {tmp_path}/own/version_0" in warning for warning in told)
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["version_0"]  # all loggers share it
    assert (tmp_path / "own" / "version_0" / "metrics.csv").is_file()


def test_a_fixed_version_keeps_the_metrics_of_former_runs(fit, make_module, make_data, tmp_path):
    (tmp_path / "file").write_text("a file")
    with pytest.raises(OSError, match="file"):
        fit(trainer={"logger": CSVLogger(tmp_path, name="file", version=0)})
    folder = tmp_path / "own" / "fixed"
    for _ in range(3):
        logger = CSVLogger(tmp_path, name="own", version="fixed")
        trainer = fit(callbacks=[SUMMARY], trainer={"logger": logger, "log_every_n_steps": 1}).trainer
    written = [(folder / name).read_text() for name in ("metrics_1.csv", "metrics_2.csv", "metrics.csv")]
    assert all("reward" in text for text in written)
    trainer.fit(make_module(), make_data())  # the same logger goes on
    assert not (folder / "metrics_3.csv").exists()


def test_two_runs_at_once_do_not_write_one_file(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        folder = tmp_path / "own" / "fixed"
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text("step\n")
        (tmp_path / "own" / ".fixed.writer").write_text(f"{socket.gethostname()}-{other.pid}")
        logger = CSVLogger(tmp_path, name="own", version="fixed")
        with pytest.raises(ValueError, match=rf"another run \(process {other.pid}\)"):
            prepare_loggers([logger])
        other.communicate(b"\n")
    prepare_loggers([logger])
    assert (folder / "metrics_1.csv").read_text() == "step\n"
    logger.finalize("success")
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["fixed"]


class Particular(CSVLogger):
    def log_metrics(self, metrics, step=None):
        if "loss" in metrics:
            raise KeyError("no such metric")
        super().log_metrics(metrics, step)

    def log_hyperparams(self, *args, **kwargs):
        raise ValueError("too long")

    def finalize(self, status):
        super().finalize(status)
        raise RuntimeError("not my run")


def test_no_complaint_of_a_logger_ends_a_run_and_it_gets_what_it_takes(fit, tmp_path):
    logger = Particular(tmp_path, version="own")
    with pytest.warns(UserWarning, match="Particular") as recorded:
        run = fit(steps=2, callbacks=[SUMMARY], trainer={"log_every_n_steps": 1, "logger": logger})
    said = [str(one.message) for one in recorded if str(one.message).startswith("Particular")]
    with pytest.warns(UserWarning, match="Particular raised too long; training continues"):
        run.trainer.logger.log_hyperparams({})
    assert len(said) == 2
    assert "the metrics loss ('no such metric')" in said[0]
    assert "not my run" in said[1]
    with open(tmp_path / "lightning_logs" / "own" / "metrics.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert "loss" not in rows[0]
    assert {row["step"] for row in rows if row["reward"]} == {"0", "1"}


class Recorded(MLFlowLogger):
    """Checks names as MLflow does, and keeps them."""

    run_id = "run"

    def __init__(self):
        self.names, self._prefix, self._log_batch_kwargs = [], "", {}  # and nothing that opens MLflow

    @property
    def experiment(self):
        return self

    def log_batch(self, run_id, metrics, **options):
        for name in (metric.key for metric in metrics):
            assert re.fullmatch(r"[\w/. -]{1,250}", name, flags=re.ASCII)
            assert posixpath.normpath(name) == name
            assert not name.startswith(("/", "../"))
        self.names += [metric.key for metric in metrics]


def test_mlflow_gets_one_name_for_each_metric():
    pytest.importorskip("mlflow")
    sources = [
        "openai/gsm8k", "math (hard)", "a+b", "ab", "a b", "a-b", "数学", "数", "学", "\\x1b", "-", "AIME-2024",
    ]  # fmt: skip
    metrics = {f"val/{source}/mean@2": 0.5 for source in sources} | {"loss": 1.0, "time/step": 2.0}
    logger = Recorded()
    prepare_loggers([logger])
    logger.log_metrics(metrics, step=1)
    logger.log_metrics(metrics, step=2)
    assert logger.names[0] == "val/openai/gsm8k/mean-at-2"
    assert logger.names[: len(metrics)] == logger.names[len(metrics) :]
    assert len(set(logger.names)) == len(metrics)
    assert {"loss", "time/step", "val/ab/mean-at-2"} <= set(logger.names)


def test_prepared_loggers_are_what_they_were(tmp_path):
    own = loggers(tmp_path)
    for _ in range(2):
        prepare_loggers(own)
    for logger, kind in zip(own, (CSVLogger, TensorBoardLogger), strict=True):
        assert isinstance(logger, kind)
        assert isinstance(logger, Logger)
        assert type(logger).__name__ == kind.__name__
        copy = pickle.loads(pickle.dumps(logger))
        assert type(copy) is kind
        assert copy.log_dir == logger.log_dir
