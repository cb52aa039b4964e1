"""A module that writes down the prompts it is given, and a quiet Trainer for it."""

import warnings

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from pl_grouprl.demo import MostFrequentDigit

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


class Recorder(LightningModule):
    """Trains one number."""

    def __init__(self, updates_per_rollout=1):
        super().__init__()
        self.updates_per_rollout = updates_per_rollout
        self.tokenizer = MostFrequentDigit().tokenizer()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen, self.validated = [], []

    def training_step(self, batch, batch_idx):
        prompts = [prompt.prompt for prompt in batch.prompts]
        self.seen.append((batch.rollout_number, batch.update_index, batch.num_updates, prompts))
        return self.weight * 1.0

    def validation_step(self, batch, batch_idx):
        self.validated.append([prompt.prompt for prompt in batch.prompts])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveEverywhere(Callback):
    """Saves after every step, and where Lightning's own checkpoints at the end of an epoch are saved."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.save_checkpoint(self.folder / f"step{trainer.global_step}.ckpt")

    def on_train_epoch_end(self, trainer, module):
        trainer.save_checkpoint(self.folder / f"epoch{trainer.current_epoch}.ckpt")


def fit(module, data, *, checkpoint=None, callbacks=(), **options):
    """Train the module, and return the Trainer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(**QUIET, enable_checkpointing=False, callbacks=list(callbacks), **options)
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    return trainer
