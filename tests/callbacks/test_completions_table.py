"""Tables of completions on the console, in the run's file and in loggers, while training and after evaluations."""

import csv
import io
import json
import sys

import pytest
import torch
from helpers.episodes import CALL, make_episode, make_group, turns_of
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from pl_grouprl.callbacks import CompletionsTable, RunSummary
from pl_grouprl.callbacks import completions_table as module
from pl_grouprl.callbacks.completions_table import (
    completion_rows,
    completions_table,
    episodes_table,
    evaluation_rows,
    markdown_table,
    printable_line,
    render_table,
    source_table,
    summary_table,
    turns_line,
)
from pl_grouprl.types import Rollout, RolloutGroup


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def table_of(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def by_row(table):
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


# Rows and how they are shown.


def test_rows_hold_what_was_sampled_and_earned(groups):
    rows = completion_rows(groups[0], 0, step=3)
    assert [row["completion"] for row in rows] == ["a", "b [bold]|", ""]
    assert [row["reward"] for row in rows] == [0.25, 1.0, None]
    assert rows[1]["rewards"] == {"exact": 1.0}
    assert (rows[1]["num_tokens"], rows[1]["finish_reason"], rows[1]["step"]) == (2, "stop", 3)
    assert {row["prompt"] for row in rows} == {"12"}
    assert "turns" not in render_table(rows, 60)
    assert markdown_table(rows, 60).startswith("| prompt | completion | reward | tokens | end |\n|---|")
    (row,) = completion_rows(groups[1], 1, step=0)  # what has no text is shown by its token ids
    assert (row["prompt"], row["completion"], row["group"]) == ("7", "8", 1)


def test_rewards_of_tokens_are_in_the_rows_that_have_them():
    group = RolloutGroup([7], [Rollout([8, 9], reward=0.5, token_rewards=[None, 0.5]), Rollout([8], reward=0.5)])
    first, second = completion_rows(group, 0, step=0)
    assert first["token_rewards"] == [None, 0.5]
    assert "token_rewards" not in second


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [("0123456789", 10, "0123456789"), ("0123456789", 7, "0123…89"), ("ö\nb\tc", 20, "ö\\nb\\tc")],
)
def test_long_texts_lose_their_middle_and_control_characters_are_written_out(text, width, shown):
    assert printable_line(text, width) == shown


def test_messages_become_one_text_and_empty_tables_are_drawn():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    (row,) = completion_rows(RolloutGroup([1], [Rollout([2])], prompt=messages), 0, step=0)
    assert row["prompt"] == "system: Be brief.\nuser: Hi"
    assert "completion" in render_table([], 10)
    assert markdown_table([], 10).count("\n") == 1
    assert summary_table({}, 3).rows == []


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_a_table_has_no_character_that_the_output_cannot_encode(monkeypatch, encoding):
    rows = completion_rows(make_group(Rollout([1], text="😀", reward=1.0)), 0, step=0)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding))
    shown = render_table(rows, 60)
    assert shown.encode(encoding).decode("ascii").startswith("Completions")
    assert "+---" in shown
    assert "\\U0001f600" in shown


def test_an_episode_is_shown_with_its_turns_and_a_row_per_message():
    observed = make_episode(observation=2, reward=1.0)
    rows = completion_rows(make_group(observed, Rollout([1, 2], text="hi")), 0, step=0)
    assert [row["prompt"] for row in rows] == ["user: How much is a? It is dark.", "user: How much is a?"]
    assert [row["num_tokens"] for row in rows] == [4, 2]
    assert (rows[0]["messages"], rows[0]["turns"]) == (turns_of(), 2)
    assert rows[1].keys() == rows[0].keys() - {"messages", "turns"}
    line = 'look_up(key="a") -> 41 | #### 42'
    shown = render_table(rows, 60)
    assert [name for name in shown.split("\n")[2].split() if name.isalpha()] == [
        "prompt", "completion", "turns", "reward", "tokens", "end",
    ]  # fmt: skip
    assert all(part in shown for part in (line, "It is dark.", "How much is a? "))  # two prompts of a group
    markdown = markdown_table(rows, 60).split("\n")
    assert markdown[0] == "| prompt | completion | turns | reward | tokens | end |"
    assert markdown[2].endswith(f"| {line.replace('|', chr(92) + '|')} | 2 | 1.000 | 4 | stop |")
    completions = by_row(completions_table(rows, 3, "completions", ""))
    assert [row["completion"] for row in completions] == [line, "hi"]
    assert [(row["step"], row["turns"]) for row in completions] == [(3, 2), (3, None)]
    messages = by_row(episodes_table(rows, 3, "episodes"))
    assert [row["role"] for row in messages] == [message["role"] for message in turns_of()]
    assert [(row["rollout"], row["position"], row["reward"]) for row in messages] == [(0, n, 1.0) for n in range(3)]
    assert json.loads(messages[0]["tool_calls"]) == turns_of()[0]["tool_calls"]


def test_turns_on_one_line():
    messages = [
        {"role": "assistant", "content": " Let me see. ", "tool_calls": [CALL, {"name": "now", "arguments": {}}]},
        {"role": "tool", "name": "look_up", "content": "41"},
        {"role": "tool", "name": "now", "content": "noon"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": [1, "é"]}}]},
        {"role": "tool", "name": "add", "content": ""},
        {"role": "assistant", "content": "42"},
    ]
    seen = {"role": "tool", "content": [{"type": "image"}, {"type": "text", "text": "a cat"}]}
    assert turns_line([seen]) == turns_line([{**seen, "content": "(image)\na cat"}])
    assert turns_line(messages) == 'Let me see. look_up(key="a"), now() -> 41, noon | add([1, "é"]) ->  | 42'


def test_lone_surrogates_are_escaped():
    message = {"role": "tool", "content": "a\ud800b", "tool_calls": [{"name": "\udfff"}]}
    rows = completion_rows(make_group(Rollout([1], messages=[message])), 0, step=0)
    (row,) = by_row(episodes_table(rows, 0, "episodes"))
    assert row["content"] == "a\\ud800b"
    assert row["tool_calls"] == '[{"name": "\\udfff"}]'


@pytest.mark.parametrize("option", ["every_n_steps", "num_groups", "num_completions", "max_characters"])
def test_counts_below_one_are_refused(option):
    with pytest.raises(ValueError, match=f"CompletionsTable.{option} is 0"):
        CompletionsTable(**{option: 0})


# While training.


def test_every_completion_of_the_due_steps_reaches_file_and_loggers(fit, counter, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = [CSVLogger(tmp_path, name="", version=n) for n in (0, 1)]
    loggers.append(TensorBoardLogger(tmp_path, name="", version=2))
    fit(counter, CompletionsTable(every_n_steps=3, num_completions=1, console=False), max_steps=7, logger=loggers)
    steps = [1] * 4 + [3] * 4 + [6] * 4
    assert [row["step"] for row in lines_of(tmp_path / "version_0" / "completions.jsonl")] == steps
    for number in (0, 1):
        rows = table_of(tmp_path / f"version_{number}" / "tables" / "completions.csv")
        assert [row["step"] for row in rows] == [str(step) for step in steps]
        assert (rows[1]["completion"], rows[1]["reward"], rows[1]["rewards"]) == ("b [bold]|", "1.0", '{"exact": 1.0}')
        assert not (tmp_path / f"version_{number}" / "tables" / "episodes.csv").exists()
    event, *_ = EventAccumulator(loggers[2].log_dir).Reload().Tensors("completions/text_summary")
    assert b"| 12 | b [bold]\\| | 1.000 | 2 | stop |" in event.tensor_proto.string_val[0]


def test_console_shows_rewards_from_high_to_low_and_a_second_fit_adds_lines(fit, counter, tmp_path, capsys):
    trainer = fit(counter, CompletionsTable(num_groups=1, num_completions=2), max_steps=1, logger=False)
    shown = capsys.readouterr().out
    assert "Completions at step 1" in shown
    assert "b [bold]|" in shown
    assert "0.250" not in shown  # two of three: the best and the one without a reward
    trainer.fit_loop.epoch_loop.max_steps = 2
    trainer.fit(counter, torch.utils.data.DataLoader(torch.ones(8, 1)))
    assert len(lines_of(tmp_path / "version_0" / "completions.jsonl")) == 2 * 3


def test_a_trial_shows_a_table_and_writes_nothing(fit, counter, tmp_path, capsys):
    fit(counter, CompletionsTable(), RunSummary(), fast_dev_run=True, logger=None)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert capsys.readouterr().out.count("Completions at step 1") == 1


def test_the_summary_is_a_table_of_the_loggers(fit, counter, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = [CSVLogger(tmp_path, name="", version=0), TensorBoardLogger(tmp_path, name="", version=0)]
    fit(counter, RunSummary(curves_filename=None), max_steps=4, logger=loggers)
    rows = {row["metric"]: row for row in table_of(tmp_path / "version_0" / "tables" / "summary.csv")}
    assert (rows["reward"]["first"], rows["reward"]["last"], rows["reward"]["mean"]) == ("1.0", "4.0", "2.5")
    assert rows["val/score"]["max"] == "40.0"
    (event,) = EventAccumulator(loggers[1].log_dir).Reload().Tensors("summary/text_summary")
    assert b"| reward | 1.0 | 4.0 | 1.0 | 4.0 | 2.5 |" in event.tensor_proto.string_val[0]


# After evaluations.


def group(number, *texts):
    rollouts = [Rollout([1], text=text, reward=float(len(text))) for text in texts]
    return RolloutGroup([number], rollouts, group_id=number, prompt=f"prompt {number}", data_source="letters")


class Evaluated(LightningModule):
    """Two prompts with two completions in each batch."""

    def test_step(self, batch, batch_idx):
        self.log_dict({f"{'test' if self.trainer.testing else 'val'}/letters/pass@1": 0.25, "test/reward": 1.0})
        groups = [group(0, "a", "bb"), group(1, "ccc", "")]
        return {"groups": groups, "answers": [["A", None], ["C", ""]]}

    validation_step = test_step


class Other(LightningModule):
    def test_step(self, batch, batch_idx):
        return torch.ones(1)


@pytest.fixture
def evaluate(tmp_path):
    def run(stage, *callbacks, module=None, **options):
        options = {"logger": CSVLogger(tmp_path, name="", version=0), "default_root_dir": tmp_path} | options
        quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_checkpointing": False}
        trainer = Trainer(callbacks=list(callbacks), **quiet, **options)
        getattr(trainer, stage)(module or Evaluated(), torch.utils.data.DataLoader(torch.ones(2, 1)), verbose=False)
        return trainer

    return run


@pytest.mark.parametrize(("stage", "prefix"), [("test", "test"), ("validate", "val")])
def test_all_completions_are_written_with_their_answers_and_the_first_prompts_shown(
    evaluate, tmp_path, stage, prefix, capsys
):
    trainer = evaluate(stage, CompletionsTable(num_groups=1))
    shown = capsys.readouterr().out
    assert shown.count("Completions") == 1
    assert shown.index("bb") < shown.index("│ a ")  # from the highest reward
    assert "ccc" not in shown
    rows = lines_of(tmp_path / "version_0" / f"{prefix}_completions.jsonl")
    first = [(0, "a", "A"), (0, "bb", None), (1, "ccc", "C"), (1, "", "")]
    assert [(row["group"], row["completion"], row["answer"]) for row in rows[:4]] == first
    assert [row["group"] for row in rows[4:]] == [2, 2, 3, 3]  # of the second batch
    assert (rows[2]["reward"], rows[2]["prompt"]) == (3.0, "prompt 1")
    assert "step" not in rows[2]
    table = table_of(tmp_path / "version_0" / "tables" / f"{prefix}_completions.csv")
    assert [(row["group"], row["answer"]) for row in table[:4]] == [("0", "A"), ("0", ""), ("1", "C"), ("1", "")]
    getattr(trainer, stage)(Evaluated(), torch.utils.data.DataLoader(torch.ones(1, 1)), verbose=False)
    rows = lines_of(tmp_path / "version_0" / f"{prefix}_completions.jsonl")
    assert [row["group"] for row in rows[8:]] == [0, 0, 1, 1]  # a second one counts from the start


def test_trials_and_other_modules_write_nothing(evaluate, tmp_path):
    evaluate("test", CompletionsTable(console=False), module=Other())
    evaluate("test", CompletionsTable(console=False), fast_dev_run=True, logger=None)
    assert not list(tmp_path.rglob("*.jsonl"))


def test_rows_of_all_ranks_are_in_the_order_of_the_prompts(monkeypatch):
    """A batch of three prompts on two ranks, then one of a single prompt: every rank takes every second prompt."""

    def of_rank(*groups):
        return {"groups": list(groups), "answers": [["x"] * len(own.rollouts) for own in groups]}

    sent = []
    with monkeypatch.context() as patch:
        patch.setattr(module, "gather_plain", lambda value, device: sent.append(value) or [[]])
        for outputs in (of_rank(group(1, "b")), of_rank()):
            evaluation_rows(outputs, None, "cpu")
    monkeypatch.setattr(module, "gather_plain", lambda value, device: [value, sent.pop(0)])
    by_group = evaluation_rows(of_rank(group(0, "a", "A"), group(2, "c")), None, "cpu")
    by_group += evaluation_rows(of_rank(group(0, "d")), None, "cpu", first=3)
    expected = [(0, "a"), (0, "A"), (1, "b"), (2, "c"), (3, "d")]
    assert [(row["group"], row["completion"]) for rows in by_group for row in rows] == expected


def test_a_table_has_a_line_per_data_source(evaluate, capsys):
    metrics = {
        "test/reward": 0.5,
        "test/rewards/exact/mean": 0.5,
        "test/openai/gsm8k/pass@16": torch.tensor(0.875),
        "test/openai/gsm8k/pass@2": 0.5,
        "test/openai/gsm8k/mean@16": 0.25,
        "test/sums/mean@16": 1.0,
        "val/sums/mean@16": 0.0,
    }
    assert source_table(metrics, "test").splitlines() == [
        "data source   mean@16   pass@2  pass@16",
        "openai/gsm8k    0.250    0.500    0.875",
        "sums            1.000",
    ]
    assert source_table({"test/reward": 0.5}, "test") == ""
    for stage in ("test", "validate"):
        evaluate(stage, RunSummary(), logger=False)
        assert capsys.readouterr().out.count("data source   pass@1\nletters        0.250\n") == 1
