"""What SharedPrefixCallback logs, and when it measures."""

import csv
import json
import warnings

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from transformers import Qwen3Config, Qwen3ForCausalLM

from pl_grouprl.callbacks import RunSummary, SharedPrefixCallback, shared_prefix


class Plain(LightningModule):
    """Trains a model on two rows with one prompt; with a reference, that one is scored too."""

    def __init__(self, with_reference=False):
        super().__init__()
        self.policy = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=16,
                hidden_size=8,
                intermediate_size=8,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=4,
            )
        )
        self.with_reference = with_reference

    def training_step(self, ids, batch_idx):
        if self.with_reference:
            with torch.no_grad():
                self.policy(input_ids=ids)
        return self.policy(input_ids=ids, labels=ids).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def batches(count):
    rows = torch.cat([torch.arange(20).expand(2, 20) % 16, torch.tensor([[1, 2], [3, 4]])], dim=1)
    return torch.utils.data.DataLoader([rows] * count, batch_size=None)


@pytest.fixture
def fit(tmp_path):
    def run(module, *callbacks, **options):
        trainer = Trainer(
            accelerator="cpu",
            logger=CSVLogger(tmp_path, name="", version=0),
            log_every_n_steps=1,
            callbacks=list(callbacks),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        trainer.fit(module, batches(4))
        return trainer

    return run


def test_steps_are_measured_by_their_number_over_epochs(fit, tmp_path, monkeypatch):
    speedups = iter([2.0, 4.0, 8.0])
    monkeypatch.setattr(shared_prefix, "measure_speedup", lambda patch, call: next(speedups))
    summary = RunSummary(curves_filename=None)
    fit(Plain(), SharedPrefixCallback(verify=False, measure_every_n_steps=3), summary, max_epochs=2)
    # 8 steps in epochs of 4; each value once, though the logger repeats it
    assert summary.history.points["prefix/measured_speedup"] == [(3, 2.0), (6, 4.0)]
    statistics = json.loads((tmp_path / "version_0" / "summary.json").read_text())["metrics"]
    assert statistics["prefix/measured_speedup"]["mean"] == 3.0
    assert statistics["prefix/token_ratio"]["count"] == 8
    with (tmp_path / "version_0" / "metrics.csv").open() as file:
        shown = [row["prefix/measured_speedup"] for row in csv.DictReader(file)]
    assert float(shown[2]) == 2.0


def test_an_accumulated_step_is_measured_once(fit, monkeypatch):
    measured = []
    monkeypatch.setattr(shared_prefix, "measure_speedup", lambda patch, call: measured.append(call) or 2.0)
    callback = SharedPrefixCallback(verify=False, measure_every_n_steps=1)
    trainer = fit(Plain(), callback, max_epochs=1, accumulate_grad_batches=2)
    assert trainer.global_step == len(measured) == 2


@pytest.mark.parametrize("with_reference", [False, True])
def test_groups_are_those_that_are_trained(fit, with_reference):
    trainer = fit(Plain(with_reference), SharedPrefixCallback(verify=False), max_steps=1)
    assert trainer.callback_metrics["prefix/groups"] == 1


def test_a_run_that_sharing_makes_slower_is_told_once(fit, monkeypatch):
    speedups = iter([1.5, 0.5, 0.25, 0.125])
    monkeypatch.setattr(shared_prefix, "measure_speedup", lambda patch, call: next(speedups))
    callback = SharedPrefixCallback(verify=False, measure_every_n_steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Plain(), callback, max_epochs=1)
    slower = [str(own.message) for own in caught if "makes this run slower" in str(own.message)]
    assert len(slower) == 1
    assert "speedup is 0.50 at a token ratio of 1." in slower[0]
    assert "sharing='repeated'" in slower[0]


def test_the_first_batch_is_described(fit, monkeypatch):
    lines = []
    monkeypatch.setattr(shared_prefix, "rank_zero_info", lines.append)
    fit(Plain(), SharedPrefixCallback(verify=False), max_steps=1)
    assert "the first batch has 1 group in 3 segments, " in lines[0]
