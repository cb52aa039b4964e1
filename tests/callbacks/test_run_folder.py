"""Each run has a folder of its own, all of it lies there, and `ckpt_path last` finds it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from helpers.scripts import run_script
from helpers.tiny_models import tiny_model
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger

from pl_grouprl.callbacks import CompletionsTable, ExportPolicy, RunSummary, SafeCheckpoint
from pl_grouprl.callbacks.checkpoints import run_folder
from pl_grouprl.cli import last_checkpoint

TWO_RANKS = Path(__file__).with_name("run_folder_ranks.py")

WRITTEN = {"checkpoints", "completions.jsonl", "curves.png", "options.json", "policy", "summary.json"}


class Offline(Logger):
    """As W&B's: it knows where it saves, has no `log_dir`, and names a run when the run begins."""

    save_dir = name = version = None

    def __init__(self, save_dir, version=None, name="project"):
        self.save_dir, self.name = str(save_dir), name
        self._version = version

    @property
    def experiment(self):
        self.version = self._version

    def log_metrics(self, metrics, step=None):
        pass

    def log_hyperparams(self, params, *args):
        pass


def callbacks():
    writers = (CompletionsTable(console=False), RunSummary(), ExportPolicy(tokenizer_attribute=None))
    return (*writers, SafeCheckpoint(every_n_train_steps=2, save_last=True))


@pytest.fixture
def run(fit, counter):
    """Train with everything that writes; returns the Trainer."""
    counter.policy = tiny_model("qwen3")

    def call(logger, **options):
        return fit(counter, *callbacks(), logger=logger, enable_checkpointing=True, **options)

    return call


def names(folder):
    return {path.name for path in folder.iterdir()}


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_runs_without_a_logger_have_a_folder_each_with_all_their_files(run, counter, tmp_path):
    run(False)
    first = contents(tmp_path)
    assert names(tmp_path / "version_0") >= WRITTEN
    trainer = run(False, ckpt_path=tmp_path / "version_0" / "checkpoints" / "last.ckpt", max_steps=6)
    trainer.fit(counter, trainer.train_dataloader)  # a second fit stays there
    assert names(tmp_path) == {"version_0", "version_1"}
    assert names(tmp_path / "version_1") == names(tmp_path / "version_0")
    assert contents(tmp_path / "version_0") == first


def test_a_logger_without_a_log_dir_has_one_folder_for_each_run(run, tmp_path):
    for version in ("a1", "b2"):
        run(Offline(tmp_path / "logs", version))
    for _ in range(2):
        run(Offline(tmp_path / "logs"))  # without versions
    assert names(tmp_path) == {"logs"}
    assert names(tmp_path / "logs" / "project") == {"a1", "b2", "version_0", "version_1"}
    assert names(tmp_path / "logs" / "project" / "b2") >= WRITTEN
    assert names(tmp_path / "logs" / "project" / "version_1") >= WRITTEN
    run(Offline(tmp_path, name=""))  # it would write into the root folder
    assert names(tmp_path / "version_0") >= WRITTEN


def test_a_second_run_of_a_fixed_version_has_a_folder_in_it(run, tmp_path):
    run(CSVLogger(tmp_path, name="own", version="fixed"))
    folder = tmp_path / "own" / "fixed"
    first = {path: content for path, content in contents(folder).items() if path.name != "metrics.csv"}
    run(CSVLogger(tmp_path, name="own", version="fixed"))
    assert {path: path.read_bytes() for path in first} == first
    assert names(folder / "version_0") >= WRITTEN


@pytest.mark.parametrize("kind", ["none", "named by the logger", "numbered", "as before"])
def test_last_finds_the_newest_run(fit, counter, tmp_path, kind):
    def logger(version):
        return {"none": False, "as before": False, "numbered": Offline(tmp_path)}.get(kind, Offline(tmp_path, version))

    for version, steps in (("a", 4), ("b", 6)):
        saving = SafeCheckpoint(every_n_train_steps=2, save_last=True)
        trainer = fit(counter, saving, logger=logger(version), enable_checkpointing=True, max_steps=steps)
    newest = Path(trainer.checkpoint_callback.dirpath) / "last.ckpt"
    if kind == "as before":  # where Lightning's own ModelCheckpoint writes
        newest = (tmp_path / "checkpoints").joinpath(newest.name)
        Path(trainer.checkpoint_callback.dirpath).rename(newest.parent)
    other = Trainer(accelerator="cpu", logger=logger("c"), default_root_dir=tmp_path)
    assert last_checkpoint(other) == str(newest)


def test_an_evaluation_decides_on_no_folder(counter, tmp_path):
    callback = SafeCheckpoint()
    trainer = Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path, callbacks=[callback])
    callback.setup(trainer, counter, "validate")
    assert callback.dirpath is None
    assert names(tmp_path) == set()


@pytest.mark.parametrize("with_logger", [False, True])
def test_runs_that_start_at_once_share_no_folder(tmp_path, with_logger):
    runs, together = 8, Barrier(8)

    def take(number):
        logger = CSVLogger(tmp_path, name="own") if with_logger else False
        _ = logger and logger.version  # all of them see that version 0 is free
        trainer = Trainer(accelerator="cpu", logger=logger, default_root_dir=tmp_path)
        together.wait(60)
        return run_folder(trainer)

    with ThreadPoolExecutor(runs) as threads:
        assert len(set(threads.map(take, range(runs)))) == runs


def test_ranks_share_the_folder_of_rank_0_and_its_errors(tmp_path):
    (tmp_path / "mine.jsonl").write_text("mine")
    run_script(TWO_RANKS, tmp_path, ranks=2, cwd=tmp_path)
    for rank in (0, 1):
        assert (tmp_path / f"rank{rank}-0.txt").read_text() == str(tmp_path / "runs" / "version_0" / "checkpoints")
        assert "mine.jsonl, which has something not written by this run" in (tmp_path / f"rank{rank}-1.txt").read_text()
    assert (tmp_path / "runs" / "version_0" / "checkpoints" / "last.ckpt").is_file()
    assert (tmp_path / "mine.jsonl").read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_an_error_before_training(fit, counter, tmp_path):
    (tmp_path / "project").write_text("a file")
    with pytest.raises(OSError, match=r"No run folder can be created in .*project/a"):
        fit(counter, RunSummary(), logger=Offline(tmp_path, "a"))
    with pytest.raises(ValueError, match=r"The run folder would be in s3:/bucket"):
        fit(counter, RunSummary(), logger=Offline("s3://bucket"))
    assert counter.trainer.global_step == 0


def test_callbacks_of_a_second_trainer_leave_the_first_runs_checkpoints(fit, counter, tmp_path):
    saving = SafeCheckpoint(every_n_train_steps=2, save_last=True)
    for _ in range(2):
        fit(counter, saving, logger=False, enable_checkpointing=True)
    for version in ("version_0", "version_1"):
        assert len(list((tmp_path / version / "checkpoints").glob("*.ckpt"))) == 2, version
