"""GRPO with a judge as its reward: grades are logged, failures do not end the run, the key is in no file of it."""

import logging

import pytest
from helpers.judge_server import judge_server, reply
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from pl_grouprl.callbacks import CompletionsTable
from pl_grouprl.rewards import Judge

KEY = "sk-very-secret"


@pytest.fixture
def run(make_module, make_data, make_trainer, history, tmp_path, monkeypatch):
    """Two steps with a judge; returns its metrics and the server."""
    monkeypatch.setenv("JUDGE_KEY", KEY)

    def run(answer):
        steps = history()
        folder = tmp_path / "run"
        with judge_server(answer) as (server, url):
            rubric = "Is {completion} like {answer}?"
            judge = Judge(url, "m", rubric, api_key_env="JUDGE_KEY", cache_dir=str(folder / "cache"))
            callbacks = [steps, ModelCheckpoint(folder / "checkpoints"), CompletionsTable()]
            trainer = make_trainer(max_steps=2, callbacks=callbacks, logger=CSVLogger(folder), default_root_dir=folder)
            trainer.fit(make_module(rewards=judge, reward_calls={"max_failed_share": 0.9}), make_data())
        return steps.steps, server, folder

    return run


def letters(request):
    """Grades the share of letters among the first 10 characters of a completion."""
    text = request.question.split("completion]\n")[1].split("\n[")[0]
    return reply(f"Grade: {sum(character.isalpha() for character in text[:10])}")


def test_a_run_with_a_judge_keeps_the_key_to_itself(run, caplog):
    with caplog.at_level(logging.DEBUG):
        steps, server, folder = run(letters)
    assert len(steps) == 2
    for step in steps:
        assert step["rewards/Judge/grade"] == pytest.approx(10 * step["reward"])
        assert step["rewards/Judge/invalid"] == 0.0
    assert {request.headers["Authorization"] for request in server.requests} == {f"Bearer {KEY}"}
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert {".ckpt", ".csv", ".json", ".jsonl"} <= {file.suffix for file in files}
    assert not [file for file in files if KEY.encode() in file.read_bytes()]
    assert KEY not in caplog.text


def test_completions_without_a_grade_have_no_reward_and_the_run_goes_on(run):
    def answer(request):
        return reply("No.") if request.question.split("completion]\n")[1][0].isalpha() else letters(request)

    steps, _, _ = run(answer)
    failed = [step["rewards/Judge/invalid"] for step in steps]
    assert len(failed) == 2
    assert all(0 < count < 16 for count in failed)
