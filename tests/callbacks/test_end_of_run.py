"""The last step of a run is in a checkpoint, from which a longer run goes on exactly; broken weights never are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.counting import Counter, fit, step_of
from helpers.scripts import run_script
from lightning.pytorch import Callback

from pl_grouprl.utilities.checkpoint_files import corruption_reason

SCRIPT = Path(__file__).with_name("ended_runs.py")
DAMAGED = Path(__file__).with_name("damaged_folder.py")
FAST = [("ddp", "module", 3)]  # a single rank asks to stop
SLOW = [
    ("single", "max_steps", 7),
    ("single", "module", 6),
    ("single", "max_steps", 5),  # with a validation
    ("single", "max_steps", 8),  # at the end of an epoch
    ("single", "max_epochs", 1), ("single", "on_validation_end", 5), ("single", "on_train_batch_end", 3),
    ("single", "on_train_epoch_end", 8), ("ddp", "max_steps", 7), ("fsdp2", "max_steps", 7),
    # From here on, a single rank asks to stop.
    ("ddp", "on_train_batch_end", 1), ("ddp", "on_validation_end", 5), ("ddp", "on_train_epoch_end", 8),
    ("ddp", "on_train_epoch_start", 8), ("fsdp2", "module", 3),
]  # fmt: skip


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


@pytest.mark.slow
def test_all_ranks_say_what_is_wrong_with_a_damaged_folder(record_property):
    results = json.loads(run_script(DAMAGED, timeout=600).stdout)
    whole = results.pop("whole")
    assert whole["codes"] == [0, 0], whole["log"]
    for case, result in results.items():
        assert result["codes"] == [1, 1], (case, result["log"])
        assert result["told"] == 2, (case, result["log"])
    record_property("figure", f"{len(results)} of {len(results)} damaged or foreign folders refused on both ranks")


def steps_of(folder):
    found = {path.name: path for path in folder.glob("*.ckpt")}
    assert all(corruption_reason(path) is None for path in found.values())
    return {name: step_of(path) for name, path in found.items()}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"step=7.ckpt": 7}), ({"save_top_k": -1}, {"step=5.ckpt": 5, "step=7.ckpt": 7}),
        ({"save_last": True}, {"step=7.ckpt": 7, "last.ckpt": 7}),
        ({"save_top_k": 0, "save_last": True}, {"last.ckpt": 7}),
        ({"monitor": "score", "mode": "max"}, {"step=5.ckpt": 5, "last.ckpt": 7}),
        ({"every_n_train_steps": 7}, {"step=7.ckpt": 7}), ({"every_n_train_steps": None}, {"step=7.ckpt": 7}),
        ({"save_top_k": 0}, {}), ({"every_n_train_steps": 0}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_the_last_step_is_saved_unless_nothing_is_to_be(tmp_path, options, expected):
    fit(tmp_path, steps=7, **{"every_n_train_steps": 5} | options)
    assert steps_of(tmp_path) == expected
    if not options:  # an epoch that was cut short counts as begun
        loops = torch.load(tmp_path / "step=7.ckpt", weights_only=True)["loops"]
        total = loops["fit_loop"]["epoch_progress"]["total"]
        assert total == {"ready": 1, "started": 1, "processed": 0, "completed": 0}


class Export(Callback):
    """Notes whether a policy was exported."""

    done = False

    def on_train_end(self, trainer, pl_module):
        self.done = True


@pytest.mark.parametrize(
    ("value", "at", "options"),
    [
        (torch.nan, 6, {"save_last": True}),
        (torch.inf, 6, {"monitor": "score"}),
        (torch.nan, 8, {"save_last": "link"}),
        (torch.inf, 8, {"save_last": True}),
        (torch.nan, 8, {"monitor": "score"}),
    ],
)
def test_broken_weights_are_never_saved_and_an_older_checkpoint_stays(tmp_path, value, at, options):
    """At a periodic save, and at the end."""

    def break_weight(module):
        if module.batches == at:
            module.weight.data[0] = value

    export = Export()
    with pytest.raises(RuntimeError, match=rf"NaN or inf in the weights at step {at}: weight\. "):
        fit(tmp_path, Counter(break_weight), export, steps=8, every_n_train_steps=3, **options)
    kept = steps_of(tmp_path)
    assert set(kept.values()) == {6 if at == 8 else 3}
    assert torch.load(tmp_path / next(iter(kept)), weights_only=True)["state_dict"]["weight"].isfinite()
    assert not export.done
