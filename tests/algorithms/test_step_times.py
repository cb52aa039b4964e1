"""Times of a step are the module's own, and a loader must know of rollouts."""

import contextlib
import csv
import json

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from pl_grouprl.algorithms import PPO
from pl_grouprl.callbacks import RunSummary
from pl_grouprl.training import metrics as step_timer
from pl_grouprl.training.metrics import StepTimer


class Clock:
    """A clock that stands still but where somebody moves it."""

    now = 0.0

    def perf_counter(self):
        return self.now


class Slow(Callback):
    """Takes 100 seconds before and after each step, and 1 second of the update itself."""

    def __init__(self, clock):
        self.clock = clock

    def on_train_batch_start(self, *args):
        self.clock.now += 100

    def on_before_backward(self, *args):
        self.clock.now += 1

    def on_train_batch_end(self, *args):
        self.clock.now += 100


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(step_timer, "time", clock)
    return clock


@pytest.fixture
def times_of(monkeypatch):
    """Attach to a module; gives the times that it logs, a dictionary for each call of the training step."""

    def attach(module):
        logged, log_dict = [], module.log_dict

        def note(metrics, **kwargs):
            if "time/step" in metrics:
                logged.append(metrics)
            log_dict(metrics, **kwargs)

        monkeypatch.setattr(module, "log_dict", note)
        return logged

    return attach


def test_the_innermost_part_is_charged_and_the_rest_is_other(clock):
    step = StepTimer()
    clock.now += 1  # other
    with step.part("rollout"):
        clock.now += 2
        with step.part("reward"):
            clock.now += 4
        clock.now += 8
    clock.now += 16  # other
    with contextlib.suppress(KeyError), step.part("reward"):
        clock.now += 32
        raise KeyError
    step.enter("update")
    clock.now += 64
    step.mark()
    clock.now += 1000  # behind the last mark: in no part
    assert step.seconds == {"rollout": 10.0, "reward": 36.0, "update": 64.0, "other": 17.0, "step": 127.0}


def test_a_new_step_knows_the_parts_of_those_before(clock):
    step = StepTimer()
    step.enter("rollout")
    clock.now += 1
    step.mark()
    clock.now += 5
    step.start()
    clock.now += 2
    step.enter("update")
    clock.now += 3
    step.mark()
    assert step.seconds == {"rollout": 0.0, "other": 2.0, "update": 3.0, "step": 5.0}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_callbacks_do_not_count_as_the_update(
    make_module, make_data, make_trainer, scripted_engine, times_of, clock, accumulate
):
    module, data = make_module(engine=scripted_engine), make_data(train_size=16)
    times = times_of(module)
    make_trainer(max_steps=2, callbacks=[Slow(clock)], accumulate_grad_batches=accumulate).fit(module, data)
    assert len(times) == 2 * accumulate
    for metrics in times:
        assert metrics["time/update"] == metrics["time/step"] == 1
        assert metrics["perf/tokens_per_second"] > 100  # some 360 tokens in 1 second, not in 201


def letters(completions, **columns):
    letters.clock.now += 8
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


def test_parts_add_up_to_each_step(make_module, make_data, make_trainer, scripted_engine, times_of, clock, monkeypatch):
    letters.clock = clock
    generate = scripted_engine.generate

    def slow(*args, **kwargs):
        clock.now += 16
        return generate(*args, **kwargs)

    monkeypatch.setattr(scripted_engine, "generate", slow)
    module = make_module(rewards=letters, engine=scripted_engine, beta=0.1, num_iterations=2)
    times = times_of(module)
    make_trainer(max_steps=4, callbacks=[Slow(clock)]).fit(module, make_data())
    assert [step["time/rollout"] for step in times] == [16.0, 0.0, 16.0, 0.0]
    assert [step["time/reward"] for step in times] == [8.0, 0.0, 8.0, 0.0]
    assert [step["time/update"] for step in times] == [1.0, 1.0, 1.0, 1.0]
    for step in times:
        assert {"time/old_logprobs", "time/ref_logprobs", "time/advantages", "time/other"} <= step.keys()
        assert _sum_of_parts(step) == step["time/step"]


def test_parts_add_up_with_a_critic(make_module, make_data, make_trainer, scripted_engine, times_of):
    module = make_module(PPO, engine=scripted_engine, num_iterations=2)
    times = times_of(module)
    make_trainer(max_steps=2).fit(module, make_data())
    assert len(times) == 2
    for step in times:
        assert "time/values" in step
        assert _sum_of_parts(step) == pytest.approx(step["time/step"], rel=1e-9)


def _sum_of_parts(metrics):
    return sum(value for name, value in metrics.items() if name.startswith("time/") and name != "time/step")


def test_summary_agrees_with_the_logged_rows(make_module, make_data, make_trainer, scripted_engine, tmp_path):
    summary, logger = RunSummary(), CSVLogger(tmp_path, name="", version=0)
    module = make_module(engine=scripted_engine, num_mini_batches=2)
    make_trainer(max_steps=5, log_every_n_steps=1, logger=logger, callbacks=[summary]).fit(module, make_data())
    with (tmp_path / "version_0" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["time/step"]]  # the epoch's own row has none
    assert len(rows) == 5
    for name in ("time/step", "time/update", "loss", "grad_norm", "reward"):
        expected = [(step, pytest.approx(float(row[name]))) for step, row in enumerate(rows, start=1)]
        assert summary.history.points[name] == expected, name
    # With two updates to a rollout, the rate is known after every second one.
    assert [step for step, _ in summary.history.points["perf/tokens_per_second"]] == [2, 4]
    statistics = json.loads((tmp_path / "version_0" / "summary.json").read_text())["metrics"]
    assert statistics["time/step"]["last"] == pytest.approx(float(rows[-1]["time/step"]))


def test_a_loader_without_rollouts_is_refused(make_module, make_trainer, scripted_engine):
    loader = torch.utils.data.DataLoader([1, 2, 3], batch_size=None)
    with pytest.raises(TypeError, match="loader yields int"):
        make_trainer(max_steps=1).fit(make_module(engine=scripted_engine), loader)
