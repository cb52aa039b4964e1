import csv
import json

import pytest
from helpers.episodes import make_episode, make_group, turns_of
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from pl_grouprl.callbacks import CompletionsTable, RunSummary
from pl_grouprl.callbacks.completions_table import completion_rows, completions_table, episodes_table, summary_table
from pl_grouprl.types import Rollout


def table_of(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_tables_of_all_due_steps_reach_every_logger(fit, counter, tmp_path):
    loggers = [CSVLogger(tmp_path, name="", version=0), CSVLogger(tmp_path, name="", version=1)]
    fit(counter, CompletionsTable(every_n_steps=3, num_completions=1, console=False), max_steps=7, logger=loggers)
    for number in (0, 1):
        rows = table_of(tmp_path / f"version_{number}" / "tables" / "completions.csv")
        assert [row["step"] for row in rows] == ["1"] * 4 + ["3"] * 4 + ["6"] * 4
        assert (rows[1]["completion"], rows[1]["reward"], rows[1]["rewards"]) == ("b [bold]|", "1.0", '{"exact": 1.0}')
        assert not (tmp_path / f"version_{number}" / "tables" / "episodes.csv").exists()


def test_evaluations_have_tables_of_their_own(fit, counter, groups, tmp_path):
    class Evaluated(LightningModule):
        def validation_step(self, batch, batch_idx):
            return {"groups": groups, "answers": [["x", "y", None], ["z"]]}

    from lightning.pytorch import Trainer

    trainer = Trainer(
        accelerator="cpu", logger=CSVLogger(tmp_path, name="", version=0), callbacks=[CompletionsTable(console=False)],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.validate(Evaluated(), [0, 1])
    rows = table_of(tmp_path / "version_0" / "tables" / "val_completions.csv")
    assert [row["group"] for row in rows] == ["0", "0", "0", "1", "2", "2", "2", "3"]
    assert [row["answer"] for row in rows][:4] == ["x", "y", "", "z"]


def test_a_trial_logs_no_tables(fit, counter, tmp_path):
    fit(counter, CompletionsTable(console=False), RunSummary(), fast_dev_run=True)
    assert not list(tmp_path.rglob("tables"))


def test_the_summary_is_a_table_of_the_loggers(fit, counter, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = [CSVLogger(tmp_path, name="", version=0), TensorBoardLogger(tmp_path, name="", version=0)]
    fit(counter, RunSummary(curves_filename=None), max_steps=4, logger=loggers)
    rows = {row["metric"]: row for row in table_of(tmp_path / "version_0" / "tables" / "summary.csv")}
    assert (rows["reward"]["first"], rows["reward"]["last"], rows["reward"]["mean"]) == ("1.0", "4.0", "2.5")
    assert rows["val/score"]["max"] == "40.0"
    events = EventAccumulator(loggers[1].log_dir).Reload()
    (event,) = events.Tensors("summary/text_summary")
    assert b"| reward | 1.0 | 4.0 | 1.0 | 4.0 | 2.5 |" in event.tensor_proto.string_val[0]


def test_a_failure_to_write_is_a_warning(fit, counter, monkeypatch):
    def refuse(path, content):
        raise OSError("no space left")

    monkeypatch.setattr("pl_grouprl.loggers.append_whole", refuse)
    with pytest.warns(UserWarning, match="CompletionsTable cannot write to .*version_0"):
        fit(counter, CompletionsTable(console=False), max_steps=1)


def by_row(table):
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_an_episode_is_a_row_of_completions_and_a_row_per_message():
    group = make_group(make_episode(observation=2, reward=1.0), Rollout([1, 2], text="hi"))
    rows = completion_rows(group, 5, step=0)
    completions = by_row(completions_table(rows, 3, "completions", ""))
    assert [row["completion"] for row in completions] == ['look_up(key="a") -> 41 | #### 42', "hi"]
    assert [(row["step"], row["turns"]) for row in completions] == [(3, 2), (3, None)]
    messages = by_row(episodes_table(rows, 3, "episodes"))
    assert [row["role"] for row in messages] == [message["role"] for message in turns_of()]
    assert [(row["rollout"], row["position"], row["reward"]) for row in messages] == [
        (0, position, 1.0) for position in range(len(messages))
    ]
    assert json.loads(messages[0]["tool_calls"]) == turns_of()[0]["tool_calls"]


def test_no_statistics_are_no_rows():
    assert summary_table({}, 3).rows == []


def test_lone_surrogates_are_escaped():
    message = {"role": "tool", "content": "a\ud800b", "tool_calls": [{"name": "\udfff"}]}
    rows = completion_rows(make_group(Rollout([1], messages=[message])), 0, step=0)
    (row,) = by_row(episodes_table(rows, 0, "episodes"))
    assert row["content"] == "a\\ud800b"
    assert row["tool_calls"] == '[{"name": "\\udfff"}]'
