"""Research code that changes one part of GRPO and inherits the rest.

Here, each rollout is compared with the *median* of its group instead of the mean, so one lucky rollout does not push
all others below zero. That takes one method; rollouts, rewards, shared prefixes, losses, checkpoints and the command
line (`--model examples.subclass_grpo.MedianGRPO`) stay the same. The run below trains a tiny random model on short
prompts for a few steps, in seconds:

    python examples/subclass_grpo.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from pl_grouprl import GRPO, PromptDataModule, RolloutGroup, SamplingConfig
from pl_grouprl.algorithms import OptimizerConfig
from pl_grouprl.demo import MostFrequentDigit, WarmStartedPolicy


class MedianGRPO(GRPO):
    """GRPO with the group's median as the baseline; same options as GRPO."""

    def compute_advantages(self, groups: Sequence[RolloutGroup]) -> Tensor:
        """Reward minus the median reward of the group, shape [B]; a rollout without a reward gets 0."""
        advantages = []
        for group in groups:
            rewards = torch.tensor([math.nan if r.reward is None else r.reward for r in group.rollouts])
            advantages.append((rewards - rewards.nanquantile(0.5)).nan_to_num(0.0))
        return torch.cat(advantages)


def share_of_letters(completions: list[str], **columns: Any) -> list[float]:
    """Reward with TRL's signature: the share of letters in a completion."""
    return [sum(character.isalpha() for character in text) / max(len(text), 1) for text in completions]


class RewardPrinter(pl.Callback):
    """Prints the mean reward of each step and keeps it."""

    def __init__(self) -> None:
        self.rewards: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Read the logged metrics."""
        metrics = trainer.callback_metrics
        self.rewards.append(metrics["reward"].item())
        ratio = metrics["prefix/token_ratio"]
        print(f"step {trainer.global_step:3}  reward {self.rewards[-1]:.3f}  token ratio {ratio:.2f}")


def main(
    steps: int = 20, prompt_tokens: int = 64, num_generations: int = 8, cache_dir: str = ".cache/examples"
) -> list[float]:
    """Train; return the mean reward of each step."""
    pl.seed_everything(0, verbose=False)
    task = MostFrequentDigit(prompt_length=prompt_tokens, majority_share=0.4, train_size=64)
    architecture = {
        "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    module = MedianGRPO(
        WarmStartedPolicy(task, architecture, steps=0, cache_dir=cache_dir),  # 0 steps: random weights
        share_of_letters,
        num_generations=num_generations,
        sampling=SamplingConfig(max_new_tokens=6),
        optimizer=OptimizerConfig(learning_rate=1e-2),
    )
    printer = RewardPrinter()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[printer],
    )  # fmt: skip
    trainer.fit(module, datamodule=PromptDataModule(task, batch_size=4))
    return printer.rewards


if __name__ == "__main__":
    main()
