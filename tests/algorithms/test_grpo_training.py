"""Whole short runs of GRPO through the Trainer."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback


class History(Callback):
    """The metrics of every step."""

    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_bf16(make_module, make_data, make_trainer, precision):
    history = History()
    module = make_module(num_mini_batches=2, beta=0.1, sharing={"verify": True})
    make_trainer(max_steps=4, precision=precision, callbacks=[history]).fit(module, make_data())
    assert module.policy.dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
    assert module.last_rollouts.tokens["advantages"][0].dtype == torch.float32
    assert module.last_rollouts.tokens["old_logprobs"][0].dtype == torch.float32
    assert all(torch.isfinite(torch.tensor(step["loss"])) for step in history.steps)
