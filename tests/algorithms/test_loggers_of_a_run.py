"""Loggers of a run: what they cannot write is a warning, and what a former run wrote stays."""

import csv
import pickle
import posixpath
import re
import socket
import subprocess
import sys

import pytest
from helpers.full_disk import full_disk
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger

from pl_grouprl.utilities.loggers import prepare_loggers

pytestmark = pytest.mark.usefixtures("capsys")  # output that is captured in memory has no limit


def loggers(folder, **options):
    return [CSVLogger(folder, name="own", **options), TensorBoardLogger(folder, name="own", **options)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_loggers_that_cannot_write_warn_once_and_training_continues(make_module, make_data, make_trainer, tmp_path):
    own = loggers(tmp_path)
    trainer = make_trainer(max_steps=6, logger=own, log_every_n_steps=1)
    own[0]._flush_logs_every_n_steps = 1
    with full_disk(1500), pytest.warns(UserWarning, match="cannot write to") as recorded:
        trainer.fit(make_module(), make_data())
    assert trainer.global_step == 6
    warnings = sorted(str(one.message) for one in recorded if "cannot write to" in str(one.message))
    assert {warning.partition(" ")[0] for warning in warnings} == {"CSVLogger", "RunSummary", "TensorBoardLogger"}
    assert len(set(warnings)) == len(warnings)
    for warning in warnings:
        assert f" cannot write to {tmp_path}/own/version_0" in warning
        assert ": [Errno 27] File too large. Training" in warning
        assert "free space there, or make it writable" in warning
    assert (tmp_path / "own" / "version_0" / "metrics.csv").is_file()


def test_a_logger_that_cannot_be_opened_is_an_error_with_its_folder(make_module, make_data, make_trainer, tmp_path):
    (tmp_path / "own").write_text("a file")
    trainer = make_trainer(max_steps=1, logger=CSVLogger(tmp_path, name="own", version=0))
    with pytest.raises(OSError, match="own"):
        trainer.fit(make_module(), make_data())


def test_all_loggers_of_a_run_share_a_folder_from_python_too(make_module, make_data, make_trainer, tmp_path):
    make_trainer(max_steps=1, logger=loggers(tmp_path)).fit(make_module(), make_data())
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["version_0"]


def test_a_fixed_version_keeps_the_metrics_of_former_runs(make_module, make_data, make_trainer, tmp_path):
    folder = tmp_path / "own" / "fixed"
    for _ in range(3):
        trainer = make_trainer(
            max_steps=1, log_every_n_steps=1, logger=CSVLogger(tmp_path, name="own", version="fixed")
        )
        trainer.fit(make_module(), make_data())
    written = [(folder / name).read_text() for name in ("metrics_1.csv", "metrics_2.csv", "metrics.csv")]
    assert all("reward" in text for text in written)
    trainer.fit(make_module(), make_data())  # the same logger goes on
    assert not (folder / "metrics_3.csv").exists()


def test_two_runs_at_once_do_not_write_one_file(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        folder = tmp_path / "own" / "fixed"
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text("step\n")
        (tmp_path / "own" / ".fixed.writer").write_text(f"{socket.gethostname()}-{other.pid}")
        logger = CSVLogger(tmp_path, name="own", version="fixed")
        with pytest.raises(
            ValueError, match=rf"another run \(process {other.pid}\); give the CSVLogger another version"
        ):
            prepare_loggers([logger])
        other.communicate(b"\n")
    prepare_loggers([logger])
    assert (folder / "metrics_1.csv").read_text() == "step\n"
    logger.finalize("success")
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["fixed"]


class Particular(CSVLogger):
    def log_metrics(self, metrics, step=None):
        if "loss" in metrics:
            raise KeyError("no such metric")
        super().log_metrics(metrics, step)

    def log_hyperparams(self, *args, **kwargs):
        raise ValueError("too long")

    def finalize(self, status):
        super().finalize(status)
        raise RuntimeError("not my run")


def test_no_complaint_of_a_logger_ends_a_run_and_it_gets_what_it_takes(make_module, make_data, make_trainer, tmp_path):
    trainer = make_trainer(max_steps=2, log_every_n_steps=1, logger=Particular(tmp_path, version="own"))
    with pytest.warns(UserWarning, match="Particular") as recorded:
        trainer.fit(make_module(), make_data())
    said = [str(one.message) for one in recorded if str(one.message).startswith("Particular")]
    with pytest.warns(UserWarning, match="Particular raised too long; training continues"):
        trainer.logger.log_hyperparams({})
    assert said == [
        "Particular refuses the metrics loss ('no such metric'); it does without them, and training continues.",
        "Particular raised not my run; training continues.",
    ]
    with open(tmp_path / "lightning_logs" / "own" / "metrics.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert "loss" not in rows[0]
    assert {row["step"] for row in rows if row["reward"]} == {"0", "1"}


class Recorded(MLFlowLogger):
    """Checks names as MLflow does, and keeps them."""

    run_id = "run"

    def __init__(self):
        self.names, self._prefix, self._log_batch_kwargs = [], "", {}  # and nothing that opens MLflow

    @property
    def experiment(self):
        return self

    def log_batch(self, run_id, metrics, **options):
        for name in (metric.key for metric in metrics):
            assert re.fullmatch(r"[\w/. -]{1,250}", name, flags=re.ASCII)
            assert posixpath.normpath(name) == name
            assert not name.startswith(("/", "../"))
        self.names += [metric.key for metric in metrics]


def test_mlflow_gets_one_name_for_each_metric():
    pytest.importorskip("mlflow")
    sources = [
        "openai/gsm8k", "math (hard)", "a+b", "ab", "a b", "a-b", "数学", "数", "学", "\\x1b", "-", "AIME-2024",
    ]  # fmt: skip
    metrics = {f"val/{source}/mean@2": 0.5 for source in sources} | {"loss": 1.0, "time/step": 2.0}
    logger = Recorded()
    prepare_loggers([logger])
    logger.log_metrics(metrics, step=1)
    logger.log_metrics(metrics, step=2)
    assert logger.names[0] == "val/openai/gsm8k/mean-at-2"
    assert logger.names[: len(metrics)] == logger.names[len(metrics) :]
    assert len(set(logger.names)) == len(metrics)
    assert {"loss", "time/step", "val/ab/mean-at-2"} <= set(logger.names)


def test_prepared_loggers_are_what_they_were(tmp_path):
    own = loggers(tmp_path)
    for _ in range(2):
        prepare_loggers(own)
    for logger, kind in zip(own, (CSVLogger, TensorBoardLogger), strict=True):
        assert isinstance(logger, kind)
        assert isinstance(logger, Logger)
        assert type(logger).__name__ == kind.__name__
        copy = pickle.loads(pickle.dumps(logger))
        assert type(copy) is kind
        assert copy.log_dir == logger.log_dir
