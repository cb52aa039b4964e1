"""A deep copy of a module, as callbacks that average weights make it, and what such callbacks need of a run."""

import copy
import threading

import pytest
import torch
from helpers.copied_engine import CopiedPolicyEngine
from helpers.worker_rewards import length
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from transformers import AutoModelForCausalLM

from pl_grouprl.algorithms import GRPO, PPO, GroupPPO
from pl_grouprl.callbacks import ExportPolicy, SafeCheckpoint
from pl_grouprl.models import LoRACritic
from pl_grouprl.rollout.branching import Branching
from pl_grouprl.types import SamplingConfig


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


OPTIONS = [
    {},
    {"beta": 0.1, "reward_calls": {"workers": 1}, "rewards": length},
    {"max_staleness": 1, "importance_sampling": {"mode": "token_truncate"}},
    {
        "sampling": SamplingConfig(max_new_tokens=5, stop=("a",)),
        "episodes": {"branching": Branching("every_n", every_n=2)},
    },
]


class Copies(Callback):
    """Copies the module in each hook, though the Trainer holds what cannot be copied, as it does with several ranks."""

    def __init__(self):
        self.copies = {}

    def _copy(self, name, trainer, module):
        trainer.strategy.lock = threading.Lock()
        self.copies[name] = copy.deepcopy(module)

    def setup(self, trainer, module, stage):
        self._copy("setup", trainer, module)

    def on_fit_start(self, trainer, module):
        self._copy("on_fit_start", trainer, module)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self._copy("on_train_batch_end", trainer, module)

    def on_validation_batch_start(self, trainer, module, batch, batch_idx):
        self._copy("on_validation_batch_start", trainer, module)

    def on_train_end(self, trainer, module):
        self._copy("on_train_end", trainer, module)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_copy_can_be_made_in_any_hook_and_has_the_models(make_module, make_data, make_trainer, options):
    copies = Copies()
    module = make_module(**options)
    make_trainer(max_steps=2, callbacks=[copies], val_check_interval=1).fit(module, make_data(val=True))
    assert len(copies.copies) == 5
    for copied in copies.copies.values():
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


class Steps(Callback):
    """The weights at the start and after each step."""

    def on_train_start(self, trainer, module):
        self.weights = [[p.detach().clone() for p in module.parameters()]]

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.weights.append([p.detach().clone() for p in module.parameters()])


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("kind", ["ema", "swa", "own"])
def test_the_exported_policy_is_the_averaged_one(make_module, make_data, make_trainer, tmp_path, kind, order):
    """Three steps in three epochs; w0 to w3 are the weights before and after each."""
    average = {
        "ema": EMAWeightAveraging(decay=0.5),
        "swa": StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1),
        "own": Average(),
    }[kind]
    steps, module = Steps(), make_module()
    callbacks = [average, ExportPolicy(tokenizer_attribute=None)][::order]
    make_trainer(max_epochs=3, limit_train_batches=1, max_steps=-1, callbacks=[steps, *callbacks]).fit(
        module, make_data()
    )
    w0, w1, w2, w3 = steps.weights
    expected = {
        "ema": [b / 4 + c / 4 + d / 2 for b, c, d in zip(w1, w2, w3, strict=True)],  # it begins with w1
        "swa": [(a + b + c) / 3 for a, b, c in zip(w0, w1, w2, strict=True)],  # at the start of each epoch
        "own": [(a + b + c + d) / 4 for a, b, c, d in zip(w0, w1, w2, w3, strict=True)],
    }[kind]
    exported = AutoModelForCausalLM.from_pretrained(next(tmp_path.rglob("policy")))
    for weights in (module.policy.parameters(), exported.parameters()):
        torch.testing.assert_close(list(weights), expected, rtol=1e-6, atol=1e-7)
    assert not torch.equal(expected[0], w3[0])


@pytest.mark.parametrize(("cls", "options"), [(GRPO, {"beta": 0.1}), (PPO, {"critic": LoRACritic(r=2)})])
def test_a_run_with_an_average_resumes_exactly(make_module, make_data, make_trainer, tmp_path, cls, options):
    def fit(steps, **kwargs):
        module = make_module(cls, **options)
        callbacks = [EMAWeightAveraging(decay=0.5), SafeCheckpoint(dirpath=tmp_path / "kept", every_n_train_steps=2)]
        make_trainer(max_steps=steps, callbacks=callbacks).fit(module, make_data(), **kwargs)
        return dict(module.policy.named_parameters())

    expected = fit(4)
    whole = tmp_path / "kept"
    whole.rename(tmp_path / "whole")
    fit(2)
    resumed = fit(4, ckpt_path=str(next(whole.glob("*step=2*.ckpt"))))
    torch.testing.assert_close(resumed, expected, rtol=0, atol=0)


class Clock(Callback):
    def setup(self, trainer, module, stage):
        self.had_models = module.policy is not None


def test_a_module_is_set_up_once_and_before_its_models_are_loaded(make_module, make_data, make_trainer):
    class Mine(GRPO):
        seen = ()

        def setup(self, stage):
            self.seen += (stage,)
            super().setup(stage)

        def load_models(self):
            self.seen += ("load",)
            super().load_models()

    module, clock = make_module(Mine), Clock()
    trainer = make_trainer(max_steps=1, callbacks=[clock])
    trainer.fit(module, make_data(val=True))
    trainer.validate(module, make_data(val=True))
    assert clock.had_models
    assert module.seen == ("fit", "load", "validate")
