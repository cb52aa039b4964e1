import re
import threading

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from rich.progress import Progress

from pl_grouprl.callbacks import RunProgressBar
from pl_grouprl.cli import RLCLI
from pl_grouprl.utilities.progress import PROGRESS, PhaseDisplay


class Module(BoringModel):
    """Eight batches per epoch."""

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(8, 32))

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.tensor(0.25), prog_bar=True)

    def training_step(self, batch, batch_idx):
        self.log("reward", torch.tensor(0.5), prog_bar=True)
        return super().training_step(batch, batch_idx)


class Totals(Callback):
    """What the bar says after each batch: done, total, title."""

    def __init__(self, bar):
        self.bar = bar
        self.seen = []

    def on_train_batch_end(self, *args):
        task = self.bar.train_progress_bar
        self.seen.append((task.completed, task.total, task.description.rstrip()))


def fit(tmp_path, bar, *callbacks, ckpt_path=None, **options):
    quiet = {"logger": False, "enable_model_summary": False, "accelerator": "cpu", "num_sanity_val_steps": 0}
    trainer = Trainer(default_root_dir=tmp_path, callbacks=[bar, *callbacks], **quiet, **options)
    trainer.fit(Module(), ckpt_path=ckpt_path)
    return trainer


@pytest.fixture
def bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    return RunProgressBar(console_kwargs={"force_terminal": True, "width": 120})


def test_the_total_ends_where_max_steps_ends_the_run(tmp_path, bar, capsys):
    totals = Totals(bar)
    fit(tmp_path, bar, totals, max_epochs=3, max_steps=13)
    first = [(done, 8, "Epoch 1/3") for done in range(1, 9)]
    assert totals.seen == first + [(done, 5, "Epoch 2/3") for done in range(1, 6)]
    assert "5/5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("max_epochs", "max_steps", "batches", "total", "title"),
    [(1, 2, 3, 6, "1/1"), (1, 3, 3, 8, "1/1"), (1, -1, 3, 8, "1/1"), (-1, 3, 1, 3, "1")],
)
def test_a_step_of_several_batches_and_epochs_without_a_limit(
    tmp_path, bar, max_epochs, max_steps, batches, total, title
):
    totals = Totals(bar)
    fit(tmp_path, bar, totals, max_epochs=max_epochs, max_steps=max_steps, accumulate_grad_batches=batches)
    assert totals.seen == [(done, total, f"Epoch {title}") for done in range(1, total + 1)]


def test_a_run_resumed_within_an_epoch_keeps_its_total(tmp_path, bar):
    fit(tmp_path, RunProgressBar(), max_epochs=1, max_steps=2).save_checkpoint(tmp_path / "at_2.ckpt")
    checkpoint = torch.load(tmp_path / "at_2.ckpt", weights_only=True)
    for count in ("ready", "started", "processed", "completed"):  # as saved within the epoch
        checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"][count] = int(count in ("ready", "started"))
    torch.save(checkpoint, tmp_path / "at_2.ckpt")
    totals = Totals(bar)
    fit(tmp_path, bar, totals, max_epochs=1, max_steps=5, ckpt_path=tmp_path / "at_2.ckpt")
    assert totals.seen == [(done, 5, "Epoch 1/1") for done in (3, 4, 5)]


def test_a_file_gets_lines_in_place_of_a_bar(tmp_path, capsys):
    fit(tmp_path, RunProgressBar(), max_epochs=1, max_steps=5)
    lines = [re.sub(r"\d+:\d\d:\d\d", "TIME", line) for line in capsys.readouterr().out.splitlines()]
    expected = [f"Epoch 1/1: {done}/5, TIME elapsed, TIME left, reward 0.500" for done in range(1, 5)]
    assert lines == ["Epoch 1/1: 0/5", *expected, "Epoch 1/1: 5/5, TIME elapsed, reward 0.500"]


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.5, "2.00 it/s"), (1.0, "1.00 it/s"), (40.0, "40.00 s/it"), (None, "")]
)
def test_slow_steps_have_a_speed(tmp_path, bar, seconds, shown):
    fit(tmp_path, bar, max_epochs=1, max_steps=1)
    assert bar.progress.speed_estimate_period == 3600
    (column,) = (own for own in bar.progress.columns if "Speed" in type(own).__name__)
    now = [0.0]
    progress = Progress(get_time=lambda: now[0], speed_estimate_period=3600)
    task = progress.add_task("", total=10)
    for _ in range(3 if seconds else 0):
        progress.advance(task)
        now[0] += seconds
    assert column.render(progress.tasks[task]).plain == shown


@pytest.mark.parametrize(
    ("config", "added"),
    [
        ({}, [RunProgressBar]),
        ({"callbacks": [Callback()]}, [RunProgressBar]),
        ({"callbacks": [TQDMProgressBar()]}, []),
        ({"callbacks": TQDMProgressBar()}, []),
        ({"enable_progress_bar": False}, []),
    ],
)
def test_the_command_line_adds_it_unless_another_is_named_or_none_is_wanted(config, added, monkeypatch):
    monkeypatch.setattr(LightningCLI, "_instantiate_trainer", lambda cli, config, callbacks: callbacks)
    assert [type(bar) for bar in RLCLI._instantiate_trainer(RLCLI.__new__(RLCLI), config, [])] == added


@pytest.fixture
def no_thread(monkeypatch):
    """The test looks at the phases itself."""
    monkeypatch.setattr(PhaseDisplay, "_run", lambda display: None)


def take_long(bar, phase):
    """As if the phase had lasted for ten seconds."""
    PROGRESS.enter(phase)
    PROGRESS.since -= 10
    bar._phases.check()


class SlowParts(Callback):
    """Steps and an end of the run that seem to take long."""

    def __init__(self, bar):
        self.bar = bar
        self.column = ""

    def on_fit_start(self, *args):
        take_long(self.bar, "Loading the models")

    def on_train_batch_start(self, *args):
        take_long(self.bar, "rollout")
        if self.bar.progress is not None:
            (column,) = (own for own in self.bar.progress.columns if "Phase" in type(own).__name__)
            self.column = column.render(None).plain

    def on_train_end(self, *args):
        take_long(self.bar, "Exporting the policy")


def test_a_file_gets_a_line_for_what_takes_long(tmp_path, capsys, no_thread):
    bar = RunProgressBar()
    fit(tmp_path, bar, SlowParts(bar), max_epochs=1, max_steps=2)
    lines = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if not line.startswith("Epoch")]
    assert lines == ["Loading the models", "Sampling rollouts", "Exporting the policy"]


def test_a_bar_shows_what_takes_long_at_its_end(tmp_path, bar, capsys, no_thread):
    slow = SlowParts(bar)
    fit(tmp_path, bar, slow, max_epochs=1, max_steps=2)
    assert re.fullmatch(r"Sampling rollouts: \d+ s", slow.column)
    assert re.match(r"Loading the models: \d+ s\r?\n", capsys.readouterr().out)  # before there is a bar


def test_no_thread_is_left_after_an_error_and_none_starts_if_nothing_is_shown(tmp_path, capsys):
    class Failing(Callback):
        def on_train_start(self, *args):
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fit(tmp_path, RunProgressBar(), Failing(), max_epochs=1, max_steps=1)
    assert not phase_threads()
    hidden = RunProgressBar(refresh_rate=0)
    capsys.readouterr()
    fit(tmp_path, hidden, NoThread(), max_epochs=1, max_steps=2)
    assert capsys.readouterr().out == ""
    assert not phase_threads()


def phase_threads():
    return [thread for thread in threading.enumerate() if thread.name == "phase display"]


class NoThread(Callback):
    def on_train_start(self, *args):
        assert not phase_threads()


def test_a_phase_that_cannot_be_printed_ends_nothing(monkeypatch):
    def fail(*args, **options):
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", fail)
    RunProgressBar()._print_phase("Sampling rollouts: 3 s")
