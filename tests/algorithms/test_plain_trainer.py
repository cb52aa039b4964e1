"""A run by `Trainer(max_steps=...)` and nothing else."""

import csv
import logging
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelSummary, RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from pl_grouprl.algorithms import GRPO, PPO, GroupPPO, OptimizerConfig
from pl_grouprl.callbacks import CompletionsTable, ExportPolicy, RunProgressBar, RunSummary, SafeCheckpoint
from pl_grouprl.report import different_options, read_runs
from pl_grouprl.training import checks as prefix_sharing


@pytest.fixture
def fit(make_module, make_data, scripted_engine, tmp_path):
    def run(**options):
        options = {"logger": CSVLogger(tmp_path, name="", version=0)} | options
        options = {"enable_progress_bar": False, "enable_checkpointing": False, "max_steps": 2} | options
        trainer = Trainer(accelerator="cpu", default_root_dir=tmp_path, **options)
        trainer.fit(make_module(engine=scripted_engine, beta=0.1), make_data())
        return trainer

    return run


def test_it_keeps_curves_a_summary_and_every_step(fit, tmp_path, capfd):
    fit()
    folder = tmp_path / "version_0"
    assert {"curves.png", "summary.json", "metrics.csv"} <= {path.name for path in folder.iterdir()}
    with (folder / "metrics.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file) if row["reward"]] == ["0", "1"]
    printed = capfd.readouterr()
    assert "Run summary: 2 steps" in printed.out
    assert "FLOPs" not in printed.out + printed.err
    assert "weights are trained" in printed.out


@pytest.mark.parametrize(("cls", "name"), [(GRPO, "grpo"), (GroupPPO, "group_ppo"), (type("Mine", (PPO,), {}), "ppo")])
def test_the_trainers_own_logger_writes_where_the_configurations_do(make_module, make_trainer, tmp_path, cls, name):
    trainer = make_trainer(logger=True)
    assert "lightning_logs" in trainer.log_dir
    module = make_module(cls)
    module.trainer = trainer
    assert Path(trainer.log_dir) == tmp_path / "runs" / name / "version_0"
    (tmp_path / "runs" / name / "version_0").mkdir(parents=True)
    module.trainer = trainer = make_trainer(logger=True)
    assert Path(trainer.log_dir) == tmp_path / "runs" / name / "version_1"
    for logger, place in (
        (CSVLogger(tmp_path / "own"), tmp_path / "own" / "lightning_logs" / "version_0"),
        (CSVLogger(tmp_path, version="mine"), tmp_path / "lightning_logs" / "mine"),
        (TensorBoardLogger(tmp_path, version=7), tmp_path / "lightning_logs" / "version_7"),
    ):
        module.trainer = trainer = make_trainer(logger=logger)
        assert Path(trainer.log_dir) == place


def test_a_run_and_its_evaluations_are_in_one_place(make_module, make_data, make_trainer, scripted_engine, tmp_path):
    callbacks = [SafeCheckpoint(every_n_train_steps=1), CompletionsTable(console=False)]
    trainer = make_trainer(logger=True, max_steps=1, callbacks=callbacks)
    trainer.fit(make_module(engine=scripted_engine), make_data())
    trainer.validate(make_module(engine=scripted_engine), make_data(val=True), ckpt_path="last", verbose=False)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    run = tmp_path / "runs" / "grpo" / "version_0"
    assert list(run.parent.iterdir()) == [run]
    assert {"checkpoints", "completions.jsonl", "val_completions.jsonl"} < {path.name for path in run.iterdir()}


def test_an_evaluation_that_writes_nothing_leaves_no_folder(
    make_module, make_data, make_trainer, scripted_engine, tmp_path
):
    callbacks = [SafeCheckpoint(), CompletionsTable(filename=None, console=False), ExportPolicy(), RunSummary()]
    trainer = make_trainer(callbacks=callbacks)
    trainer.validate(make_module(), make_data(val=True), verbose=False)
    assert not list(tmp_path.iterdir())


def test_it_writes_nothing_without_a_logger(fit, tmp_path):
    trainer = fit(logger=False)
    assert not any(isinstance(own, RunSummary) for own in trainer.callbacks)
    assert not list(tmp_path.iterdir())


def test_what_the_trainer_is_given_stays(fit):
    summary, table = RunSummary(curves_filename=None), ModelSummary(max_depth=0)
    trainer = fit(callbacks=[summary, table], log_every_n_steps=49)
    assert [own for own in trainer.callbacks if isinstance(own, RunSummary)] == [summary]
    assert [own._max_depth for own in trainer.callbacks if isinstance(own, ModelSummary)] == [0]
    assert trainer.log_every_n_steps == 49


def test_lightnings_bar_is_replaced_with_its_options(fit):
    theme = RichProgressBarTheme(metrics="red")
    trainer = fit(callbacks=[RichProgressBar(refresh_rate=3, theme=theme)], enable_progress_bar=True)
    bar = trainer.progress_bar_callback
    assert type(bar) is RunProgressBar
    assert (bar.refresh_rate, bar.theme) == (3, theme)


def test_models_that_share_are_named_once(fit, monkeypatch):
    lines = []
    monkeypatch.setattr(prefix_sharing, "rank_zero_info", lines.append)
    fit(logger=False)
    assert len(lines) == 1
    assert "encoded once by policy and reference (Qwen3ForCausalLM, attention backend 'auto'" in lines[0]


def test_another_run_of_the_trainer_reports_no_overridden_callbacks(fit, make_module, make_data, caplog):
    trainer = fit(logger=False)
    first = list(trainer.callbacks)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        trainer.validate(make_module(), make_data(val=True), verbose=False)
    assert "override" not in caplog.text
    assert [type(own) for own in trainer.callbacks] == [type(own) for own in first]


def test_options_of_runs_are_recorded_for_the_report(make_module, make_data, scripted_engine, tmp_path):
    for seed, rate in enumerate((1e-2, 1e-2, 1e-3)):
        trainer = Trainer(
            accelerator="cpu",
            logger=CSVLogger(tmp_path, name="", version=seed),
            enable_progress_bar=False,
            enable_checkpointing=False,
            max_steps=1,
        )
        optimizer = OptimizerConfig(learning_rate=rate)
        trainer.fit(make_module(engine=scripted_engine, seed=seed, optimizer=optimizer), make_data())
    runs = read_runs([tmp_path / f"version_{seed}" for seed in range(3)])
    assert different_options(runs) == {"seed": [0, 1, 2], "optimizer.learning_rate": [1e-2, 1e-2, 1e-3]}
    assert runs[0].options["engine"].endswith("tiny_runs.ScriptedEngine")
    assert runs[0].options["trainer.max_steps"] == 1
