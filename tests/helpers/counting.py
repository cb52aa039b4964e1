"""A module whose one weight grows by 1 with each step, and a quiet Trainer that saves its checkpoints."""

import torch
from lightning.pytorch import LightningModule, Trainer

from pl_grouprl.callbacks import SafeCheckpoint

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


class Counter(LightningModule):
    """Logs a score that falls; `event(module)` happens amid each batch."""

    def __init__(self, event=lambda module: None, **options):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.event, self.options, self.batches = event, options, 0

    def run_options(self):
        return self.options

    def training_step(self, batch, batch_idx):
        self.batches += 1
        self.event(self)
        self.log("score", float(-self.global_step))
        return -self.weight.sum()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(100, 1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def fit(folder, module=None, *callbacks, steps=4, checkpoint=None, trainer=None, **options):
    """Train with `SafeCheckpoint(**options)` behind the callbacks; returns the Trainer."""
    saving = SafeCheckpoint(**{"dirpath": folder, "every_n_train_steps": 2, "filename": "{step}"} | options)
    options = {"max_steps": steps, "callbacks": [*callbacks, saving], "default_root_dir": folder}
    trainer = Trainer(**QUIET | options | (trainer or {}))
    trainer.fit(module or Counter(), ckpt_path=checkpoint, weights_only=True)
    return trainer


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def step_of(checkpoint):
    return torch.load(checkpoint, weights_only=True)["global_step"]
