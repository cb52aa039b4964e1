"""What overridden methods return: class and method, what was found and what was expected are in the error."""

from __future__ import annotations

import re

import pytest
import torch
from lightning.pytorch import Callback

from pl_grouprl.algorithms import GRPO, PPO, Estimate, LossSums


def grpo(**methods):
    return type("Mine", (GRPO,), methods)


def advantages(value):
    return grpo(compute_advantages=lambda self, groups: value(sum(len(group.rollouts) for group in groups)))


def loss(change):
    return grpo(compute_loss=lambda self, batch: change(GRPO.compute_loss(self, batch)))


def estimate(change):
    def own(self, rows, buffer, scores):
        return change(PPO.estimate(self, rows, buffer, scores))

    return type("Mine", (PPO,), {"estimate": own})


RESULTS = {
    "a list": (
        advantages(lambda n: [0.0] * n),
        "Mine.compute_advantages returned a list; expected a tensor of shape [16]",
    ),
    "per token": (
        advantages(lambda n: torch.zeros(40)),
        "returned shape [40]; expected a tensor of shape [16], one number",
    ),
    "two axes": (advantages(lambda n: torch.zeros(n, 1)), "Mine.compute_advantages returned shape [16, 1]; expected"),
    "nan": (advantages(lambda n: torch.full((n,), torch.nan)), "Mine.compute_advantages returned 16 of 16 values that"),
    "bool": (advantages(lambda n: torch.ones(n).bool()), "Mine.compute_advantages returned torch.bool; expected"),
    "none": (advantages(lambda n: None), "Mine.compute_advantages returned a NoneType; expected"),
    "a tensor for terms": (
        loss(lambda own: own.losses["policy"][0]),
        "Mine.compute_loss returned a Tensor; expected LossSums",
    ),
    "no pair": (
        loss(lambda own: LossSums({"policy": own.losses["policy"][0]}, {})),
        "Mine.compute_loss: losses['policy'] is a Tensor; expected a sum and its count",
    ),
    "no scalar": (
        loss(lambda own: LossSums({"policy": (own.losses["policy"][0] * torch.ones(3), torch.ones(()))}, {})),
        "Mine.compute_loss: the sum of losses['policy'] has shape [3]; expected a scalar tensor, shape []",
    ),
    "a number as count": (
        loss(lambda own: LossSums({"policy": (own.losses["policy"][0], 3.0)}, {})),
        "Mine.compute_loss: the count of losses['policy'] is a float; expected a scalar tensor",
    ),
    "no estimate": (estimate(lambda own: own.advantages), "Mine.estimate returned a Tensor; expected an Estimate"),
    "flat advantages": (
        estimate(lambda own: own._replace(advantages=own.advantages.flatten())),
        "Mine.estimate: advantages returned shape [80]; expected a tensor of shape [16, 5], [rollouts,",
    ),
    "returns with nan": (
        estimate(lambda own: Estimate(own.advantages, own.returns * torch.nan, own.value_mask)),
        "Mine.estimate: returns returned 80 of 80 values that are NaN or infinite",
    ),
    "a mask of numbers": (
        estimate(lambda own: own._replace(value_mask=own.value_mask.float())),
        "Mine.estimate: value_mask returned torch.float32; expected a tensor of shape [16, 5]",
    ),
}


@pytest.mark.parametrize("case", RESULTS)
def test_wrong_results_are_named(case, make_module, make_data, make_trainer):
    cls, message = RESULTS[case]
    module = make_module(cls, sampling={"max_new_tokens": 5})
    with pytest.raises((TypeError, ValueError)) as error:
        make_trainer(max_steps=1).fit(module, datamodule=make_data())
    assert message in str(error.value)


def test_wrong_denominators_are_named(make_module, make_data, make_trainer):
    cls = grpo(loss_denominators=lambda self, tokens, rollouts: {"policy": tokens["loss_mask"]})
    module = make_module(cls, max_tokens_per_micro_batch=32)
    with pytest.raises(
        ValueError, match=r"Mine.loss_denominators: 'policy' has shape \[\d+\]; expected a scalar tensor"
    ):
        make_trainer(max_steps=1).fit(module, datamodule=make_data())


def test_whole_numbers_with_gradient_are_taken(make_module, make_data, make_trainer):
    def compute_advantages(self, groups):
        return torch.ones(sum(len(group.rollouts) for group in groups), dtype=torch.float64, requires_grad=True)

    trainer = make_trainer(max_steps=1)
    trainer.fit(make_module(grpo(compute_advantages=compute_advantages)), datamodule=make_data())
    assert trainer.global_step == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate_grad_batches": 0}, "trainer.accumulate_grad_batches is 0; it must be a whole number, at least 1"),
        (
            {"val_check_interval": 0, "check_val_every_n_epoch": None},
            "trainer.val_check_interval is 0; it must be larger",
        ),
        ({"check_val_every_n_epoch": 0}, "trainer.check_val_every_n_epoch is 0; it must be a whole number"),
        ({"gradient_clip_val": -1.0}, "trainer.gradient_clip_val is -1.0; it must be 0"),
        ({"limit_train_batches": 0}, "trainer.limit_train_batches is 0; it must be larger than 0"),
        ({"max_steps": 0}, "trainer.max_steps is 0; it must be at least 1"),
        ({"max_epochs": 0}, "trainer.max_epochs is 0; it must be at least 1"),
    ],
)
def test_options_of_the_trainer(options, message, make_module, make_data, make_trainer):
    trainer = make_trainer(**{"max_steps": 1, **options})
    with pytest.raises(ValueError, match=re.escape(message)):
        trainer.fit(make_module(), datamodule=make_data(val=True))


def end(*args, **kwargs):
    return next(iter([]))


MODULE_METHODS = ["generate", "compute_advantages", "compute_loss", "on_train_batch_start", "on_train_epoch_start"]
CALLBACK_HOOKS = [
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_batch_start",
    "on_validation_end",
    "on_train_epoch_end",
]


@pytest.mark.parametrize("method", MODULE_METHODS)
def test_a_stop_iteration_of_an_override_ends_the_run_with_an_error(make_module, make_trainer, make_data, method):
    """Lightning would take it for the end of the data: `fit` would return, or with max_epochs=-1 never end."""
    module = make_module(type("Mine", (GRPO,), {method: end, "__module__": __name__}))
    with pytest.raises(RuntimeError, match=r"\w+\.\w+ raised StopIteration") as raised:
        make_trainer(max_steps=2).fit(module, make_data())
    assert isinstance(raised.value.__cause__, StopIteration)


@pytest.mark.parametrize("hook", CALLBACK_HOOKS)
def test_a_stop_iteration_of_a_callback_ends_the_run_with_an_error(make_module, make_trainer, make_data, hook):
    callback = type("Mine", (Callback,), {hook: end})()
    trainer = make_trainer(max_epochs=2, callbacks=[callback], num_sanity_val_steps=0, enable_checkpointing=False)
    with pytest.raises(RuntimeError, match=rf"Mine\.{hook} raised StopIteration"):
        trainer.fit(make_module(), make_data(val=True))


@pytest.mark.parametrize("run", ["validate", "predict"])
def test_a_stop_iteration_in_evaluation_is_an_error(make_module, make_trainer, make_data, run):
    class Broken:
        def bind(self, model, tokenizer=None):
            pass

        generate = end

    with pytest.raises(RuntimeError, match="batch_start raised StopIteration"):
        getattr(make_trainer(), run)(make_module(engine=Broken()), make_data(val=True))


def test_a_hook_may_still_end_the_epoch(make_module, make_trainer, make_data):
    class Short(GRPO):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 1 else super().on_train_batch_start(batch, batch_idx)

    trainer = make_trainer(max_epochs=2)
    trainer.fit(make_module(Short), make_data())
    assert trainer.global_step == 2
