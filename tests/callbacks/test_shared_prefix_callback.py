"""What SharedPrefixCallback logs, and when it measures."""

import csv
import json
import warnings

import pytest
import torch
from helpers.tiny_models import random_groups, tiny_model
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger

from pl_grouprl.attention import shared_prefix as share_prefix
from pl_grouprl.callbacks import RunSummary, SharedPrefixCallback, shared_prefix
from pl_grouprl.models import score
from pl_grouprl.models.score import PrefixPass
from pl_grouprl.packing import pack
from pl_grouprl.packing.batch import pack_slice


class Plain(LightningModule):
    """Trains a model on two rows with one prompt; with a reference, that one is scored too."""

    def __init__(self, with_reference=False):
        super().__init__()
        self.policy = tiny_model("qwen3")
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
    def run(module, *callbacks, loader=None, **options):
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
        trainer.fit(module, loader or batches(4))
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


def test_an_accumulated_step_is_measured_once_and_the_first_batch_described(fit, monkeypatch):
    measured, lines = [], []
    monkeypatch.setattr(shared_prefix, "measure_speedup", lambda patch, call: measured.append(call) or 2.0)
    monkeypatch.setattr(shared_prefix, "rank_zero_info", lines.append)
    callback = SharedPrefixCallback(verify=False, measure_every_n_steps=1)
    trainer = fit(Plain(), callback, max_epochs=1, accumulate_grad_batches=2)
    assert trainer.global_step == len(measured) == 2
    assert "the first batch has 1 group in 3 segments, " in lines[0]


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
    (told,) = slower
    assert "speedup is 0.50 at a token ratio of 1." in told
    assert "sharing.mode='repeated'" in told


class OneGroup(LightningModule):
    """Trains on a prompt of 4 tokens and rollouts of 2, 3 and 1, whole or in slices."""

    def __init__(self, slices):
        super().__init__()
        self.policy, self.slices = tiny_model("qwen3"), slices

    def training_step(self, batch, batch_idx):
        (group,) = random_groups(0, [(4, [2, 3, 1])])
        if self.slices is None:
            return score(self.policy, pack([group])).logprobs_N.sum()
        prefix = PrefixPass(group, "cpu")
        for index in self.slices:
            score(self.policy, pack_slice(group, index, prefix)).logprobs_N.sum().backward()
        return prefix.loss(self.policy.parameters())

    configure_optimizers = Plain.configure_optimizers


@pytest.mark.parametrize("slices", [None, [[0, 1, 2]], [[0, 2], [1]], [[0], [1], [2]]])
def test_a_group_that_runs_in_slices_counts_as_whole(fit, slices):
    """Ten tokens for sequences of eighteen."""
    module = OneGroup(slices)
    with share_prefix(module.policy):
        callback = SharedPrefixCallback(verify=False, measure_every_n_steps=1)
        trainer = fit(module, callback, max_steps=1, loader=torch.utils.data.DataLoader([0]))
    found = trainer.callback_metrics
    assert found["prefix/token_ratio"] == pytest.approx(1.8)
    assert (found["prefix/groups"], found["prefix/segments"], found["prefix/padding_fraction"]) == (1, 4, 0)
    assert ("prefix/measured_speedup" in found) == (slices is None)
