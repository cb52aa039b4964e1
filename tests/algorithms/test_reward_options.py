"""Options about rewards: workers train as the process itself does, and what cannot be honoured is refused."""

import math

import pytest
import torch
from helpers.worker_rewards import blocks, length, never, patient, raises_always
from lightning.pytorch import Callback

from pl_grouprl.rewards import Weighted
from pl_grouprl.rewards import workers as workers_module


class Stays:
    stays_in_process = True

    def __call__(self, completions):
        return length(completions)


def test_workers_change_nothing_and_end_with_the_run(
    make_module, make_data, make_trainer, scripted_engine, parameters, monkeypatch
):
    made = []
    new = workers_module._Worker.start
    monkeypatch.setattr(workers_module._Worker, "start", lambda self: (made.append(self), new(self)))
    trained = []
    for options in ({}, {"reward_calls": {"workers": 2, "timeout": 60.0}}):
        module = make_module(rewards=length, engine=scripted_engine, num_iterations=2, **options)
        make_trainer(max_steps=2, limit_val_batches=1).fit(module, make_data(val=True))
        trained.append(parameters(module))
    for alone, beside in zip(*trained, strict=True):
        assert torch.equal(alone, beside)
    assert [worker.is_alive() for worker in made] == [False, False]
    assert [worker.process.pid for worker in made] == [None, None]


def test_failures_are_judged_by_the_options(make_module, make_data, make_trainer, scripted_engine):
    def fit(**calls):
        reward_calls = {"workers": 1, **calls}
        module = make_module(rewards=raises_always, engine=scripted_engine, reward_calls=reward_calls)
        make_trainer(max_steps=1).fit(module, make_data())
        return module

    module = fit(max_failed_share=1.0, retries=0)
    assert module.last_rollouts.metrics["rewards/raises_always/invalid"] == 16.0
    with pytest.raises(RuntimeError, match=r"'raises_always' raised OSError.*failed for 16 of 16 .*=0.25"):
        fit(max_failed_share=0.25)


def test_weights_may_change_during_a_run(make_module, make_data, make_trainer, scripted_engine):
    weighted, means = Weighted(length), []

    class Anneal(Callback):
        def on_train_batch_end(self, trainer, module, *args):
            means.append(module.last_rollouts.metrics["reward"] / module.last_rollouts.metrics["rewards/length/mean"])
            weighted.weight = 10.0

    module = make_module(rewards=[weighted], engine=scripted_engine)
    make_trainer(max_steps=2, callbacks=[Anneal()]).fit(module, make_data())
    assert means == pytest.approx([1.0, 10.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward_calls": {"workers": -1}}, r"reward_calls.workers is -1; it must be 0 \(none\) or larger"),
        (
            {"reward_calls": {"timeout": 3.0}, "rewards": [length, patient]},
            r"reward_calls.timeout is 3.0 with reward_calls.workers=0, and \['length'\]",
        ),
        (
            {"reward_calls": {"timeout": 3.0}, "rewards": length},
            r"with reward_calls.workers=0, and \['length'\] run in this process",
        ),
        ({"reward_calls": {"timeout": 3.0}, "rewards": Stays()}, r"reward_calls.timeout is 3.0 .*\['Stays'\]"),
        ({"reward_calls": {"workers": 1, "timeout": 0.0}}, "reward_calls.timeout is 0.0; it must be larger than 0"),
        (
            {"reward_calls": {"workers": 1, "timeout": math.nan}},
            "reward_calls.timeout is nan; it must be larger than 0",
        ),
        ({"reward_calls": {"retries": -1}}, "reward_calls.retries is -1; it must be 0 or larger"),
        ({"reward_calls": {"max_failed_share": 1.5}}, r"max_failed_share is 1.5; it must be in \[0, 1\]"),
    ],
)
def test_options_out_of_range_are_refused(make_module, options, message):
    with pytest.raises(ValueError, match=message):
        make_module(**options)


def test_async_functions_have_a_time_limit_without_workers(make_module, make_data, make_trainer, scripted_engine):
    def fit(rewards):
        module = make_module(rewards=rewards, engine=scripted_engine, reward_calls={"timeout": 0.5})
        make_trainer(max_steps=1).fit(module, make_data())

    fit(patient)
    with pytest.raises(RuntimeError, match=r"'never' took longer than reward_calls.timeout=0.5 seconds"):
        fit(never)
    with pytest.raises(RuntimeError, match=r"'blocks' took longer than reward_calls.timeout=0.5 seconds .*event loop"):
        fit(blocks)


def test_functions_that_workers_cannot_run_are_refused_at_setup(make_module, make_data, make_trainer):
    for rewards, message in (
        (lambda completions: [1.0 for _ in completions], "'reward_1' cannot be sent to a worker"),
        (patient, r"reward_calls.workers is 1, but each of \['patient'\] stays in this process"),
    ):
        with pytest.raises(ValueError, match=message):
            make_trainer(max_steps=1).fit(make_module(rewards=rewards, reward_calls={"workers": 1}), make_data())
