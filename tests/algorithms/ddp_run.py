"""Run by test_ranks.py: one update of GRPO, or Distillation, on as many ranks as asked; rank 0 writes the results."""

import json
import sys
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

sys.path.insert(0, str(Path(__file__).parent))

from conftest import ScriptedEngine, TinyPolicy, share_of_letters

from pl_grouprl.algorithms import GRPO, Distillation, OptimizerConfig
from pl_grouprl.data import PromptDataModule
from pl_grouprl.demo import MostFrequentDigit
from pl_grouprl.types import SamplingConfig


def main(devices: int, folder: Path, checkpoint: Path | None, options: dict) -> None:
    """Train two updates of one batch of rollouts and validate."""
    task = MostFrequentDigit(prompt_length=20, majority_share=0.4, train_size=10, val_size=5)
    data = PromptDataModule(task, task, batch_size=5, val_batch_size=2, shuffle=False)
    teacher = (
        {}
        if "distillation_coef" not in options
        else {"teacher": TinyPolicy(seed=7, hidden_size=48, initializer_range=0.2)}
    )
    module = (Distillation if teacher else GRPO)(
        TinyPolicy(),
        share_of_letters,
        num_generations=4,
        sampling=SamplingConfig(max_new_tokens=8),
        engine=ScriptedEngine(),
        optimizer=OptimizerConfig(learning_rate=1.0, eps=1.0),
        num_iterations=2,
        sharing={"verify": False} | options.pop("sharing", {}),
        evaluation={"num_generations": 2},
        **teacher,
        **options,
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_steps=2,
        val_check_interval=2,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)],
        default_root_dir=folder,
    )
    trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
    if trainer.is_global_zero:
        torch.save([p.detach() for p in module.policy.parameters()], folder / "parameters.pt")
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        (folder / "metrics.json").write_text(json.dumps(metrics))


if __name__ == "__main__":
    _, devices, folder, checkpoint, options = sys.argv
    main(int(devices), Path(folder), Path(checkpoint) if checkpoint else None, json.loads(options))
