"""A Lightning logger for trackio, which keeps runs on this machine or in a Hugging Face Space."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.logger import _convert_params, _flatten_dict
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from pl_grouprl.loggers.tables import Table, log_table
from pl_grouprl.utilities.optional import TRACKIO_AVAILABLE, require


class TrackioLogger(Logger):
    """Log metrics, options and tables with trackio; `trackio show` opens the dashboard.

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
