"""Every logger keeps the rows of all steps, with its real package and offline."""

import csv
import json
import logging
from importlib.util import find_spec

import pytest
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger

from pl_grouprl.loggers import Table, TrackioLogger, log_table, markdown_of
from pl_grouprl.utilities.loggers import prepare_loggers

COLUMNS = ["step", "text", "reward", "answer"]
FIRST = Table("answers", 1, COLUMNS, [[1, "a|b\nc", 0.5, 7], [1, "ü", None, "x"]])
SECOND = Table("answers", 2, COLUMNS, [[2, "d", 1, 2**70]])
LARGE = str(2**70)


def needs(package):
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


def put_back(monkeypatch, *variables):
    """Environment variables that a logger sets are unset now, and as they were after the test."""
    for name in variables:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def log_both(logger):
    prepare_loggers([logger])  # the guarded subclass of its class must be found too
    log_table(logger, FIRST)
    logger.log_metrics({"loss": 0.25}, step=1)
    log_table(logger, SECOND)


def test_csv_has_one_file_with_one_header(tmp_path):
    logger = CSVLogger(tmp_path, name="", version="run")
    log_both(logger)
    with (tmp_path / "run" / "tables" / "answers.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [COLUMNS, ["1", "a|b\nc", "0.5", "7"], ["1", "ü", "", "x"], ["2", "d", "1", LARGE]]


def test_csv_gives_back_any_text(tmp_path):
    logger = CSVLogger(tmp_path, name="", version="run")
    texts = ["a\rb", "a\r\nb", "a\nb", '"q', "a,b", "\u2028", " a ", "#a", "'a"]
    log_table(logger, Table("answers", 1, ["text", "reward"], [[text, None] for text in texts]))
    with (tmp_path / "run" / "tables" / "answers.csv").open(encoding="utf-8", newline="") as file:
        assert [row[0] for row in csv.reader(file)] == ["text", *texts]


def test_tables_of_an_earlier_run_in_the_folder_of_a_csv_logger_are_kept_apart(tmp_path):
    for _ in range(3):
        log_both(CSVLogger(tmp_path, name="", version="run"))
    for name in ("tables", "tables_1", "tables_2"):
        assert len((tmp_path / "run" / name / "answers.csv").read_text(encoding="utf-8").splitlines()) == 5


def test_tensorboard_has_a_text_per_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, name="", version="run")
    log_both(logger)
    logger.finalize("success")
    events = EventAccumulator(logger.log_dir).Reload()
    texts = [(e.step, e.tensor_proto.string_val[0].decode()) for e in events.Tensors("answers/text_summary")]
    assert [step for step, _ in texts] == [1, 2]
    assert texts[0][1] == (
        "| step | text | reward | answer |\n|---|---|---|---|\n| 1 | a\\|b c | 0.5 | 7 |\n| 1 | ü |  | x |"
    )


@needs("wandb")
def test_wandb_gets_an_increment_per_step(tmp_path, monkeypatch):
    import wandb

    put_back(monkeypatch, "WANDB_MODE", "WANDB_SERVICE")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(project="test", save_dir=tmp_path, offline=True)
    try:
        log_both(logger)
        summary = dict(logger.experiment.summary["answers"])
    finally:
        wandb.finish()
        wandb.teardown()
    files = sorted(tmp_path.glob("wandb/offline-run-*/files/media/table/*.table.json"))
    tables = sorted((json.loads(file.read_text())["data"] for file in files), key=len, reverse=True)
    assert tables == [FIRST.rows, [[2, "d", 1, LARGE]]]
    assert (summary["log_mode"], summary["increment_num"], summary["nrows"]) == ("INCREMENTAL", 1, 3)


@needs("mlflow")
def test_mlflow_adds_to_the_artifact(tmp_path, monkeypatch):
    put_back(monkeypatch, "MLFLOW_TRACKING_URI")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = MLFlowLogger("test", tracking_uri=f"file:{tmp_path}/mlruns")
    log_both(logger)
    (file,) = tmp_path.glob("mlruns/*/*/artifacts/answers.json")
    assert json.loads(file.read_text()) == {
        "columns": COLUMNS,
        "data": [[1, "a|b\nc", 0.5, 7], [1, "ü", None, "x"], [2, "d", 1.0, LARGE]],
    }


@pytest.mark.parametrize(
    ("value", "shown"),
    [(2**63 - 1, 2**63 - 1), (2**63, str(2**63)), (-(2**63), -(2**63)), (-(2**63) - 1, str(-(2**63) - 1))]
    + [(value, value) for value in ("x", 0.5, None, True)],
)
def test_integers_beyond_64_bits_are_text(value, shown):
    assert Table("answers", 1, ["answer"], [[value]]).portable_rows() == [[shown]]


@needs("trackio")
def test_trackio_has_a_table_per_step_and_options(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # read on import
    monkeypatch.setattr(logging.getLogger("httpx"), "level", logging.WARNING)  # as trackio sets it
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setattr(trackio.utils, "TRACKIO_DIR", tmp_path)
    monkeypatch.setattr(trackio.sqlite_storage, "TRACKIO_DIR", tmp_path)
    logger = TrackioLogger("test", name="run", auto_log_gpu=False, auto_log_cpu=False)
    logger.log_hyperparams({"sampling": {"temperature": 0.7}})
    log_both(logger)
    logger.finalize("success")
    logger.log_metrics({"loss": 0.125}, step=3)  # a second fit of the Trainer continues the run
    logger.finalize("success")
    logs = SQLiteStorage.get_logs("test", "run")
    assert [(log["step"], log["loss"]) for log in logs if "loss" in log] == [(1, 0.25), (3, 0.125)]
    assert [(log["step"], log["answers"]["_value"]) for log in logs if "answers" in log] == [
        (step, [dict(zip(COLUMNS, row, strict=True)) for row in rows])
        for step, rows in ((1, FIRST.rows), (2, [[2, "d", 1, LARGE]]))
    ]
    assert SQLiteStorage.get_run_config("test", "run")["sampling/temperature"] == "0.7"
    assert (logger.name, logger.version) == ("test", "run")


def test_without_trackio_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr("pl_grouprl.loggers.TRACKIO_AVAILABLE", False)
    with pytest.raises(ModuleNotFoundError, match=r"TrackioLogger needs an optional package.*pl-grouprl\[trackio\]"):
        TrackioLogger()


def test_a_logger_without_tables_ignores_them_and_another_class_can_be_registered():
    class Mine(DummyLogger):
        tables = ()

    log_table(DummyLogger(), FIRST)
    log_table.register(Mine, lambda logger, table: setattr(logger, "tables", (*logger.tables, table)))
    mine = Mine()
    log_table(mine, FIRST)
    assert mine.tables == (FIRST,)
    assert log_table.dispatch(Logger)(mine, FIRST) is None


def test_markdown_of_no_rows_is_a_header():
    assert markdown_of(["a", "b"], []) == "| a | b |\n|---|---|"
