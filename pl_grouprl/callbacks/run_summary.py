"""A run's options in `options.json`, and its results: on the console, in the loggers, `summary.json`, `curves.png`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.model_summary.model_summary import get_human_readable_count
from torch import Tensor

from pl_grouprl.callbacks.bottleneck import RunFacts, find_bottleneck
from pl_grouprl.callbacks.checkpoints import claim, run_folder
from pl_grouprl.callbacks.completions_table import log_tables, source_table, summary_table
from pl_grouprl.callbacks.curves import MetricHistory, draw_curves
from pl_grouprl.training.checkpoint import all_options
from pl_grouprl.utilities.checkpoint_files import OptionalWrites, write_whole
from pl_grouprl.utilities.options import check_fields
from pl_grouprl.utilities.progress import PROGRESS
from pl_grouprl.utilities.text import encodable

Statistics = Mapping[str, Mapping[str, float]]

VALIDATION_PREFIXES = ("val/", "val_")
_FLAT = 0.9
"""Share of groups with equal rewards above which the summary says so; without a critic they give no gradient."""

_FEW_STEPS = 10
"""A validation takes much of a run with fewer steps, which says nothing about a longer one."""


@dataclass(eq=False, repr=False)
class RunSummary(Callback):
    """Record every logged metric and summarize them when training ends: in files and the loggers' table `summary`.

    A value counts only for the step that logged it, although Lightning repeats it in later steps. After `validate` and
    `test`, only the metrics of each data source are printed, as a table.

    Works with any module that logs. Checkpoints include the history, so a resumed run is summarized from its start. A
    file that cannot be written is a warning. Under `fast_dev_run` only the console lines are written.

    Attributes:
        every_n_steps: Optimizer steps between records of training metrics.
        summary_filename: File of the statistics in the run folder; no file if None.
        curves_filename: File of the picture in the run folder; no file if None.
        options_filename: File of the options in the run folder, written when training starts; no file if None.

    Raises:
        ValueError: If `every_n_steps` is less than 1.
    """

    every_n_steps: int = 1
    summary_filename: str | None = "summary.json"
    curves_filename: str | None = "curves.png"
    options_filename: str | None = "options.json"

    def __post_init__(self) -> None:
        check_fields(self, every_n_steps=(self.every_n_steps >= 1, "at least 1"))
        self.history = MetricHistory()
        self.training_seconds = 0.0
        self._started: float | None = None
        self._first_batch: float | None = None
        self._last_step = 0
        self._seen: dict[str, Tensor] = {}
        self._folder: Path | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reserve the files in the run folder."""
        if stage != "fit":
            return
        self._folder = run_folder(trainer)
        for name in filter(None, (self.summary_filename, self.curves_filename, self.options_filename)):
            if self._folder is not None:
                claim(trainer, self._folder / name, self)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the options, and start the clock."""
        if trainer.is_global_zero:
            self._write(self.options_filename, lambda: all_options(pl_module))
        self._started, self._first_batch = time.monotonic(), None
        self._first_step = self._last_step = trainer.global_step
        self._seen = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Record what the previous step logged after this callback's `on_train_batch_end`."""
        if self._first_batch is None:
            self._first_batch = time.monotonic()
        self._record_training(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the training metrics of a new optimizer step, so a checkpoint of this step includes them.

        The module's `on_train_batch_end` runs after those of all callbacks; what it logs is recorded later.
        """
        if trainer.global_step != self._last_step:
            self._last_step = trainer.global_step
            self._record_training(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the validation metrics; outside a fit, print the metrics of the data sources."""
        if trainer.sanity_checking:
            return
        if trainer.state.fn != "fit":
            table = source_table(trainer.callback_metrics, "test" if trainer.testing else "val")
            if table and trainer.is_global_zero:
                with OptionalWrites("RunSummary").to("the console"):
                    trainer.print(encodable(table))
            return
        metrics = trainer.callback_metrics
        validation = {name: value for name, value in metrics.items() if name.startswith(VALIDATION_PREFIXES)}
        self.history.record(trainer.global_step, validation)

    on_test_end = on_validation_end

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the summary."""
        self._record_training(trainer)
        self._stop_clock()
        if not trainer.is_global_zero or not self.history.points:
            return
        statistics = {name: self.history.statistics(name) for name in sorted(self.history.points)}
        limited_by, spent = None, getattr(getattr(pl_module, "throughput", None), "total_seconds", {})
        if "step" in spent and self._first_batch is not None:  # a module of this package
            lengths = [statistics.get(f"completions/{name}_length", {"mean": 1.0})["mean"] for name in ("mean", "max")]
            outside = time.monotonic() - self._first_batch - spent["step"]
            outside *= trainer.global_step - self._first_step >= _FEW_STEPS
            limited_by = find_bottleneck(spent, outside, RunFacts.of(pl_module, *lengths))
        with OptionalWrites("RunSummary").to("the console"):
            text = summary_text(statistics, trainer.global_step, self.training_seconds, self._folder, limited_by)
            trainer.print(encodable(text))
        log_tables(trainer, [summary_table(statistics, trainer.global_step)], OptionalWrites("RunSummary"))
        summary = {"steps": trainer.global_step, "training_seconds": self.training_seconds, "metrics": statistics}
        summary["limited_by"] = limited_by
        self._write(self.summary_filename, lambda: summary)
        if self._folder is not None and self.curves_filename is not None:
            path = self._folder / self.curves_filename
            policy = getattr(pl_module, "policy", None)
            model = getattr(getattr(policy, "config", None), "name_or_path", None)
            if policy is not None and (not model or Path(model).exists()):  # a folder's name says little
                model = type(policy).__name__
            facts = (type(pl_module).__name__, model, f"{trainer.global_step} steps")
            title = f"{Path(*self._folder.parts[-2:])}: {', '.join(filter(None, facts))}"
            with PROGRESS.during("Drawing the curves"), OptionalWrites("RunSummary").to(path):
                draw_curves(self.history.points, path, title)

    def _write(self, filename: str | None, content: Callable[[], Any]) -> None:
        """Write JSON to a file in the run folder, if there are both."""
        if self._folder is not None and filename is not None:
            path = self._folder / filename
            with OptionalWrites("RunSummary").to(path):
                write_whole(path, json.dumps(content(), indent=1, default=str).encode() + b"\n")

    def state_dict(self) -> dict[str, Any]:
        """Return the history and the seconds spent in training."""
        self._stop_clock()
        return {"history": self.history.state_dict(), "training_seconds": self.training_seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the history of a checkpoint."""
        self.history.load_state_dict(state_dict["history"])
        self.training_seconds = float(state_dict["training_seconds"])

    def _record_training(self, trainer: Trainer) -> None:
        """Record the last step's values that are new since the previous call.

        Lightning returns the same storage until a metric is logged again. Holding on to it here ensures that a new
        value has different storage.
        """
        metrics = {name: v for name, v in trainer.callback_metrics.items() if not name.startswith(VALIDATION_PREFIXES)}
        seen, self._seen = self._seen, metrics
        if self._last_step % self.every_n_steps == 0:
            fresh = {n: v for n, v in metrics.items() if n not in seen or seen[n].data_ptr() != v.data_ptr()}
            self.history.record(self._last_step, fresh)

    def _stop_clock(self) -> None:
        """Add the time since the last call; the clock keeps running."""
        if self._started is not None:
            now = time.monotonic()
            self.training_seconds += now - self._started
            self._started = now


def summary_text(
    statistics: Statistics, steps: int, seconds: float, folder: Path | None, limited_by: str | None = None
) -> str:
    """The most important logged figures in a few lines."""
    lines = [("Run summary", f"{steps} steps in {seconds:.0f} s")]
    if "reward" in statistics:
        lines.append(("reward", "first {first:.3f}, last {last:.3f}".format(**statistics["reward"])))
    for name, values in statistics.items():
        if name.startswith(VALIDATION_PREFIXES):
            form = "first {first:.3f}, last {last:.3f}, lowest over the last quarter {min_last_quarter:.3f}"
            if values.get("count") == 1:
                form = "{first:.3f}, measured once: trainer.val_check_interval says when"
            lines.append((name, form.format(**values)))
    for split, prefix in (("training", "data/"), ("validation", "data/val_")):
        dropped, truncated = (
            statistics.get(f"{prefix}{what}_prompts", {"last": 0.0})["last"] for what in ("dropped", "truncated")
        )
        if dropped or truncated:
            lines.append((f"{split} prompts", f"{dropped:.0f} dropped, {truncated:.0f} truncated (too long)"))
    flat = statistics.get("frac_reward_zero_std", {"mean": 0.0})["mean"]
    if flat > _FLAT and "value/explained_variance" not in statistics:
        what = f"in {100 * flat:.0f}% of groups, which teach nothing"
        lines.append(("all rewards equal", f"{what}: docs/troubleshooting.md#the-reward-stays-flat"))
    for name, label, form in (
        ("perf/tokens_per_second", "tokens per second", "mean {mean:.0f}"),
        ("perf/mfu", "MFU", "mean {mean:.3f} (useful operations / the GPU's dense bfloat16 rate)"),
        ("prefix/token_ratio", "token ratio", "mean {mean:.2f} (tokens with repeated prompts / tokens run)"),
        ("value/explained_variance", "explained variance", "first {first:.2f}, last {last:.2f} (critic)"),
        ("token_group/compression_ratio", "compression", "mean {mean:.3f}, last {last:.3f} (1 - endpoints / tokens)"),
        (
            "prefix/measured_speedup",
            "measured speedup",
            "mean {mean:.2f}, last {last:.2f} (decoder alone; repeated prompts cost attention and padding too)",
        ),
    ):
        if name in statistics:
            lines.append((label, form.format(**statistics[name])))
    parts = {name[len("time/") :]: values["mean"] for name, values in statistics.items() if name.startswith("time/")}
    if parts:
        lines.append(("seconds per step", ", ".join(f"{part} {mean:.3f}" for part, mean in parts.items())))
    if limited_by is not None:
        lines.append(("limited by", limited_by))
    if folder is not None:
        lines.append(("run folder", str(folder)))
    (title, first), *rest = lines
    return "\n".join([f"{title}: {first}", *(f"  {label:<19} {text}" for label, text in rest)])


class WeightSummary(ModelSummary):
    """Lightning's `ModelSummary` without its FLOPs, which are 0 before anything has run.

    Args:
        max_depth: Levels of submodules to show: 1 for the parts of the module, such as policy and reference; 0 for
            none.
    """

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int,
        **summarize_kwargs: Any,
    ) -> None:
        """Print name, class and number of weights of each part."""
        from rich import get_console
        from rich.table import Table

        columns = {name: values for name, values in summary_data if name in ("Name", "Type", "Params")}
        table = Table(*("weights" if name == "Params" else name.lower() for name in columns))
        for row in zip(*columns.values(), strict=True):
            table.add_row(*row)
        counts = (get_human_readable_count(int(count)).strip() for count in (trainable_parameters, total_parameters))
        table.caption = "{} of {} weights are trained".format(*counts)
        get_console().print(table)
