"""What overridden methods return and raise: the error names class and method."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback

from pl_grouprl.algorithms import GRPO, PPO, Estimate


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
    "flat advantages": (
        estimate(lambda own: own._replace(advantages=own.advantages.flatten())),
        "estimate: advantages",
    ),
    "returns with nan": (
        estimate(lambda own: Estimate(own.advantages, own.returns * torch.nan, own.value_mask)),
        "estimate: returns",
    ),
    "a mask of numbers": (
        estimate(lambda own: own._replace(value_mask=own.value_mask.float())),
        "estimate: value_mask",
    ),
}


@pytest.mark.parametrize("case", RESULTS)
def test_wrong_results_are_named(case, make_module, make_data, make_trainer):
    cls, name = RESULTS[case]
    module = make_module(cls, sampling={"max_new_tokens": 5})
    with pytest.raises((TypeError, ValueError), match=rf"Mine\.{name}"):
        make_trainer(max_steps=1).fit(module, datamodule=make_data())


def test_whole_numbers_with_gradient_are_taken(make_module, make_data, make_trainer):
    def compute_advantages(self, groups):
        return torch.ones(sum(len(group.rollouts) for group in groups), dtype=torch.float64, requires_grad=True)

    trainer = make_trainer(max_steps=1)
    trainer.fit(make_module(grpo(compute_advantages=compute_advantages)), datamodule=make_data())
    assert trainer.global_step == 1


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
