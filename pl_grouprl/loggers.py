"""Tables in Lightning's loggers, and a logger for trackio.

Each call of `log_table` adds rows, and rows of earlier steps stay. To support another class of logger, or replace a
function:

    log_table.register(MyLogger)(my_function)  # takes the logger and the table
"""

from __future__ import annotations

import csv
import io
import itertools
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from lightning.fabric.utilities.logger import _convert_params, _flatten_dict
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from pl_grouprl.utilities.checkpoint_files import append_whole
from pl_grouprl.utilities.optional import TRACKIO_AVAILABLE, require


@dataclass(frozen=True)
class Table:
    """The rows that one step adds to a table.

    Attributes:
        name: Name of the table. All tables of a run with this name have the same columns.
        step: Optimizer steps done.
        columns: Names of the columns.
        rows: The values of each row in the order of the columns: strings, numbers or None. A column may mix them.
        markdown: What text-only loggers show; defaults to all the rows.
    """

    name: str
    step: int
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    markdown: str | None = None

    def portable_rows(self) -> list[list[Any]]:
        """The rows, with integers beyond 64 bits as text: MLflow and trackio cannot store them."""
        is_large = lambda value: isinstance(value, int) and not -(2**63) <= value < 2**63  # noqa: E731
        return [[str(value) if is_large(value) else value for value in row] for row in self.rows]


def markdown_of(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Write rows as a Markdown table."""
    cells = [["" if value is None else str(value).replace("|", "\\|").replace("\n", " ") for value in r] for r in rows]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *(f"| {' | '.join(row)} |" for row in cells)]
    return "\n".join(lines)


@singledispatch
def log_table(logger: Logger, table: Table) -> None:
    """Add a table's rows to a logger; loggers without tables ignore them. For rank 0 only.

    | logger | where |
    |---|---|
    | `CSVLogger` | `tables/{name}.csv` in its folder; `tables_1` if an earlier run has written there |
    | `TensorBoardLogger` | the text `{name}`, one per step |
    | `WandbLogger` | an incremental `wandb.Table` under the key `{name}` |
    | `MLFlowLogger` | the artifact `{name}.json` |
    | `TrackioLogger` | a `trackio.Table` per step under the key `{name}` |

    Args:
        logger: A logger of the Trainer.
        table: The rows.

    Raises:
        OSError: If a logger cannot write its file.
    """


_CSV_FOLDERS: WeakKeyDictionary[CSVLogger, Path] = WeakKeyDictionary()
"""Where each logger writes its tables; never in the folder of an earlier run."""


@log_table.register
def _(logger: CSVLogger, table: Table) -> None:
    if logger not in _CSV_FOLDERS:
        names = ("tables" if number == 0 else f"tables_{number}" for number in itertools.count())
        _CSV_FOLDERS[logger] = next(path for name in names if not (path := Path(logger.log_dir) / name).exists())
    file = _CSV_FOLDERS[logger] / f"{table.name}.csv"
    text = io.StringIO()
    writer = csv.writer(text)  # its line ending \r\n makes it quote cells that contain either character
    if not file.exists():
        writer.writerow(table.columns)
    writer.writerows(table.rows)
    append_whole(file, text.getvalue().encode("utf-8", "backslashreplace"))


@log_table.register
def _(logger: TensorBoardLogger, table: Table) -> None:
    text = markdown_of(table.columns, table.rows) if table.markdown is None else table.markdown
    logger.experiment.add_text(table.name, text, table.step)


_WANDB_TABLES: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
"""The tables of each wandb run by name: an incremental table must be the same object at every step."""


@log_table.register
def _(logger: WandbLogger, table: Table) -> None:
    import wandb

    tables = _WANDB_TABLES.setdefault(logger.experiment, {})
    if table.name not in tables:
        columns: list[str | int] = list(table.columns)
        tables[table.name] = wandb.Table(columns=columns, log_mode="INCREMENTAL", allow_mixed_types=True)
    for row in table.portable_rows():
        tables[table.name].add_data(*row)
    logger.log_metrics({table.name: tables[table.name]}, table.step)


@log_table.register
def _(logger: MLFlowLogger, table: Table) -> None:
    rows = table.portable_rows()
    columns = {name: [row[place] for row in rows] for place, name in enumerate(table.columns)}
    logger.experiment.log_table(logger.run_id, columns, f"{table.name}.json")


class TrackioLogger(Logger):
    """Log metrics, options and tables with trackio, which keeps runs on this machine or in a Hugging Face Space.

    `trackio show` opens the dashboard.

    Args:
        project: Name of the project.
        name: Name of the run; None lets trackio choose one.
        resume: `allow` continues a run of that name if there is one, `must` requires one, `never` starts a new one.
        **options: Other arguments of `trackio.init`, such as `space_id` and `group`.

    Raises:
        ModuleNotFoundError: If trackio is not installed.
    """

    def __init__(
        self, project: str = "pl_grouprl", name: str | None = None, resume: str = "never", **options: Any
    ) -> None:
        require(TRACKIO_AVAILABLE, "TrackioLogger", "trackio")
        super().__init__()
        self._project = project
        self._name = name
        self._options = {"resume": resume, **options}
        self._config: dict[str, Any] = dict(self._options.pop("config", None) or {})
        self._run: Any = None

    @property
    def name(self) -> str:
        """Name of the project."""
        return self._project

    @property
    def version(self) -> str | None:
        """Name of the run; if trackio chooses it, None until the run starts."""
        return self._name

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The `trackio.Run`, started on first use."""
        if self._run is None:
            import trackio

            self._run = trackio.init(self._project, name=self._name, config=self._config, **self._options)
            self._name = self._run.name
        return self._run

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Log options; trackio keeps only those logged before the first metric."""
        flat = _flatten_dict(_convert_params(params))
        self._config.update({name: str(value) for name, value in flat.items()})
        self.experiment.config.update(self._config)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log the values of a step."""
        self.experiment.log(dict(metrics), step=step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Finish the run; logging again continues it."""
        if self._run is not None:
            self._run.finish()
            self._run = None
            self._options["resume"] = "allow"


@log_table.register
def _(logger: TrackioLogger, table: Table) -> None:
    import trackio

    logger.log_metrics({table.name: trackio.Table(list(table.columns), table.portable_rows())}, table.step)
