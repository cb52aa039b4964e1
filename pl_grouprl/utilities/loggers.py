"""Prepares a Trainer's loggers, and logs many numbers of a step quickly."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from torch import Tensor

from pl_grouprl.utilities.checkpoint_files import OptionalWrites, explain_os_error, lives, process_name
from pl_grouprl.utilities.text import describe_error, first_names

# Prepares a Trainer's loggers: they share a version, write a step quickly, and a write error does not end the run.

_LIGHTNINGS_INTERVAL = 50


def prepare_loggers(loggers: Sequence[Logger]) -> None:
    """Prepare loggers for a run, before the first of them creates its folder. May be called again.

    - All loggers use the same version.
    - Metrics of an earlier run in a `CSVLogger`'s folder, which the logger would delete, are renamed; a folder that
      another live run still writes to is refused.
    - A `TensorBoardLogger` writes the numbers of a step as one event, not one event each.
    - A logger that fails to write during the run warns once, with its folder and the reason, and is disabled. One that
      cannot be opened at all raises an error with the same details.
    - `MLFlowLogger` gets each metric under a name that it takes. Metrics that a logger refuses are left out of it, and
      whatever else it raises is a warning.
    """
    for logger in loggers:
        _ = logger.version
    for logger in loggers:
        if isinstance(logger, CSVLogger) and logger._experiment is None:
            _claim_folder(Path(logger.log_dir))
        if not isinstance(logger, _Guarded):
            logger.__class__ = _guarded(type(logger))


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


@rank_zero_only
def _end_writing(folder: Path) -> None:
    with suppress(OSError):
        _writer(folder).unlink()


class _Guarded(Logger):
    """A mixin for loggers that warns if they cannot write."""

    _writes: OptionalWrites | None = None
    _renamed = False
    _refused: frozenset[str] = frozenset()

    @property
    def experiment(self) -> Any:
        try:
            return super().experiment  # type: ignore[misc]
        except OSError:
            with explain_os_error(f"{_name(self)} cannot write to {_place(self)}"):
                raise

    def log_metrics(self, metrics: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        def write(part: dict[str, Any]) -> Exception | None:
            try:
                self._attempt(lambda: super(_Guarded, self).log_metrics(part, *args, **kwargs))  # type: ignore[safe-super]
            except Exception as error:
                return error
            return None

        if isinstance(self, MLFlowLogger):
            metrics = self._with_mlflow_names(metrics)
        left = {name: value for name, value in metrics.items() if name not in self._refused}
        if error := write(left):
            refused = [name for name, value in left.items() if write({name: value})]
            if refused:
                rank_zero_warn(
                    f"{_name(self)} refuses the metrics {first_names(refused)} ({describe_error(error, 300)}); it does "
                    "without them, and training continues."
                )
            self._refused |= set(refused)

    def _with_mlflow_names(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        names = {name: _mlflow_name(name) for name in metrics}
        if not self._renamed and (changed := next((name for name in names if names[name] != name), None)):
            self._renamed = True
            rank_zero_warn(
                f"MLflow takes only letters, digits and '_/. -' in names of metrics: {changed!r} is logged as "
                f"{names[changed]!r}, and others like it."
            )
        return {names[name]: value for name, value in metrics.items()}

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        self._tolerate(lambda: super(_Guarded, self).log_hyperparams(*args, **kwargs))  # type: ignore[safe-super]

    def save(self) -> None:
        self._tolerate(super().save)

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self._tolerate(lambda: super(_Guarded, self).after_save_checkpoint(checkpoint_callback))

    def finalize(self, status: str) -> None:
        if isinstance(self, CSVLogger):
            _end_writing(Path(self.log_dir))
        if self._writes is None:
            self._tolerate(lambda: super(_Guarded, self).finalize(status))
        else:
            with suppress(Exception):  # closes as much as it can
                super().finalize(status)
        self._writes = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        own = next(kind for kind in type(self).__mro__ if not issubclass(kind, (_Guarded, _OneEvent)))
        return object.__new__, (own,), *reduced[2:]

    def _tolerate(self, write: Callable[[], None]) -> None:
        try:
            self._attempt(write)
        except Exception as error:
            rank_zero_warn(f"{_name(self)} raised {describe_error(error, 300)}; training continues.")

    def _attempt(self, write: Callable[[], None]) -> None:
        if self._writes is not None:
            return
        try:
            write()
        except Exception as error:
            reason = _reason(error)
            if reason is None:
                raise
            self._writes = OptionalWrites(_name(self))
            self._writes.warn(_place(self), reason)


class _OneEvent(Logger):
    """A mixin for TensorBoard's logger that writes the numbers of a step as one event.

    Each event costs a message, a place in a queue and a checksum in pure Python. For the 50 numbers of a step, that is
    3 to 4 ms of the processor; as one event, 0.7 ms.
    """

    _prefix: str
    experiment: Any

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if self._prefix or not metrics or not {type(value) for value in metrics.values()} <= {float, int}:
            super().log_metrics(metrics, step)  # type: ignore[safe-super]
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self.experiment._get_file_writer().add_summary(Summary(value=values), step)


def _mlflow_name(name: str) -> str:
    """A name that MLflow takes; different names get different ones.

    `@` becomes `-at-`, and another character that Lightning would drop becomes `.x{hex}.`, as do `-` and `.` where they
    would look like these. Parts between slashes that make no path (empty, `.` and `..`) are escaped, too.
    """
    escaped = re.sub(
        r"[^\w/. -]|-(?=at)|\.(?=x)", lambda c: "-at-" if c[0] == "@" else f".x{ord(c[0]):x}.", name, flags=re.A
    )
    parts = [f".x{part.encode().hex()}." if part in ("", ".", "..") else part for part in escaped.split("/")]
    whole = "/".join(parts)
    return whole if len(whole) <= 250 else f"{whole[:200]}.x.{hashlib.sha256(name.encode()).hexdigest()[:32]}"


@cache
def _guarded(kind: type[Logger]) -> type[Logger]:
    """A guarded subclass with the same name, so `isinstance` and messages do not change."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    written_by = ("log_metrics", "experiment")
    is_tensorboard = all(getattr(kind, name, None) is getattr(TensorBoardLogger, name) for name in written_by)
    return type(kind.__name__, (_Guarded, _OneEvent, kind) if is_tensorboard else (_Guarded, kind), names)


def _reason(error: BaseException | None) -> OSError | None:
    """The OSError that caused an error, if any."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _name(logger: Logger) -> str:
    return type(logger).__name__


def _place(logger: Logger) -> str:
    return str(logger.log_dir or logger.save_dir or f"its run {logger.name}/{logger.version}")


# Logs many numbers of a training step faster than Lightning.


def log_numbers(module: LightningModule, numbers: Mapping[str, float | Tensor], *, prog_bar: bool = False) -> None:
    """Do the same as `module.log_dict(numbers, prog_bar=prog_bar, batch_size=1)`, but faster.

    `LightningModule.log` copies a metric's metadata on every call, which takes about 0.4 ms. So `log_dict` is used only
    for names that are new in this epoch; after that, values go directly into Lightning's result collection.

    Args:
        module: The module, in one of its hooks or its callbacks' hooks.
        numbers: Scalars by name.
        prog_bar: Whether to show them in the progress bar.
    """
    kept: Any = module.trainer._results or {}
    places = {name: kept.get(f"{module._current_fx_name}.{name}") for name in numbers}
    known = {
        name: place
        for name, place in places.items()
        if place is not None and _keeps_latest_only(place, prog_bar) and _is_number(numbers[name])
    }
    rest = {name: number for name, number in numbers.items() if name not in known}
    if rest:
        module.log_dict(rest, prog_bar=prog_bar, batch_size=1)
    # A 16-bit step changes the default dtype; Lightning still logs in float32.
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    plain = torch.tensor([0.0 if isinstance(numbers[name], Tensor) else numbers[name] for name in known], dtype=dtype)
    for (name, place), value in zip(known.items(), plain.unbind(), strict=True):
        number = numbers[name]
        place.update(number.detach().squeeze() if isinstance(number, Tensor) else value, batch_size=1)


def forget_numbers(module: LightningModule, names: Iterable[str]) -> None:
    """Do not log metrics of the current hook that have no value in this step; Lightning would repeat the last ones."""
    kept: Any = module.trainer._results or {}
    for name in names:
        kept.pop(f"{module._current_fx_name}.{name}", None)
        for shown in (module.trainer.callback_metrics, module.trainer.progress_bar_metrics):
            shown.pop(name, None)


def _keeps_latest_only(place: Any, prog_bar: bool) -> bool:
    """Whether Lightning keeps only the latest value of this metric."""
    meta = place.meta
    sums_up = meta.on_epoch or not meta.on_step or meta.sync.should
    return place.is_tensor and not place.has_reset and not sums_up and meta.prog_bar == prog_bar


def _is_number(value: Any) -> bool:
    """Whether Lightning accepts it as a metric."""
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)
