"""A LightningModule that knows nothing of this package but one attribute, and a Trainer for it."""

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger

from pl_grouprl.types import Rollout, RolloutGroup


def two_groups():
    rollouts = [
        Rollout([3], reward=0.25, text="a", finish_reason="length", rewards={"exact": 0.0}),
        Rollout([4, 5], reward=1.0, text="b [bold]|", finish_reason="stop", rewards={"exact": 1.0}),
        Rollout([], reward=None, text=""),
    ]
    first = RolloutGroup(prompt_ids=[1, 2], prompt="12", columns={"answer": "b"}, rollouts=rollouts)
    return [first, RolloutGroup(prompt_ids=[7], rollouts=[Rollout([8], reward=0.5)])]


class Counter(LightningModule):
    """Logs `reward` 1, 2, 3, ... in training and `val/score` 10 times the steps done."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.last_rollouts = None

    def training_step(self, batch, batch_idx):
        self.last_rollouts = two_groups()
        self.log("reward", float(self.global_step + 1))
        return self.layer(batch).sum()

    def validation_step(self, batch, batch_idx):
        self.log("val/score", 10.0 * self.trainer.global_step)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.fixture
def counter():
    return Counter()


@pytest.fixture
def groups():
    return two_groups()


@pytest.fixture
def fit(tmp_path):
    """Train for some steps with the given callbacks; the run folder is `tmp_path/version_0`."""

    def run(module, *callbacks, max_steps=4, ckpt_path=None, val_batches=1, **options):
        options.setdefault("logger", CSVLogger(tmp_path, name="", version=0))
        options.setdefault("enable_checkpointing", False)
        trainer = Trainer(
            accelerator="cpu",
            max_steps=max_steps,
            callbacks=list(callbacks),
            default_root_dir=tmp_path,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            log_every_n_steps=1,
            val_check_interval=2,
            check_val_every_n_epoch=None,
            **options,
        )
        loader = torch.utils.data.DataLoader(torch.ones(8, 1))
        val_loader = torch.utils.data.DataLoader(torch.ones(val_batches, 1))
        trainer.fit(module, loader, val_loader, ckpt_path=ckpt_path)
        return trainer

    return run
