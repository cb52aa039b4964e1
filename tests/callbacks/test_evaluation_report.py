"""What `validate` and `test` leave: the completions of all prompts, and a table of data sources."""

import json

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger

from pl_grouprl.callbacks import CompletionsTable, RunSummary
from pl_grouprl.callbacks import completions_table as evaluation_report
from pl_grouprl.callbacks.completions_table import evaluation_rows, source_table
from pl_grouprl.types import Rollout, RolloutGroup


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


@pytest.fixture
def evaluate(tmp_path):
    def run(stage, *callbacks, module=None, **options):
        options.setdefault("logger", CSVLogger(tmp_path, name="", version=0))
        trainer = Trainer(
            accelerator="cpu",
            callbacks=list(callbacks),
            default_root_dir=tmp_path,
            enable_progress_bar=False,
            enable_checkpointing=False,
            **options,
        )
        getattr(trainer, stage)(module or Evaluated(), torch.utils.data.DataLoader(torch.ones(2, 1)), verbose=False)
        return trainer

    return run


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("stage", "name"), [("test", "test_completions.jsonl"), ("validate", "val_completions.jsonl")])
def test_all_completions_are_written_with_their_answers(evaluate, tmp_path, stage, name):
    evaluate(stage, CompletionsTable(num_groups=1, console=False))
    rows = lines_of(tmp_path / "version_0" / name)
    assert [(row["group"], row["completion"], row["answer"]) for row in rows[:4]] == [
        (0, "a", "A"),
        (0, "bb", None),
        (1, "ccc", "C"),
        (1, "", ""),
    ]
    assert [row["group"] for row in rows[4:]] == [2, 2, 3, 3]  # of the second batch
    assert rows[2]["reward"] == 3.0
    assert rows[2]["prompt"] == "prompt 1"
    assert "step" not in rows[2]


def test_the_first_prompts_are_shown_once(evaluate, capsys):
    evaluate("test", CompletionsTable(num_groups=1))
    shown = capsys.readouterr().out
    assert shown.count("Completions") == 1
    assert shown.index("bb") < shown.index("│ a ")  # from the highest reward
    assert "ccc" not in shown


def test_a_second_evaluation_counts_from_the_start(evaluate, tmp_path):
    trainer = evaluate("test", CompletionsTable(console=False))
    trainer.test(Evaluated(), torch.utils.data.DataLoader(torch.ones(1, 1)), verbose=False)
    assert [row["group"] for row in lines_of(tmp_path / "version_0" / "test_completions.jsonl")][8:] == [0, 0, 1, 1]


def test_trials_and_other_modules_write_nothing(evaluate, tmp_path):
    class Other(LightningModule):
        def test_step(self, batch, batch_idx):
            return torch.ones(1)

    evaluate("test", CompletionsTable(console=False), module=Other())
    evaluate("test", CompletionsTable(console=False), fast_dev_run=True, logger=None)
    assert not list(tmp_path.rglob("*.jsonl"))


def test_rows_of_all_ranks_are_in_the_order_of_the_prompts(monkeypatch):
    """A batch of three prompts on two ranks, then one of a single prompt: every rank takes every second prompt."""

    def of_rank(*groups):
        return {"groups": list(groups), "answers": [["x"] * len(own.rollouts) for own in groups]}

    sent = []
    with monkeypatch.context() as patch:
        patch.setattr(evaluation_report, "gather_plain", lambda value, device: sent.append(value) or [[]])
        for outputs in (of_rank(group(1, "b")), of_rank()):
            evaluation_rows(outputs, None, "cpu")
    monkeypatch.setattr(evaluation_report, "gather_plain", lambda value, device: [value, sent.pop(0)])
    by_group = evaluation_rows(of_rank(group(0, "a", "A"), group(2, "c")), None, "cpu")
    by_group += evaluation_rows(of_rank(group(0, "d")), None, "cpu", first=3)
    assert [(row["group"], row["completion"]) for rows in by_group for row in rows] == [
        (0, "a"),
        (0, "A"),
        (1, "b"),
        (2, "c"),
        (3, "d"),
    ]


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
