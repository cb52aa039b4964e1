import io
import json
import sys

import pytest
import torch
from helpers.episodes import CALL, make_episode, make_group, turns_of
from lightning.pytorch.loggers import TensorBoardLogger

from pl_grouprl.callbacks import CompletionsTable
from pl_grouprl.callbacks.completions_table import (
    completion_rows,
    markdown_table,
    printable_line,
    render_table,
    turns_line,
)
from pl_grouprl.types import Rollout, RolloutGroup


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_hold_what_was_sampled_and_earned(groups):
    rows = completion_rows(groups[0], 0, step=3)
    assert [row["completion"] for row in rows] == ["a", "b [bold]|", ""]
    assert [row["reward"] for row in rows] == [0.25, 1.0, None]
    assert rows[1]["rewards"] == {"exact": 1.0}
    assert (rows[1]["num_tokens"], rows[1]["finish_reason"], rows[1]["step"]) == (2, "stop", 3)
    assert {row["prompt"] for row in rows} == {"12"}
    assert "token_rewards" not in rows[1]


def test_rewards_of_tokens_are_in_the_rows_that_have_them():
    group = RolloutGroup([7], [Rollout([8, 9], reward=0.5, token_rewards=[None, 0.5]), Rollout([8], reward=0.5)])
    assert [row.get("token_rewards") for row in completion_rows(group, 0, step=0)] == [[None, 0.5], None]


def test_what_has_no_text_is_shown_by_its_token_ids(groups):
    (row,) = completion_rows(groups[1], 1, step=0)
    assert (row["prompt"], row["completion"], row["group"]) == ("7", "8", 1)


def test_messages_become_one_text():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    (row,) = completion_rows(RolloutGroup([1], [Rollout([2])], prompt=messages), 0, step=0)
    assert row["prompt"] == "system: Be brief.\nuser: Hi"


def test_every_completion_of_the_due_steps_is_appended_to_the_file(fit, counter, tmp_path):
    fit(counter, CompletionsTable(every_n_steps=3, console=False), max_steps=7)
    rows = lines_of(tmp_path / "version_0" / "completions.jsonl")
    assert sorted({row["step"] for row in rows}) == [1, 3, 6]
    assert len(rows) == 3 * 4


def test_a_second_fit_of_the_trainer_adds_lines(fit, counter, tmp_path):
    trainer = fit(counter, CompletionsTable(num_groups=1, console=False), max_steps=1)
    trainer.fit_loop.epoch_loop.max_steps = 2
    trainer.fit(counter, torch.utils.data.DataLoader(torch.ones(8, 1)))
    assert len(lines_of(tmp_path / "version_0" / "completions.jsonl")) == 2 * 3


def test_console_shows_rewards_from_high_to_low_and_no_markup(fit, counter, capsys):
    fit(counter, CompletionsTable(num_groups=1, num_completions=2), max_steps=1)
    shown = capsys.readouterr().out
    assert "Completions at step 1" in shown
    assert "b [bold]|" in shown
    assert "0.250" not in shown  # two of three: the best and the one without a reward


def test_tensorboard_gets_the_table_as_text(fit, counter, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, name="", version=0)
    fit(counter, CompletionsTable(console=False), max_steps=1, logger=logger)
    logger.experiment.flush()
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    (event,) = events.Tensors("completions/text_summary")
    assert b"| 12 | b [bold]\\| | 1.000 | 2 | stop |" in event.tensor_proto.string_val[0]


def test_no_logger_writes_below_the_root_folder_and_a_trial_writes_nothing(fit, counter, tmp_path, capsys):
    fit(counter, CompletionsTable(), max_steps=1, logger=False)
    assert (tmp_path / "version_0" / "completions.jsonl").is_file()
    (tmp_path / "version_0" / "completions.jsonl").unlink()
    fit(counter, CompletionsTable(), fast_dev_run=True, logger=None)
    assert not list(tmp_path.rglob("completions.jsonl"))
    assert capsys.readouterr().out.count("Completions at step 1") == 2


@pytest.mark.parametrize("option", ["every_n_steps", "num_groups", "num_completions", "max_characters"])
def test_counts_below_one_are_refused(option):
    with pytest.raises(ValueError, match=f"CompletionsTable.{option} is 0"):
        CompletionsTable(**{option: 0})


def test_long_texts_lose_their_middle_and_control_characters_are_written_out():
    assert printable_line("0123456789", 10) == "0123456789"
    assert printable_line("0123456789", 7) == "0123…89"
    assert printable_line("a\nb\tc", 20) == "a\\nb\\tc"
    assert printable_line("größer", 20) == "größer"


def test_empty_tables_are_drawn():
    assert "completion" in render_table([], 10)
    assert markdown_table([], 10).count("\n") == 1


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_a_table_has_no_character_that_the_output_cannot_encode(monkeypatch, encoding):
    rows = completion_rows(make_group(Rollout([1], text="😀", reward=1.0)), 0, step=0)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding))
    shown = render_table(rows, 60)
    assert shown.encode(encoding).decode("ascii").startswith("Completions")
    assert "+---" in shown
    assert "\\U0001f600" in shown


def test_an_episode_is_shown_with_its_turns():
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
    assert line in shown
    assert "It is dark." in shown
    assert "How much is a? " in shown  # another prompt of the same group
    markdown = markdown_table(rows, 60).split("\n")
    assert markdown[0] == "| prompt | completion | turns | reward | tokens | end |"
    assert markdown[2].endswith(f"| {line.replace('|', chr(92) + '|')} | 2 | 1.000 | 4 | stop |")


def test_tables_of_plain_completions_have_no_column_of_turns(groups):
    rows = completion_rows(groups[0], 0, step=3)
    assert "turns" not in render_table(rows, 60)
    assert markdown_table(rows, 60).startswith(
        "| prompt | completion | reward | tokens | end |\n|---|---|---|---|---|\n"
    )


def test_turns_on_one_line():
    messages = [
        {"role": "assistant", "content": " Let me see. ", "tool_calls": [CALL, {"name": "now", "arguments": {}}]},
        {"role": "tool", "name": "look_up", "content": "41"},
        {"role": "tool", "name": "now", "content": "noon"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": [1, "é"]}}]},
        {"role": "tool", "name": "add", "content": ""},
        {"role": "assistant", "content": "42"},
    ]
    assert turns_line(messages) == 'Let me see. look_up(key="a"), now() -> 41, noon | add([1, "é"]) ->  | 42'
