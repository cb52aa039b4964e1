"""Run by test_ppo_parts.py: critic warm-up on two ranks; each rank writes the weights it had along the way."""

import sys
from pathlib import Path

import torch
from lightning.pytorch import Trainer

sys.path.insert(0, str(Path(__file__).parent))

from conftest import History, RaggedEngine, TinyPolicy, share_of_letters

from pl_grouprl.algorithms import PPO, OptimizerConfig
from pl_grouprl.data import PromptDataModule
from pl_grouprl.demo import MostFrequentDigit
from pl_grouprl.models import PolicyCopyCritic, SharedTrunkCritic
from pl_grouprl.models.critic import LoRACritic
from pl_grouprl.types import SamplingConfig

CRITICS = {
    "copy": PolicyCopyCritic(head_std=0.1),
    "shared": SharedTrunkCritic(head_std=0.1),
    "shared, detached": SharedTrunkCritic(detach=True, head_std=0.1),
    "lora": LoRACritic(r=4, head_std=0.1),
}


def main(folder: Path, critics: list[str]) -> None:
    """Two steps of warm-up and two after it: weights before, after the warm-up, and at the end."""
    found = {}
    for name in critics:
        task = MostFrequentDigit(prompt_length=20, majority_share=0.4, train_size=3, val_size=1)
        module = PPO(
            TinyPolicy(), share_of_letters, critic=CRITICS[name], engine=RaggedEngine(), critic_warmup_steps=2,
            num_generations=4, num_mini_batches=2, sampling=SamplingConfig(max_new_tokens=12),
            sharing={"verify": False}, optimizer=OptimizerConfig(learning_rate=1e-2, weight_decay=0.1),
        )  # fmt: skip
        module.configure_model()
        before = {n: p.detach().clone() for n, p in module.named_parameters()}
        record = History(keep_tensors=True)
        Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_steps=4, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[record], default_root_dir=folder,
        ).fit(module, PromptDataModule(task, batch_size=3, shuffle=False))  # fmt: skip
        found[name] = [before, record.weights[1], record.weights[3]]
    torch.save(found, folder / f"rank{torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
