"""Checkpoints that survive any end of a run, and the folder that holds them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, proxy, ref

import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from pl_grouprl.utilities.checkpoint_files import (
    DirectCheckpointIO,
    commit,
    explain_os_error,
    finish_interrupted,
    last_checkpoint,
    link,
    process_name,
    read_manifest,
    remove,
    remove_leftovers,
    runs_folder,
    unfinished_path,
    verify_loads,
)
from pl_grouprl.utilities.describe import allowed_changes, changes_since, lineage, options_of, refused_changes
from pl_grouprl.utilities.distributed import gather_plain, raise_on_all_ranks
from pl_grouprl.utilities.modes import nonfinite_parameters
from pl_grouprl.utilities.progress import PROGRESS
from pl_grouprl.utilities.text import first_names

# The folder of a run, never shared with another run; a run changes only files that it wrote.

MARKER = "run.json"
"""File that marks a folder as belonging to a run."""

T = TypeVar("T")


_RUNS: WeakKeyDictionary[Trainer, tuple[Path, dict[Path, int]]] = WeakKeyDictionary()
"""The folder of each run, and which callback, by id, writes to a path."""


def run_folder(trainer: Trainer) -> Path | None:
    """Return the exclusive folder of a run. The first call is collective: rank 0 takes the folder.

    It is the folder of the first logger's version. If that belongs to another run, or there is no logger or version, it
    is a new `version_N` in the logger's folder or the Trainer's root folder.

    Returns:
        The folder, which exists; None under `fast_dev_run`, which leaves no files.

    Raises:
        OSError: On all ranks, if it cannot be created.
        ValueError: On all ranks, if it is not local.
    """
    if is_trial(trainer):
        return None
    if trainer not in _RUNS:
        _RUNS[trainer] = Path(on_rank_zero(trainer, lambda: str(_take_folder(trainer).absolute()))), {}
    return _RUNS[trainer][0]


def _take_folder(trainer: Trainer) -> Path:
    root, folder = runs_folder(trainer), None
    if trainer.loggers:
        logger = trainer.loggers[0]
        place: Any = logger.log_dir
        if place is None and logger.version not in (None, ""):
            place = root / (logger.version if isinstance(logger.version, str) else f"version_{logger.version}")
        # The root folder and the working directory are shared with other runs.
        if place is not None and Path(place).resolve() not in {Path(trainer.default_root_dir).resolve(), Path.cwd()}:
            folder = Path(place)
    parent = folder or root
    if re.match(r"\w{2,}:/", str(parent)):
        raise ValueError(f"The run folder would be in {parent}; pass a logger or a default_root_dir that is local.")
    with explain_os_error(f"No run folder can be created in {parent}"):
        parent.mkdir(parents=True, exist_ok=True)
        if folder is not None and _take(folder):
            return folder
        numbers = [path.name.removeprefix("version_") for path in parent.glob("version_*")]
        first = max((int(number) for number in numbers if number.isdecimal()), default=-1) + 1
        for number in itertools.count(first):
            folder = parent / f"version_{number}"
            with contextlib.suppress(FileExistsError):  # another run was faster
                folder.mkdir()
                if _take(folder):
                    rank_zero_info(f"Run folder: {folder}")
                    return folder
    raise AssertionError


def _take(folder: Path) -> bool:
    """Create the marker in a folder; False if another run already has."""
    try:
        with (folder / MARKER).open("x", encoding="utf-8") as file:
            file.write(json.dumps({"written_by": "pl_grouprl", "process": process_name()}) + "\n")
    except FileExistsError:
        return False
    return True


def claim(
    trainer: Trainer, path: Path, writer: object, may_replace: Callable[[Path], bool] = lambda path: False
) -> None:
    """Reserve a path, in the run folder or elsewhere, for a callback's output. Collective.

    Args:
        trainer: Its `run_folder` must have been called.
        path: The file or folder.
        writer: The callback.
        may_replace: Whether the writer may replace what is there.

    Raises:
        FileExistsError: On rank 0, and OSError on the others, if something not written by this run is there.
        ValueError: If another callback of the Trainer writes there.
    """
    name, writers = type(writer).__name__, _RUNS[trainer][1]
    path = Path(os.path.abspath(path))
    if path in writers:  # claimed by another callback, or by this one in an earlier fit of the Trainer
        if writers[path] != id(writer):
            raise ValueError(f"{name} would write to {path}, as another callback does; give one of them another name.")
        return
    on_rank_zero(trainer, lambda: refuse_foreign(path, name, may_replace))
    writers[path] = id(writer)


def refuse_foreign(path: Path, writer: str, may_replace: Callable[[Path], bool]) -> None:
    """Raise FileExistsError if the path has something that may not be replaced."""
    if os.path.lexists(path) and not may_replace(path):
        raise FileExistsError(
            f"{writer} would write to {path}, which has something not written by this run; it is left untouched. "
            "Move it away, or give the run another folder (its logger, or default_root_dir)."
        )


def is_trial(trainer: Trainer) -> bool:
    """Whether the Trainer only runs a few trial batches (`fast_dev_run`)."""
    return bool(getattr(trainer, "fast_dev_run", False))


def on_rank_zero(trainer: Trainer, action: Callable[[], T], what: str | None = None) -> T:
    """Run an action on rank 0 and return its result (plain values) on all ranks; if it fails, all ranks fail.

    An OSError then begins with `what`, and says what the folder needs.
    """
    device = trainer.strategy.root_device
    with contextlib.nullcontext() if what is None else explain_os_error(what):
        result = raise_on_all_ranks(lambda: action() if trainer.is_global_zero else None, device, shared=OSError)
    return gather_plain(result, device)[0]


# The end of a run: by a signal, or with the current epoch; and how an unfinished epoch is counted.

STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGINT") if hasattr(signal, name)
)
"""Windows has neither SIGHUP, which a closed terminal sends, nor SIGUSR1."""

REPEAT_SECONDS = 5.0
"""A launcher and a scheduler may both pass a signal on; the same signal that much later is meant as another one."""


class StopRequest:
    """Remembers the first signal that asks to stop.

    A second Ctrl-C ends the process at once, and so does another signal that is repeated after `REPEAT_SECONDS`.

    Attributes:
        signum: The signal; 0 if there was none.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._came_at: dict[int, float] = {}

    def listen(self) -> None:
        """Handle the signals, replacing handlers that act at once. Does nothing outside the main thread."""
        if threading.current_thread() is threading.main_thread():
            for signum in STOP_SIGNALS:
                if signum == signal.SIGINT or signal.getsignal(signum) != signal.SIG_IGN:  # nohup ignores SIGHUP
                    signal.signal(signum, self._remember)

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # works even inside a collective, where no Python code runs
        elif time.monotonic() - self._came_at.setdefault(signum, time.monotonic()) > REPEAT_SECONDS:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        if self.signum:
            return
        self.signum, name = signum, signal.Signals(signum).name
        # Not print(): the signal may have interrupted one. A closed terminal is replaced, or later output would raise.
        for descriptor, text in ((2, f"\n{name}: the run saves a checkpoint after this batch and stops.\n"), (1, "\n")):
            if descriptor == 2 or name == "SIGHUP":
                try:
                    os.write(descriptor, text.encode())
                except OSError:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


class StoppedBySignal(SystemExit):
    """Ends a run after a signal, once its checkpoint is saved.

    The exit code is 128 plus the signal number, as in a shell: 143 for SIGTERM, 129 for SIGHUP, 138 for SIGUSR1, 130
    for Ctrl-C.
    Processes started by Lightning's launcher exit with 0, as it would otherwise kill the run's other processes.
    """


def stop_together(trainer: Trainer) -> None:
    """Make all ranks stop if one sets `trainer.should_stop`, wherever in a fit. Calling this again changes nothing.

    The ranks agree each time before Lightning's loops read it; otherwise the others would wait for that rank forever.
    """
    fit: Any = trainer.fit_loop
    if "run" in vars(fit):
        return

    def agree() -> None:
        trainer.should_stop = trainer.strategy.reduce_boolean_decision(trainer.should_stop, all=False)

    def agreeing(part: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            agree()
            part(*args)
            agree()

        return run

    for name in ("run", "on_run_start", "on_advance_start", "on_advance_end"):
        setattr(fit, name, agreeing(getattr(fit, name)))
    fit.epoch_loop.on_advance_end = agreeing(fit.epoch_loop.on_advance_end)  # after a batch, and after a validation


@contextlib.contextmanager
def unfinished_epoch_counted(trainer: Trainer) -> Iterator[None]:
    """In checkpoints saved inside this context, count an interrupted epoch as unfinished; Lightning counts it as done.

    A run resumed from such a checkpoint continues with the rest of the epoch.
    """
    loop: Any = trainer.fit_loop
    counts = (loop.epoch_progress.current, loop.epoch_progress.total)
    done = [(count.processed, count.completed) for count in counts]
    if not loop.epoch_loop.batch_progress.is_last_batch:
        for count in counts:
            count.processed = min(count.processed, count.started - 1)
            count.completed = min(count.completed, count.started - 1)
    try:
        yield
    finally:
        for count, (processed, completed) in zip(counts, done, strict=True):
            count.processed, count.completed = processed, completed


# The checkpoints.


class SafeCheckpoint(ModelCheckpoint):
    """Lightning's ModelCheckpoint with checkpoints that are always complete, and one more when a signal ends the run.

    A checkpoint (file or folder) is written under a temporary name and renamed once it is on disk. A manifest of hashes
    is verified whenever the Trainer loads a checkpoint. If a checkpoint cannot be written, or a weight is NaN or inf,
    the run ends with an error on all ranks, and earlier checkpoints stay untouched. Unfinished files of killed runs are
    removed at the start.

    With a `monitor` that validation logs, a checkpoint is ranked by the validation of the same weights. If it is due
    between two validations, it is saved after the next, and until then as `last` (if `save_last` is set). The best of
    earlier parts of a resumed run stay the best, in their folders, until better ones come.

    The last step of a run is saved too, before the policy is exported: like periodic checkpoints or, with `monitor`, as
    `last`; not if `save_top_k=0` and `save_last` is unset. In the Trainer's methods, `ckpt_path="last"` means the
    newest complete checkpoint of earlier runs of this name, as on the command line.

    SIGTERM, SIGHUP (a closed terminal; not under nohup), SIGUSR1 and Ctrl-C may reach any rank; after the current
    training batch all ranks save `last` and stop (`StoppedBySignal`). If the signal comes after the last batch, the run
    finishes first. A second Ctrl-C kills the process, and so does another of these signals that is repeated more than
    5 seconds later. Under SLURM with requeueing, its signal saves the checkpoint that Lightning resumes from
    automatically, and requeues the job.

    Args:
        stop_on_signal: Whether to handle signals.
        **kwargs: Options of `lightning.pytorch.callbacks.ModelCheckpoint`. `dirpath` defaults to `checkpoints` in the
            run folder. A slash in a metric's name becomes `_` in the name of a file.

    Raises:
        ValueError: If `filename` names a folder. Before the first step, if the folder is not local, or has checkpoints
            of a run with other options that is not being resumed.
    """

    def __init__(self, *, stop_on_signal: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if "/" in re.sub(r"{.*?}", "", self.filename or ""):
            raise ValueError(f"filename is {self.filename!r}, which names a folder; pass the folder as dirpath.")
        self.stop_on_signal = stop_on_signal
        self._request = StopRequest()
        self._chosen_by: ref[Trainer] | None = None  # the Trainer whose run folder is the default `dirpath`
        self._validated_at: int | None = None  # the step whose weights a validation measured by `monitor`

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepare the folder: check that it is writable, and remove leftovers of killed runs."""
        verify_loads(trainer)
        stop_together(trainer)
        if self._chosen_by is not None and self._chosen_by() is not trainer:  # another run, which has another folder
            self.dirpath = self._chosen_by = None
            self.best_k_models, self.current_score, self.best_model_score = {}, None, None
            self.kth_best_model_path = self.best_model_path = self.last_model_path = self._last_checkpoint_saved = ""
            self._last_global_step_saved = 0
        if self.dirpath is None and not is_trial(trainer):
            if stage != "fit":
                return
            self.dirpath = str(run_folder(trainer) / "checkpoints")  # type: ignore[operator]
            self._chosen_by = ref(trainer)
        super().setup(trainer, pl_module, stage)
        self._request, self._validated_at = StopRequest(), None
        if stage != "fit" or is_trial(trainer):
            return
        if "://" in str(self.dirpath):
            raise ValueError(f"dirpath is {self.dirpath}; SafeCheckpoint needs a local folder, use ModelCheckpoint.")
        if isinstance(trainer.strategy._checkpoint_io, AsyncCheckpointIO):
            raise ValueError(
                "plugins has AsyncCheckpointIO, which returns before a checkpoint is written, and SafeCheckpoint reads "
                "what was written; omit the plugin, or use ModelCheckpoint."
            )
        if type(trainer.strategy._checkpoint_io) in (type(None), TorchCheckpointIO):  # unless the user passed one
            trainer.strategy.checkpoint_io = DirectCheckpointIO()
        folder = Path(str(self.dirpath))

        def make_ready() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            finish_interrupted(folder)
            remove_leftovers(folder)
            trial = unfinished_path(folder / "trial")
            trial.touch()
            trial.unlink()

        on_rank_zero(trainer, make_ready, f"dirpath {folder} cannot be used")

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reject a folder with checkpoints of another configuration, and replace Lightning's signal handlers."""
        folder = Path(str(self.dirpath))
        resumed = trainer.ckpt_path is not None and Path(trainer.ckpt_path).resolve().parent == folder.resolve()

        def refuse_others() -> None:
            for checkpoint in sorted(folder.glob("*.ckpt")):
                changes = changes_since(read_manifest(checkpoint), pl_module)
                if refused := refused_changes(changes, allowed_changes(pl_module)):
                    raise ValueError(
                        f"dirpath {folder} has checkpoints of a run with other options than this one "
                        f"({checkpoint.name}: {'; '.join(refused)}); choose another folder, or remove them."
                    )

        if not is_trial(trainer) and not resumed:  # known only after setup
            on_rank_zero(trainer, refuse_others, f"dirpath {folder} cannot be used")
        if self.stop_on_signal:
            self._request.listen()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install the signal handlers, and forget checkpoints of a resumed run that are gone."""
        super().on_train_start(trainer, pl_module)
        gone = [path for path in self.best_k_models if not self.file_exists(path, trainer)]
        if gone:
            scores = {path: score for path, score in self.best_k_models.items() if path not in gone}
            best = max if self.mode == "max" else min
            self.best_k_models, self.best_model_path = scores, best(scores, key=scores.__getitem__, default="")
            self.best_model_score = scores.get(self.best_model_path)
        self.on_sanity_check_start(trainer, pl_module)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the best so far, though a resumed run has another folder."""
        super().load_state_dict(state_dict | {"dirpath": self.dirpath})

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        """Find `last` as the command line does; finding none is an error."""
        return {last_checkpoint(trainer, trainer.lightning_module if trainer.state.fn == "fit" else None)}

    # When to save.

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Save if due, or if a signal asks to stop.

        Raises:
            StoppedBySignal: On all ranks, after the checkpoint.
        """
        # Lightning forgets a deferred save if a later batch is not due.
        waited, self._defer_save_until_validation = self._defer_save_until_validation, False
        super().on_train_batch_end(trainer, pl_module, *args, **kwargs)
        waits = self._defer_save_until_validation
        self._defer_save_until_validation = waits or waited
        if trainer.fit_loop.epoch_loop._should_accumulate():
            return  # checkpoints do not include accumulated gradients
        if waits and self.save_last and not self._should_skip_saving_checkpoint(trainer):
            loop: Any = trainer.fit_loop
            if not _largest(trainer, loop.epoch_loop._should_check_val_fx(loop._data_fetcher)):
                self._save_last(trainer)
        signum = self._requested_signal(trainer)
        if not signum:
            return
        environment: Any = trainer._accelerator_connector.cluster_environment
        requeues = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
        if requeues and signum == environment.requeue_signal:
            self._save_checkpoint(trainer, trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))
            if trainer.is_global_zero:
                array = os.environ.get("SLURM_ARRAY_JOB_ID")
                job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]
                subprocess.run(["scontrol", "requeue", job], check=False)  # noqa: S603, S607
        elif not is_trial(trainer):
            self._save_last(trainer)
        raise _stopped(trainer, signum)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if due, or if a save has waited for the metric of these weights."""
        if self.monitor in trainer._logger_connector.metrics["callback"]:
            self._validated_at = trainer.global_step
        if not self._defer_save_until_validation or self._should_skip_saving_checkpoint(trainer):
            super().on_validation_end(trainer, pl_module)
            return
        self._defer_save_until_validation = False
        self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))
        self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if due, and always after the run's last step."""
        loop: Any = trainer.fit_loop  # which has not decided yet whether the fit ends with this epoch
        limits = ((trainer.global_step, loop.max_steps), (loop.epoch_progress.current.processed, loop.max_epochs))
        reached = any(limit is not None and limit != -1 and count >= limit for count, limit in limits)
        stops = trainer.strategy.reduce_boolean_decision(trainer.should_stop, all=False)  # set here, on any rank
        ends = reached or (stops and loop._can_stop_early)
        with unfinished_epoch_counted(trainer):
            super().on_train_epoch_end(trainer, pl_module)
            if ends:
                self._save_end(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step if the run ended in a way that `on_train_epoch_end` does not see."""
        with unfinished_epoch_counted(trainer):
            self._save_end(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report a signal that came after the last batch, now that everything is saved and exported.

        Raises:
            StoppedBySignal: On all ranks.
        """
        if signum := self._requested_signal(trainer):
            raise _stopped(trainer, signum)

    def _requested_signal(self, trainer: Trainer) -> int:
        """The signal that asked to stop, the same on all ranks; 0 for none."""
        return _largest(trainer, self._request.signum) if self.stop_on_signal else 0

    def _save_end(self, trainer: Trainer) -> None:
        periodic = self._every_n_train_steps or self._every_n_epochs or self._train_time_interval is not None
        wanted = self.save_last or (self.save_top_k and periodic)
        if self._should_skip_saving_checkpoint(trainer) or not (wanted or self._requested_signal(trainer)):
            return
        if self.save_top_k and periodic and self.monitor is None:  # a metric may be older than the weights
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))
        if self.save_last or self._last_global_step_saved != trainer.global_step:
            self._save_last(trainer)

    def _save_last(self, trainer: Trainer) -> None:
        """Save `last`, even without `save_last`; as a link if this step is already saved."""
        saved = self._last_global_step_saved == trainer.global_step and bool(self._last_checkpoint_saved)
        save_last, self.save_last = self.save_last, "link" if saved else True
        self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
        self.save_last = save_last

    def _is_outdated(self, trainer: Trainer) -> bool:
        """Whether the monitored metric is that of earlier weights."""
        return self._validated_at not in (None, trainer.global_step)

    def _monitor_candidates(self, trainer: Trainer) -> dict[str, Tensor]:
        """Omit an outdated metric; Lightning then waits for the next validation."""
        candidates = super()._monitor_candidates(trainer)
        if self._is_outdated(trainer):
            candidates.pop(str(self.monitor), None)
        return candidates

    # How to save.

    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        if not self._is_outdated(trainer):
            super()._save_topk_checkpoint(trainer, monitor_candidates)

    def _format_checkpoint_name(self, *args: Any, **kwargs: Any) -> str:
        return super()._format_checkpoint_name(*args, **kwargs).replace("/", "_")

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Save a checkpoint, completely or not at all. Collective; any strategy may write a file or a folder."""
        target, device, module = Path(filepath), trainer.strategy.root_device, trainer.lightning_module
        if broken := nonfinite_parameters(module.named_parameters(), device):
            raise RuntimeError(
                f"NaN or inf in the weights at step {trainer.global_step}: {first_names(broken)}. The checkpoint "
                f"{target} is not written, the earlier ones are untouched. Resume from one of them with a lower "
                "learning rate or clipped gradients (trainer.gradient_clip_val)."
            )
        unfinished = unfinished_path(target, gather_plain(process_name(), device)[0])
        what = f"the checkpoint {target} could not be saved, the earlier ones are untouched"
        facts = {"step": trainer.global_step, "module": lineage(module), "run_options": options_of(module)}

        def clear() -> None:
            unfinished.parent.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(unfinished):
                remove(unfinished)

        with PROGRESS.during("saving a checkpoint"):
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(self.save_weights_only)
            save = partial(trainer.strategy.save_checkpoint, checkpoint, unfinished)
            try:
                on_rank_zero(trainer, clear, what)
                with explain_os_error(what):
                    raise_on_all_ranks(save, device, shared=OSError)
                on_rank_zero(trainer, lambda: commit(unfinished, target, facts), what)
            except Exception:
                if trainer.is_global_zero:
                    clear()
                raise
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(proxy(self))

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if trainer.is_global_zero:
            remove(Path(filepath))

    @staticmethod
    def _link_checkpoint(trainer: Trainer, filepath: str, linkpath: str) -> None:
        if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
            link(Path(filepath), Path(linkpath))
        trainer.strategy.barrier()


def _stopped(trainer: Trainer, signum: int) -> StoppedBySignal:
    rank_zero_info(f"Stopped by signal {signum} at step {trainer.global_step}; resume with --ckpt_path last.")
    launched = isinstance(trainer.strategy.launcher, _SubprocessScriptLauncher) and trainer.local_rank > 0
    return StoppedBySignal(0 if launched else 128 + signum)


def _largest(trainer: Trainer, number: int) -> int:
    """Maximum over ranks."""
    mine = torch.tensor(number, device=trainer.strategy.root_device)
    largest = trainer.strategy.reduce(mine, reduce_op="max")
    return int(largest) if isinstance(largest, Tensor) else number
