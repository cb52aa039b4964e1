"""Run by test_rollouts_ahead.py: three rollouts, the next one beside each update; rank 0 writes the weights."""

import sys
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

sys.path.insert(0, str(Path(__file__).parent))

from conftest import TinyPolicy, share_of_letters

from pl_grouprl.algorithms import GRPO, OptimizerConfig
from pl_grouprl.data import PromptDataModule
from pl_grouprl.demo import MostFrequentDigit
from pl_grouprl.types import SamplingConfig

STRATEGIES = {"ddp": DDPStrategy, "fsdp2": lambda: ModelParallelStrategy(2, 1, save_distributed_checkpoint=False)}


def main(devices: int, file: Path, strategy: str, checkpoint: str | None) -> None:
    """Train, and save each step beside the file."""
    task = MostFrequentDigit(prompt_length=20, majority_share=0.4, train_size=12, val_size=4)
    module = GRPO(
        TinyPolicy(),
        share_of_letters,
        num_generations=4,
        sampling=SamplingConfig(max_new_tokens=5),
        optimizer=OptimizerConfig(learning_rate=1.0, eps=1.0),
        sharing={"verify": False},
        max_staleness=1,
        importance_sampling={"mode": "token_truncate"},
    )
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=STRATEGIES[strategy]() if devices > 1 else "auto",
        max_steps=3,
        callbacks=[ModelCheckpoint(dirpath=file.parent, filename="{step}", every_n_train_steps=1, save_top_k=-1)],
        **quiet,
    )
    trainer.fit(module, PromptDataModule(task, batch_size=4), ckpt_path=checkpoint, weights_only=True)
    assert trainer.callback_metrics["rollout/staleness/mean"] == 1
    weights = [weight.clone() for _, weight in module.support.named_weights(module.policy)]
    if trainer.is_global_zero:
        torch.save(weights, file)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4] or None)
