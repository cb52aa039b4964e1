"""What SharedPrefixCallback says of a group that runs in slices: the same as of the whole group in one call."""

from __future__ import annotations

import pytest
import torch
from helpers.tiny_models import random_groups, tiny_model
from lightning.pytorch import LightningModule, Trainer

from pl_grouprl.attention import shared_prefix
from pl_grouprl.callbacks import SharedPrefixCallback
from pl_grouprl.models import score
from pl_grouprl.models.score import PrefixPass
from pl_grouprl.packing import pack
from pl_grouprl.packing.batch import pack_slice


class OneGroup(LightningModule):
    """Trains on a prompt of 4 tokens and rollouts of 2, 3 and 1."""

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

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def metrics(slices):
    module = OneGroup(slices)
    trainer = Trainer(
        **{"accelerator": "cpu", "max_steps": 1, "logger": False, "enable_checkpointing": False},
        **{"enable_progress_bar": False, "enable_model_summary": False},
        callbacks=[SharedPrefixCallback(verify=False, measure_every_n_steps=1)],
    )
    with shared_prefix(module.policy):
        trainer.fit(module, torch.utils.data.DataLoader([0]))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("slices", [None, [[0, 1, 2]], [[0, 2], [1]], [[0], [1], [2]]])
def test_ten_tokens_for_sequences_of_eighteen(slices):
    found = metrics(slices)
    assert found["prefix/token_ratio"] == pytest.approx(1.8)
    assert found["prefix/groups"] == 1
    assert found["prefix/segments"] == 4
    assert found["prefix/padding_fraction"] == 0
    assert ("prefix/measured_speedup" in found) == (slices is None)
