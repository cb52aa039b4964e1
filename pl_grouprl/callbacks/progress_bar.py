"""The progress bar of a run, and the phases shown next to it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from rich.progress import ProgressColumn, Task
from rich.text import Text

from pl_grouprl.utilities.progress import PROGRESS, PhaseDisplay, ProgressLines, shows_bars
from pl_grouprl.utilities.text import encodable

_SPEED_PERIOD = 3600.0
"""Seconds over which speed and ETA are estimated. Rich's default of 30 s is shorter than a large model's steps."""


class RunProgressBar(RichProgressBar):
    """Lightning's `RichProgressBar` for runs with few, slow steps, limited by `max_steps`.

    The total is the number of batches that will run, epochs count from 1, and speed is in seconds per step if steps
    take longer than a second. If standard output is not a terminal, it prints a line at the start, every tenth and the
    end of each epoch. The command line uses it unless the configuration names another bar.

    A phase that lasts longer than two seconds is named: loading, rollouts with the tokens so far, scoring, rewards,
    validation, export. The name is shown at the end of the bar or, without a bar, on a line; see `PhaseDisplay`.
    """

    _draws = True
    _batches_done = 0
    _lines: ProgressLines | None = None
    _phases: PhaseDisplay | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check whether a bar can be drawn, and start to show phases."""
        super().setup(trainer, pl_module, stage)
        self._draws = shows_bars(**self._console_kwargs)
        self._stop_phases()  # of a run that never reached teardown
        if super().is_enabled:
            self._phases = PhaseDisplay(self._print_phase, self.refresh)
            self._phases.start()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End the bar."""
        self._stop_phases()
        super().teardown(trainer, pl_module, stage)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End the bar."""
        self._stop_phases()
        super().on_exception(trainer, pl_module, exception)

    @property
    def is_enabled(self) -> bool:
        """Whether the bar is drawn; False if lines are printed instead."""
        return super().is_enabled and self._draws

    @property
    def total_train_batches(self) -> int | float:
        """Training batches of this epoch, or up to `max_steps` if the run ends sooner."""
        trainer = self.trainer
        if trainer.max_steps < 0:
            return trainer.num_training_batches
        per_step = trainer.accumulate_grad_batches
        first = self._batches_done - self._batches_done % per_step  # first batch of the step in progress
        return min(trainer.num_training_batches, first + (trainer.max_steps - trainer.global_step) * per_step)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start this epoch's bar or lines."""
        self._batches_done = 0
        self._lines = None
        super().on_train_epoch_start(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Correct the total; only now is it known whether a resumed run starts mid-epoch."""
        self._batches_done = batch_idx
        if self.progress is not None and self.is_enabled:
            if self.train_progress_bar_id is None:
                self._initialize_train_progress_bar_id()
            assert self.train_progress_bar_id is not None
            self.progress.update(self.train_progress_bar_id, total=self.total_train_batches)
        elif super().is_enabled and self._lines is None:
            title = self._get_train_description(trainer.current_epoch)
            self._lines = ProgressLines(title.rstrip(), self.total_train_batches, batch_idx)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Advance."""
        if self._lines is None:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        else:
            self._lines.update(batch_idx + 1, self.get_metrics(trainer, pl_module))

    def __getstate__(self) -> dict[str, Any]:
        """Omit the thread."""
        return super().__getstate__() | {"_phases": None}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the bar; phases of the other callbacks are printed as lines from here on."""
        PROGRESS.enter("end of the run")
        super().on_train_end(trainer, pl_module)

    def configure_columns(self, trainer: Trainer) -> list[ProgressColumn]:
        """Lightning's columns, with another one for speed, and one for the phase."""
        columns = super().configure_columns(trainer)[:-1]
        return [
            *columns,
            _SpeedColumn(self.theme.processing_speed),
            _PhaseColumn(lambda: self._phases.text() if self._phases else ""),
        ]

    def _print_phase(self, line: str) -> None:
        if not self.is_enabled or self.progress is None or self._progress_stopped:
            with suppress(OSError):  # the lines of the loop warn
                print(encodable(line), flush=True)

    def _stop_phases(self) -> None:
        phases, self._phases = self._phases, None
        if phases is not None:
            phases.stop()

    def _init_progress(self, trainer: Trainer) -> None:
        super()._init_progress(trainer)
        if self.progress is not None:
            self.progress.speed_estimate_period = _SPEED_PERIOD

    def _get_train_description(self, current_epoch: int) -> str:
        num_epochs = self.trainer.max_epochs
        known = num_epochs is not None and num_epochs > 0
        description = f"Epoch {current_epoch + 1}/{num_epochs}" if known else f"Epoch {current_epoch + 1}"
        return description.ljust(len(self.validation_description))  # aligns with a validation bar below


class _SpeedColumn(ProgressColumn):
    """Steps per second, or seconds per step if more than one; empty until known."""

    def __init__(self, style: Any) -> None:
        self.style = style
        super().__init__()

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if not speed:
            return Text("")
        return Text(f"{speed:.2f} it/s" if speed >= 1 else f"{1 / speed:.2f} s/it", style=self.style)


class _PhaseColumn(ProgressColumn):
    """The phase, after the other columns of the bar."""

    max_refresh = 0.5

    def __init__(self, text: Callable[[], str]) -> None:
        self.text = text
        super().__init__()

    def render(self, task: Task) -> Text:
        return Text(self.text(), style="dim")
