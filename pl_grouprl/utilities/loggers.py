"""Prepares a Trainer's loggers: they share a version, and a write error does not end the run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn

from pl_grouprl.utilities.checkpoint_files import OptionalWrites, lives, process_name
from pl_grouprl.utilities.text import describe_error, first_names

_LIGHTNINGS_INTERVAL = 50


def prepare_loggers(loggers: Sequence[Logger]) -> None:
    """Prepare loggers for a run, before the first of them creates its folder. May be called again.

    - All loggers use the same version.
    - Metrics of an earlier run in a `CSVLogger`'s folder, which the logger would delete, are renamed; a folder that
      another live run still writes to is an error.
    - A logger that fails to write during the run warns once, with its folder and the reason, and is disabled.
    - `MLFlowLogger` gets each metric under a name that it takes. Metrics that a logger rejects are not sent to it
      again, and whatever else it raises is a warning.
    """
    for logger in loggers:
        _ = logger.version
    for logger in loggers:
        if isinstance(logger, CSVLogger) and logger._experiment is None:
            _claim_folder(Path(logger.log_dir))
        if "log_metrics" not in vars(logger):
            _Guard(logger)


def place_default_logger(trainer: Trainer, name: str) -> None:
    """Let the logger that a Trainer makes by itself write to `runs/{name}`, where the YAML configurations write.

    Args:
        trainer: Its default logger writes to `lightning_logs` in its root folder; any other stays as it is.
        name: The algorithm's.
    """
    for logger in trainer.loggers:
        if not isinstance(logger, (CSVLogger, TensorBoardLogger)) or logger._experiment is not None:
            continue
        given = logger._version not in (None, SLURMEnvironment.job_id(), logger._get_next_version())
        if not given and logger.name == "lightning_logs" and logger.save_dir == trainer.default_root_dir:
            logger._root_dir = logger._save_dir = os.path.join(trainer.default_root_dir, "runs")  # type: ignore[union-attr]
            logger._name, logger._version = name, SLURMEnvironment.job_id()


def log_every_step(trainer: Trainer) -> None:
    """Log every step if the Trainer has Lightning's default interval, at which a short run would log nothing.

    In reinforcement learning, a step is a batch of rollouts and takes seconds to minutes.
    """
    if trainer.loggers and trainer.log_every_n_steps == _LIGHTNINGS_INTERVAL:  # type: ignore[attr-defined]
        trainer.log_every_n_steps = 1  # type: ignore[attr-defined]
        rank_zero_info(
            f"Every step is logged, not every {_LIGHTNINGS_INTERVAL}th (Lightning's default). Any other value of "
            "Trainer(log_every_n_steps=...) is kept."
        )


def forget_numbers(module: LightningModule, names: Iterable[str]) -> None:
    """Do not log metrics of the current hook that have no value in this step; Lightning would repeat the last ones."""
    kept: Any = module.trainer._results or {}
    for name in names:
        kept.pop(f"{module._current_fx_name}.{name}", None)
        for shown in (module.trainer.callback_metrics, module.trainer.progress_bar_metrics):
            shown.pop(name, None)


@rank_zero_only
def _claim_folder(folder: Path) -> None:
    file, writer = folder / "metrics.csv", _writer(folder)
    if file.is_file():
        host, _, pid = writer.read_text().rpartition("-") if writer.is_file() else ("", "", "0")
        if pid.isdigit() and lives(host, int(pid)):
            raise ValueError(
                f"{file} is still being written by another run (process {pid}); give the CSVLogger another version."
            )
        number = 1
        while (kept := folder / f"metrics_{number}.csv").exists():
            number += 1
        file.rename(kept)
    with suppress(OSError):  # the logger itself will say that it cannot write
        folder.parent.mkdir(parents=True, exist_ok=True)
        writer.write_text(process_name())


def _writer(folder: Path) -> Path:
    """Names the process that writes into a `CSVLogger`'s folder; outside of it, which Lightning expects to be empty."""
    return folder.with_name(f".{folder.name}.writer")


class _Guard:
    """Stands before the methods of one logger that write, and turns their errors into warnings."""

    def __init__(self, logger: Logger) -> None:
        self.logger: Any = logger
        self.is_disabled = False
        self.refused: frozenset[str] = frozenset()
        for name in ("log_metrics", "finalize"):
            setattr(logger, name, getattr(self, name))
        for name in ("log_hyperparams", "save", "after_save_checkpoint"):
            setattr(logger, name, partial(self._tolerate, getattr(type(logger), name), logger))

    def log_metrics(self, metrics: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        def write(part: dict[str, Any]) -> Exception | None:
            return self._attempt(lambda: type(self.logger).log_metrics(self.logger, part, *args, **kwargs))

        if isinstance(self.logger, MLFlowLogger):  # takes only some characters; Lightning would drop the others
            escaped = lambda c: "-at-" if c[0] == "@" else f".x{ord(c[0]):x}."  # noqa: E731
            metrics = {re.sub(r"[^\w/. -]", escaped, name, flags=re.A): value for name, value in metrics.items()}
        left = {name: value for name, value in metrics.items() if name not in self.refused}
        if error := write(left):
            refused = [name for name, value in left.items() if write({name: value})]
            if refused:
                rank_zero_warn(
                    f"{type(self.logger).__name__} refuses the metrics {first_names(refused)} "
                    f"({describe_error(error, 300)}); it does without them, and training continues."
                )
            self.refused |= set(refused)

    def finalize(self, status: str) -> None:
        if isinstance(self.logger, CSVLogger):
            with suppress(OSError):
                rank_zero_only(_writer(Path(self.logger.log_dir)).unlink)()
        if self.is_disabled:
            with suppress(Exception):  # closes as much as it can
                type(self.logger).finalize(self.logger, status)
        self._tolerate(type(self.logger).finalize, self.logger, status)
        self.is_disabled = False

    def _tolerate(self, write: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if error := self._attempt(lambda: write(*args, **kwargs)):
            rank_zero_warn(f"{type(self.logger).__name__} raised {describe_error(error, 300)}; training continues.")

    def _attempt(self, write: Callable[[], None]) -> Exception | None:
        """Write, unless the logger is disabled, and return the error; an OSError is a warning and disables it."""
        if self.is_disabled:
            return None
        try:
            write()
        except Exception as error:
            reason: BaseException | None = error
            while reason is not None and not isinstance(reason, OSError):
                reason = reason.__cause__ or reason.__context__
            if reason is None:
                return error
            self.is_disabled, logger = True, self.logger
            place = logger.log_dir or logger.save_dir or f"its run {logger.name}/{logger.version}"
            OptionalWrites(type(logger).__name__).warn(place, reason)
        return None
