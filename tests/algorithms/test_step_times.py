"""Times of a step are the module's own, and a loader must know of rollouts."""

import csv
import json

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from pl_grouprl.algorithms import step_clock
from pl_grouprl.callbacks import RunSummary


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


@pytest.mark.parametrize("accumulate", [1, 2])
def test_callbacks_do_not_count_as_the_update(
    make_module, make_data, make_trainer, scripted_engine, monkeypatch, accumulate
):
    clock = Clock()
    monkeypatch.setattr(step_clock, "time", clock)
    module, data = make_module(engine=scripted_engine), make_data(train_size=16)
    logged = []
    log_dict = module.log_dict
    monkeypatch.setattr(
        module, "log_dict", lambda metrics, **kwargs: logged.append(metrics) or log_dict(metrics, **kwargs)
    )
    make_trainer(max_steps=2, callbacks=[Slow(clock)], accumulate_grad_batches=accumulate).fit(module, data)
    times = [metrics for metrics in logged if "time/step" in metrics]
    assert len(times) == 2 * accumulate
    for metrics in times:
        assert metrics["time/update"] == metrics["time/step"] == 1
        assert metrics["perf/tokens_per_second"] > 100  # some 360 tokens in 1 second, not in 201


def test_summary_agrees_with_the_logged_rows(make_module, make_data, make_trainer, scripted_engine, tmp_path):
    summary, logger = RunSummary(), CSVLogger(tmp_path, name="", version=0)
    module = make_module(engine=scripted_engine, num_mini_batches=2)
    make_trainer(max_steps=5, log_every_n_steps=1, logger=logger, callbacks=[summary]).fit(module, make_data())
    with (tmp_path / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
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
    with pytest.raises(TypeError, match=r"loader yields int, .*PromptBatch.* PromptDataModule"):
        make_trainer(max_steps=1).fit(make_module(engine=scripted_engine), loader)
