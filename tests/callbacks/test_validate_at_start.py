import csv

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
