"""A full disk: what only observes a run warns, and what is to be kept is an error that leaves the former one."""

import errno
import json
import os
from contextlib import ExitStack

import pytest
from helpers.full_disk import full_disk
from helpers.tiny_models import tiny_model

from pl_grouprl.callbacks import CompletionsTable, ExportPolicy, RunSummary
from pl_grouprl.callbacks.curves import draw_curves

pytestmark = pytest.mark.usefixtures("capsys")  # output that is captured in memory has no limit


def warnings_of(recorded):
    return [str(one.message) for one in recorded if "cannot write to" in str(one.message)]


def test_a_table_that_cannot_be_written_warns_once_and_keeps_whole_lines(fit, counter, tmp_path):
    with full_disk(1000), pytest.warns(UserWarning, match="cannot write to") as recorded:
        trainer = fit(counter, CompletionsTable(every_n_steps=1, console=False), max_steps=4, logger=False)
    assert trainer.global_step == 4
    file = tmp_path / "version_0" / "completions.jsonl"
    (warning,) = warnings_of(recorded)
    assert f"CompletionsTable cannot write to {file}: [Errno 27] File too large" in warning
    assert {json.loads(line)["step"] for line in file.read_text().splitlines()} == {1}


def test_a_table_is_written_again_when_there_is_space(fit, counter, tmp_path):
    step, full = counter.training_step, ExitStack()

    def training_step(batch, batch_idx):
        if counter.global_step == 0:
            full.enter_context(full_disk(10))
        if counter.global_step == 2:
            full.close()
        return step(batch, batch_idx)

    counter.training_step = training_step
    with full, pytest.warns(UserWarning, match="CompletionsTable cannot write"):
        fit(counter, CompletionsTable(every_n_steps=1, console=False), max_steps=4, logger=False)
    lines = (tmp_path / "version_0" / "completions.jsonl").read_text().splitlines()
    assert {json.loads(line)["step"] for line in lines} == {3, 4}


def test_a_summary_that_cannot_be_written_warns(fit, counter, tmp_path):
    with full_disk(100), pytest.warns(UserWarning, match="cannot write to") as recorded:
        trainer = fit(counter, RunSummary(), max_steps=4, logger=False)
    assert trainer.global_step == 4
    told = zip(("options.json", "summary.json", "curves.png"), warnings_of(recorded), strict=True)
    assert all(f"RunSummary cannot write to {tmp_path / 'version_0' / name}: " in warning for name, warning in told)
    assert [path.name for path in (tmp_path / "version_0").iterdir()] == ["run.json"]


def test_a_picture_is_replaced_as_a_whole(tmp_path):
    draw_curves({"reward": [(0, 1.0)]}, tmp_path / "curves.png")
    former = (tmp_path / "curves.png").read_bytes()
    with full_disk(len(former) // 2), pytest.raises(OSError, match="File too large"):
        draw_curves({"reward": [(0, 1.0)]}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes() == former


def test_a_failed_export_names_the_folder_and_leaves_the_former_one(fit, counter, tmp_path):
    counter.policy = tiny_model("qwen3")
    target = tmp_path / "exported"
    export = ExportPolicy(tokenizer_attribute=None, folder=str(target))
    fit(counter, export, max_steps=1, logger=False)
    former = {path.name: path.read_bytes() for path in target.iterdir()}
    message = f"could not be exported to {target}, an earlier export is untouched: .*File too large"
    with full_disk(10_000), pytest.raises(OSError, match=message):
        fit(counter, export, max_steps=2, logger=False)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == former
    assert not list(tmp_path.glob(".*"))


def test_an_export_without_permission_is_an_error_before_training(fit, counter, tmp_path, monkeypatch):
    counter.policy = tiny_model("qwen3")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(OSError, match=r"could not be exported to .*Permission denied"):
        fit(counter, ExportPolicy(tokenizer_attribute=None), max_steps=1)
    assert counter.trainer.global_step == 0


def test_tensorboard_that_fails_under_the_table_is_a_warning(fit, counter, tmp_path):
    from lightning.pytorch.loggers import TensorBoardLogger

    class Full(TensorBoardLogger):
        @property
        def experiment(self):
            return self

        def add_text(self, *args):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def log_metrics(self, *args, **kwargs):
            pass

        save = finalize = log_hyperparams = log_metrics

    logger = Full(tmp_path, name="", version=0)
    with pytest.warns(UserWarning, match=rf"CompletionsTable cannot write to {logger.log_dir}: .*No space left"):
        fit(counter, CompletionsTable(every_n_steps=1, console=False, filename=None), logger=logger)
    assert counter.trainer.global_step == 4
