"""The last step of a run is in a checkpoint, from which a longer run goes on exactly; broken weights never are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.scripts import run_script
from lightning.pytorch import Callback, LightningModule, Trainer

from pl_grouprl.callbacks import SafeCheckpoint
from pl_grouprl.utilities.checkpoint_files import corruption_reason

SCRIPT = Path(__file__).with_name("ended_runs.py")
FAST = [("single", "max_steps", 7)]
ONE_RANK = [("ddp", "module", 3)]
SLOW = [
    ("single", "module", 6),
    ("single", "max_steps", 5),  # with a validation
    ("single", "max_steps", 8),  # at the end of an epoch
    ("single", "max_epochs", 1),
    ("single", "on_validation_end", 5),
    ("single", "on_train_batch_end", 3),
    ("single", "on_train_epoch_end", 8),
    ("ddp", "max_steps", 7),
    ("fsdp2", "max_steps", 7),
    # From here on, a single rank asks to stop.
    ("ddp", "on_train_batch_end", 1),
    ("ddp", "on_validation_end", 5),
    ("ddp", "on_train_epoch_end", 8),
    ("ddp", "on_train_epoch_start", 8),
    ("fsdp2", "module", 3),
]


def check(cases, record_property):
    done = run_script(SCRIPT, json.dumps(cases), timeout=600)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(cases), done.stderr
    for (*_, how, step), result in zip(cases, results, strict=True):
        assert result["failure"] is None, result["failure"]
        assert result.get("saved") == (8 if how == "max_epochs" else step), result
        assert result["same"], result
    record_property("figure", f"{len(cases)} of {len(cases)} ends saved, resumed bit-identical")


def test_a_longer_run_goes_on_exactly(record_property):
    check(FAST, record_property)


def test_all_ranks_stop_if_one_asks_to(record_property):
    check(ONE_RANK, record_property)


@pytest.mark.slow
def test_a_longer_run_goes_on_exactly_however_it_ended(record_property):
    check(SLOW, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_nan_on_one_rank_ends_all_and_the_older_checkpoint_stays(strategy):
    case = json.dumps([(strategy, "broken shard", 10)])
    done = run_script(SCRIPT, case, timeout=600)
    result = json.loads(done.stdout)
    assert result["failure"].startswith("[1, 1]")
    assert "NaN or inf in the weights at step 10: policy." in result["failure"]
    assert result["saved"] == 5


class Counter(LightningModule):
    """A weight that grows by 1 with each step, and is `broken` after one; its score falls."""

    def __init__(self, broken=None, at=6):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.other = torch.nn.Parameter(torch.zeros(1))
        self.broken, self.at = broken, at

    def training_step(self, batch, batch_idx):
        self.log("score", float(-self.global_step))
        return -self.weight.sum()

    def on_train_batch_end(self, *args):
        if self.broken is not None and self.global_step == self.at - 1:
            self.weight.data[0] = self.broken

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(10, 1))

    def configure_optimizers(self):
        return torch.optim.SGD([self.weight], lr=1.0)


def fit(folder, module=None, callbacks=(), steps=7, **options):
    callback = SafeCheckpoint(dirpath=folder, filename="{step}", **{"every_n_train_steps": 5, **options})
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu", max_steps=steps, callbacks=[*callbacks, callback], default_root_dir=folder, **quiet
    )
    trainer.fit(module or Counter())


def steps_of(folder):
    found = {path.name: path for path in folder.glob("*.ckpt")}
    assert all(corruption_reason(path) is None for path in found.values())
    return {name: torch.load(path, weights_only=True)["global_step"] for name, path in found.items()}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"step=7.ckpt": 7}),
        ({"save_top_k": -1}, {"step=5.ckpt": 5, "step=7.ckpt": 7}),
        ({"save_last": True}, {"step=7.ckpt": 7, "last.ckpt": 7}),
        ({"save_top_k": 0, "save_last": True}, {"last.ckpt": 7}),
        ({"monitor": "score", "mode": "max"}, {"step=5.ckpt": 5, "last.ckpt": 7}),
        ({"every_n_train_steps": 7}, {"step=7.ckpt": 7}),
        ({"every_n_train_steps": None}, {"step=7.ckpt": 7}),
        ({"save_top_k": 0}, {}),
        ({"every_n_train_steps": 0}, {}),
    ],
    ids=str,
)
def test_the_last_step_is_saved_unless_nothing_is_to_be(tmp_path, options, expected):
    fit(tmp_path, **options)
    assert steps_of(tmp_path) == expected


def test_an_epoch_that_was_cut_short_counts_as_begun(tmp_path):
    fit(tmp_path)
    progress = torch.load(tmp_path / "step=7.ckpt", weights_only=True)["loops"]["fit_loop"]["epoch_progress"]["total"]
    assert progress == {"ready": 1, "started": 1, "processed": 0, "completed": 0}


class Export(Callback):
    """Notes whether a policy was exported."""

    done = False

    def on_train_end(self, trainer, pl_module):
        self.done = True


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("at", [6, 8], ids=["periodic", "end"])
@pytest.mark.parametrize("options", [{"save_last": True}, {"save_last": "link"}, {"monitor": "score"}], ids=str)
def test_broken_weights_are_never_saved_and_an_older_checkpoint_stays(tmp_path, value, at, options):
    export = Export()
    with pytest.raises(RuntimeError, match=r"NaN or inf in the weights at step [68]: weight\. .*earlier ones are unto"):
        fit(tmp_path, Counter(value, at), [export], 8, every_n_train_steps=3, **options)
    kept = steps_of(tmp_path)
    assert set(kept.values()) == {6 if at == 8 else 3}
    assert torch.load(tmp_path / next(iter(kept)), weights_only=True)["state_dict"]["weight"].isfinite()
    assert not export.done
