import csv

import pytest
from lightning.pytorch.callbacks import EarlyStopping

from pl_grouprl.callbacks import RunSummary, ValidateAtStart


def validation_rows(path):
    with path.open() as file:
        return [(int(row["step"]), float(row["val/score"])) for row in csv.DictReader(file) if row["val/score"]]


def test_validation_is_logged_before_the_first_step_and_training_goes_on_as_ever(fit, counter, tmp_path):
    summary = RunSummary()
    trainer = fit(counter, ValidateAtStart(), summary)
    assert trainer.global_step == 4
    assert summary.history.points["val/score"] == [(0, 0.0), (2, 20.0), (4, 40.0)]
    assert validation_rows(tmp_path / "version_0" / "metrics.csv")[0] == (0, 0.0)
    assert [value for _, value in summary.history.points["reward"]] == [1.0, 2.0, 3.0, 4.0]


def test_a_resumed_run_begins_with_a_validation_as_well(fit, counter, tmp_path):
    trainer = fit(counter, max_steps=3)
    trainer.save_checkpoint(tmp_path / "third.ckpt")
    summary = RunSummary()
    fit(counter, ValidateAtStart(), summary, ckpt_path=tmp_path / "third.ckpt")
    assert summary.history.points["val/score"] == [(3, 30.0), (4, 40.0)]


class Seen(ValidateAtStart):
    """Counts validation batches by the step they run at."""

    def __init__(self, **options):
        super().__init__(**options)
        self.batches = {}

    def on_validation_batch_end(self, trainer, *args):
        self.batches[trainer.global_step] = self.batches.get(trainer.global_step, 0) + 1


@pytest.mark.parametrize(("options", "first"), [({"max_prompts": 3}, 3), ({"max_prompts": None}, 5), ({}, 5)])
def test_the_first_validation_is_bounded_and_no_other(fit, counter, options, first):
    seen = Seen(**options)
    fit(counter, seen, val_batches=5)  # of one prompt each
    assert seen.batches == {0: first, 2: 5, 4: 5}


def test_a_monitored_score_is_that_of_all_prompts(fit, counter):
    seen = Seen(max_prompts=3)
    fit(counter, seen, EarlyStopping("val/score"), val_batches=5)
    assert seen.batches[0] == 5


def test_at_least_one_prompt():
    with pytest.raises(ValueError, match="max_prompts is 0"):
        ValidateAtStart(max_prompts=0)
