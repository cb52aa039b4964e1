"""A run of the default configuration, and one with the callback, where Linux's modules and calls are missing.

python other_system.py darwin|win32 FOLDER ARGUMENT...: `FOLDER` for the callback's run, then `cli.py`'s arguments.
"""

import importlib
import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors import signal_connector
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.other_systems import become


class Supervised(LightningModule):
    """A module of one's own, whose rows begin alike."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, ids, batch_idx):
        return self.model(input_ids=ids, labels=ids).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_with_callback(folder):
    """Train one step with the callback; returns what it has logged."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from pl_grouprl import SharedPrefixCallback

    config = Qwen3Config(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    rows = torch.randint(50, (1, 40)).expand(4, -1).clone()
    rows[:, 32:] = torch.randint(50, (4, 8))
    trainer = Trainer(
        max_steps=1, accelerator="cpu", default_root_dir=folder, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[SharedPrefixCallback()],
    )  # fmt: skip
    trainer.fit(Supervised(Qwen3ForCausalLM(config)), DataLoader(rows, batch_size=4))
    return trainer.callback_metrics


if __name__ == "__main__":
    system, folder, *arguments = sys.argv[1:]
    for name in ("matplotlib.pyplot", "matplotlib.backends.backend_agg", "torch.utils.tensorboard"):
        importlib.import_module(name)
    signal_connector._IS_WINDOWS = system == "win32"
    become(system)
    from pl_grouprl.cli import main

    print("token ratio", float(train_with_callback(folder)["prefix/token_ratio"]))
    main(arguments)
