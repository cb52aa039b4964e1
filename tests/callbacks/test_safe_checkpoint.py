"""Whatever ends a save, the newest complete checkpoint is found and loads."""

from __future__ import annotations

import errno
import json
import os
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from helpers.counting import QUIET, Counter, fit, names, step_of
from helpers.full_disk import full_disk
from helpers.scripts import run_script
from lightning.pytorch import Trainer

from pl_grouprl.callbacks import SafeCheckpoint
from pl_grouprl.utilities import checkpoint_files
from pl_grouprl.utilities.checkpoint_files import (
    DirectCheckpointIO,
    commit,
    corruption_reason,
    finish_interrupted,
    manifest_of,
    newest_complete,
    read_manifest,
    remove_leftovers,
)

DEAD = f"{os.uname().nodename}-{2**22 + 1}"  # above the largest process id of Linux


# A whole run.


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_save_top_k_save_last_and_monitor_work_as_before(tmp_path):
    callback = fit(tmp_path, steps=8, save_top_k=2, save_last=True, monitor="score", mode="min").checkpoint_callback
    checkpoints = {"last.ckpt", "step=6.ckpt", "step=8.ckpt"}
    assert set(names(tmp_path)) == checkpoints | {f"{name}.manifest.json" for name in checkpoints}
    assert Path(callback.best_model_path).name == "step=8.ckpt"
    assert all(corruption_reason(tmp_path / name) is None for name in checkpoints)
    assert step_of(tmp_path / "last.ckpt") == 8
    last, folder = tmp_path / "last.ckpt", tmp_path / "linked"
    again = fit(folder, steps=10, checkpoint=last, save_top_k=-1, save_last="link")
    assert again.lightning_module.weight.item() == 10
    last = folder / "last.ckpt"
    assert last.is_symlink()
    assert corruption_reason(last) is None
    assert step_of(last) == 10


def test_the_manifest_can_be_checked_with_one_command(tmp_path):
    fit(tmp_path)
    path = tmp_path / "step=4.ckpt"
    done = run_script(checkpoint_files.__file__, path)
    assert done.stdout.endswith("complete\n")
    assert json.loads(manifest_of(path).read_text())["step"] == 4
    with path.open("ab") as file:
        file.write(b"x")
    torn = run_script(checkpoint_files.__file__, path, check=False)
    assert torn.returncode == 1
    assert "bytes of" in torn.stdout


# The best of a run.


class Validated(Counter):
    """Validation logs the score of each step, as scripted."""

    def __init__(self, scores):
        super().__init__()
        self.scores = scores

    def training_step(self, batch, batch_idx):
        return -self.weight.sum()

    def validation_step(self, batch, batch_idx):
        self.log("val/score", self.scores[self.global_step])

    val_dataloader = Counter.train_dataloader


def fit_validated(folder, scores, steps, *, validate_every=2, checkpoint=None, **options):
    """Returns the callback, and the step of each checkpoint with its score."""
    options = {"every_n_train_steps": 2, "mode": "max", "save_top_k": -1, "filename": "{step}", **options}
    callback = SafeCheckpoint(monitor="val/score", **options)
    validation = {"check_val_every_n_epoch": None, "val_check_interval": validate_every, "limit_val_batches": 1}
    validation |= {"num_sanity_val_steps": 0, "default_root_dir": folder, "max_steps": steps}
    trainer = Trainer(callbacks=[callback], **QUIET | validation)
    trainer.fit(Validated(scores), ckpt_path=checkpoint, weights_only=True)
    return callback, {step_of(path): round(float(score), 3) for path, score in callback.best_k_models.items()}


@pytest.mark.parametrize("every", [{"every_n_train_steps": 2}, {"train_time_interval": timedelta(0)}, {}])
def test_a_checkpoint_is_ranked_by_the_validation_of_its_own_weights(tmp_path, every):
    scores = {2: 0.2, 4: 0.9, 6: 0.1, 8: 0.3}
    every = {"every_n_train_steps": None} | every
    callback, saved = fit_validated(tmp_path, scores, 8, **every)
    assert saved == scores
    assert step_of(callback.best_model_path) == 4


@pytest.mark.parametrize("per_epoch", [False, True])
def test_a_save_between_two_validations_waits_for_the_next_and_is_last_until_then(tmp_path, monkeypatch, per_epoch):
    written = []
    save = SafeCheckpoint._save_checkpoint

    def noted(self, trainer, path):
        written.append((trainer.global_step, Path(path).stem))
        save(self, trainer, path)

    monkeypatch.setattr(SafeCheckpoint, "_save_checkpoint", noted)
    monkeypatch.setattr(SafeCheckpoint, "_should_save_on_train_epoch_end", lambda self, trainer: per_epoch)
    callback, saved = fit_validated(tmp_path, {3: 0.3, 6: 0.1, 9: 0.2}, 9, validate_every=3, save_last=True)
    assert saved == {3: 0.3, 6: 0.1, 9: 0.2}
    assert step_of(callback.best_model_path) == 3
    assert written == [
        *((2, "last"), (3, "step=3"), (3, "last"), (4, "last"), (6, "step=6"), (6, "last"), (8, "last")),
        *((9, "step=9"), (9, "last")),
    ]


def test_a_resumed_run_keeps_the_best_so_far(tmp_path):
    scores = {2: 0.9, 4: 0.3, 6: 0.4, 8: 0.5}
    first, _ = fit_validated(tmp_path, scores, 4, save_top_k=1, save_last=True)
    last = Path(first.last_model_path)
    resumed, _ = fit_validated(tmp_path, scores, 8, save_top_k=1, save_last=True, checkpoint=last)
    assert resumed.dirpath != first.dirpath
    assert (resumed.best_model_path, float(resumed.best_model_score)) == (first.best_model_path, pytest.approx(0.9))
    better, saved = fit_validated(tmp_path, scores | {6: 0.95}, 8, save_top_k=1, checkpoint=last)
    assert saved == {6: 0.95}
    assert Path(better.best_model_path).parent == Path(better.dirpath)
    assert Path(first.best_model_path).exists()
    Path(first.best_model_path).unlink()
    assert fit_validated(tmp_path, scores, 8, save_top_k=1, checkpoint=last)[1] == {8: 0.5}


def test_checkpoints_named_after_metrics_with_slashes_stay_in_the_folder(tmp_path):
    callback, _ = fit_validated(tmp_path, {2: 0.25, 4: 0.5}, 4, filename="{step}-{val/score:.2f}", save_top_k=1)
    checkpoints = {path.relative_to(callback.dirpath).as_posix() for path in tmp_path.rglob("*.ckpt")}
    assert checkpoints == {"step=4-val_score=0.50.ckpt"}
    with pytest.raises(ValueError, match="filename is 'best/"):
        SafeCheckpoint(filename="best/{step}")


# Ends at every system call of a save.


@pytest.fixture
def dead(monkeypatch):
    """Let this process write under the name of a dead one, whose files are leftovers."""
    monkeypatch.setattr(checkpoint_files, "process_name", lambda: DEAD)


class Killed(BaseException):
    """Ends the process as far as the file system can tell."""


def save_interrupted(monkeypatch, number, save):
    """Run a save that is killed at its n-th change of the file system; says whether it was."""
    count = 0

    def stopping(function):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == number:
                raise Killed
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stopping(os.replace))
        patch.setattr(os, "fsync", stopping(os.fsync))
        patch.setattr(Path, "write_text", stopping(Path.write_text))
        patch.setattr(Path, "unlink", stopping(Path.unlink))
        patch.setattr(shutil, "rmtree", stopping(shutil.rmtree))
        try:
            save()
        except Killed:
            return True
    return False


def write(path, value, as_folder):
    if as_folder:
        path.mkdir(parents=True)
        torch.save({"value": value}, path / "shard-0")
        (path / "more").mkdir()
        torch.save({"value": value}, path / "more" / "shard-1")
    else:
        torch.save({"value": value}, path)


def read(path):
    return torch.load(path / "shard-0" if path.is_dir() else path, weights_only=True)["value"]


@pytest.mark.parametrize("as_folder", [False, True], ids=["file", "folder"])
@pytest.mark.usefixtures("dead")
def test_a_save_that_is_killed_anywhere_leaves_a_complete_checkpoint(tmp_path, monkeypatch, as_folder):
    for number in range(1, 40):
        folder = tmp_path / str(number)
        folder.mkdir()
        target = folder / "last.ckpt"
        for value in (1, 2):
            unfinished = checkpoint_files.unfinished_path(target, DEAD)
            write(unfinished, value, as_folder)
            if value == 1:
                commit(unfinished, target, {"step": 1})
        killed = save_interrupted(monkeypatch, number, lambda: commit(unfinished, target, {"step": 2}))  # noqa: B023
        finish_interrupted(folder)
        newest, torn = newest_complete(folder.glob("*.ckpt"))
        assert newest == target
        assert not torn
        value = read(target)
        assert value in ((1, 2) if killed else (2,))
        remove_leftovers(folder)
        assert corruption_reason(target) is None
        assert read_manifest(target).get("step", value if killed else None) == value  # of what is there, or gone
        assert set(names(folder)) <= {"last.ckpt", *([] if as_folder else ["last.ckpt.manifest.json"])}
        if not killed:
            break
    assert number > 7  # every change of the file system had its turn


@pytest.mark.usefixtures("dead")
def test_kills_in_a_row_keep_the_checkpoint_that_is_there(tmp_path, monkeypatch):
    target = tmp_path / "last.ckpt"
    for value in range(5):
        unfinished = checkpoint_files.unfinished_path(target, DEAD)
        write(unfinished, value, as_folder=False)
        save = lambda: commit(unfinished, target, {"step": value})  # noqa: B023, E731
        # The first is saved; the others are killed at the rename: fsync, manifest, its fsync, the old one, then it.
        assert save_interrupted(monkeypatch, 5 if value else 1000, save) == bool(value)
        assert corruption_reason(target) is None
        assert read(target) == 0


@pytest.mark.parametrize("damage", ["shorter", "other bytes", "missing"])
@pytest.mark.parametrize("as_folder", [False, True], ids=["file", "folder"])
def test_torn_checkpoints_are_told(tmp_path, as_folder, damage):
    for number, name in enumerate(["old.ckpt", "new.ckpt"]):
        unfinished = checkpoint_files.unfinished_path(tmp_path / name, DEAD)
        write(unfinished, number, as_folder)
        commit(unfinished, tmp_path / name, {})
        os.utime(tmp_path / name, (number, number))
    victim = tmp_path / "new.ckpt" / "more" / "shard-1" if as_folder else tmp_path / "new.ckpt"
    content = victim.read_bytes()
    if damage == "missing" and as_folder:
        victim.unlink()
    elif damage == "other bytes":
        victim.write_bytes(content[:-10] + b"?" * 10)
    else:
        victim.write_bytes(content[:-10])
    os.utime(tmp_path / "new.ckpt", (5, 5))
    newest, torn = newest_complete(tmp_path.glob("*.ckpt"))
    assert newest == tmp_path / "old.ckpt"
    assert list(torn) == [tmp_path / "new.ckpt"]


def test_files_without_a_manifest_are_checked_by_their_own_sums(tmp_path):
    torch.save({"weights": torch.ones(1000)}, tmp_path / "whole.ckpt")
    content = (tmp_path / "whole.ckpt").read_bytes()
    (tmp_path / "short.ckpt").write_bytes(content[:-100])
    middle = len(content) // 2
    (tmp_path / "other.ckpt").write_bytes(content[:middle] + b"?" + content[middle + 1 :])
    (tmp_path / "folder.ckpt").mkdir()
    assert corruption_reason(tmp_path / "whole.ckpt") is None
    assert "cannot be read" in corruption_reason(tmp_path / "short.ckpt")
    assert "torn" in corruption_reason(tmp_path / "other.ckpt")
    assert corruption_reason(tmp_path / "folder.ckpt") == "it has no manifest"


def test_leftovers_of_killed_runs_are_removed_and_those_of_living_ones_kept(tmp_path):
    (tmp_path / f".last.ckpt.unfinished-{DEAD}").write_bytes(b"half")
    (tmp_path / f".other.ckpt.unfinished-{DEAD}").mkdir()
    (tmp_path / "gone.ckpt.manifest.json").write_text("{}")
    living = f".last.ckpt.unfinished-{os.uname().nodename}-{os.getppid()}"
    (tmp_path / living).write_bytes(b"half")
    fit(tmp_path, steps=2)
    assert names(tmp_path) == [living, "step=2.ckpt", "step=2.ckpt.manifest.json"]


# File systems that refuse.


def test_a_full_disk_is_an_error_and_the_former_checkpoint_loads(tmp_path):
    fit(tmp_path, steps=2, save_last=True)
    last = tmp_path / "last.ckpt"
    with full_disk(1000), pytest.raises(OSError, match=r"last\.ckpt could not be saved, .*File too large"):
        fit(tmp_path, checkpoint=last, save_top_k=0, save_last=True)
    assert corruption_reason(last) is None
    assert not [name for name in names(tmp_path) if name.startswith(".")]
    assert fit(tmp_path, checkpoint=last, save_last=True).lightning_module.weight.item() == 4


def test_the_reason_of_the_file_system_is_told(tmp_path):
    with pytest.raises(OSError, match="No space left on device") as failure:
        DirectCheckpointIO().save_checkpoint({"weights": torch.ones(100_000)}, Path("/dev/full"))
    assert failure.value.errno == errno.ENOSPC


def test_a_folder_that_cannot_be_written_is_an_error_before_the_first_step(tmp_path, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "touch", refuse)
    module = Counter()
    with pytest.raises(OSError, match=r"dirpath .* cannot be used: .*Permission denied"):
        fit(tmp_path, module)
    assert module.weight.item() == 0


def test_a_save_without_permission_is_an_error(tmp_path, monkeypatch):
    def refuse(self, *args, **kwargs):
        if "unfinished" in self.name:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return opening(self, *args, **kwargs)

    opening = Path.open
    fit(tmp_path, steps=2)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(OSError, match=r"step=4\.ckpt could not be saved.*Permission denied"):
        fit(tmp_path, checkpoint=tmp_path / "step=2.ckpt")
    assert corruption_reason(tmp_path / "step=2.ckpt") is None


def test_nothing_goes_through_the_folder_for_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", "/dev/full")
    monkeypatch.setattr("tempfile.tempdir", "/dev/full")
    fit(tmp_path)
    assert corruption_reason(tmp_path / "step=4.ckpt") is None


# Other configurations.


def test_a_folder_of_another_configuration_is_refused(tmp_path):
    fit(tmp_path, Counter(gamma=0.9, sizes=(1, 2)))
    with pytest.raises(ValueError, match=r"step=4.ckpt: gamma is 1.0 \(was 0.9\)"):
        fit(tmp_path, Counter(gamma=1.0, sizes=(1, 2)))
    fit(tmp_path, Counter(gamma=0.9, sizes=(1, 2)))  # the same options: Lightning counts the names up


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_checkpoint_by_path_may_have_other_options_and_is_verified(tmp_path):
    fit(tmp_path, Counter(gamma=0.9))
    path = tmp_path / "step=4.ckpt"
    assert fit(tmp_path, Counter(gamma=1.0), steps=6, checkpoint=path).lightning_module.weight.item() == 6
    content = path.read_bytes()
    path.write_bytes(content[:-10] + b"?" * 10)
    with pytest.raises(ValueError, match=r"step=4\.ckpt is damaged"):
        fit(tmp_path, steps=6, checkpoint=path)


def test_a_remote_folder_is_refused():
    with pytest.raises(ValueError, match="dirpath is memory://there"):
        fit("memory://there")
