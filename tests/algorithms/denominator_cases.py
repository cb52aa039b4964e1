"""The gradient of one optimizer step under several cuts into micro-batches; also run by two ranks, as a script."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything

sys.path.insert(0, str(Path(__file__).parent))

from conftest import History, RaggedEngine, TinyPolicy

from pl_grouprl.algorithms import GRPO, PPO, GroupPPO, OptimizerConfig
from pl_grouprl.data import PromptDataModule
from pl_grouprl.demo import MostFrequentDigit
from pl_grouprl.models import PolicyCopyCritic, SharedTrunkCritic
from pl_grouprl.models.critic import LoRACritic
from pl_grouprl.types import SamplingConfig

COMMON: dict[str, Any] = {"beta": 0.1, "kl": {"type": "k1"}, "entropy_coef": 0.05}
PPO_OPTIONS: dict[str, Any] = COMMON | {"critic": PolicyCopyCritic(head_std=0.3), "gamma": 0.98, "critic_lam": 0.7}
K1_IN_REWARD = {"kl": {"type": "k1", "place": "reward"}}

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "grpo token-mean": (GRPO, COMMON | {"loss_agg_mode": "token-mean"}),
    "grpo seq-mean-token-sum": (GRPO, COMMON | {"loss_agg_mode": "seq-mean-token-sum"}),
    "grpo seq-mean-token-mean": (GRPO, COMMON | {"loss_agg_mode": "seq-mean-token-mean", "scale_rewards": "batch"}),
    "dr_grpo": (GRPO, COMMON | {"loss_type": "dr_grpo"}),
    "gspo": (GRPO, COMMON | {"loss_type": "gspo"}),
    "luspo": (GRPO, COMMON | {"loss_type": "luspo"}),
    "vespo": (GRPO, COMMON | {"loss_type": "vespo", "importance_sampling": {"mode": "token_truncate"}}),
    "grpo truncated importance": (
        GRPO,
        COMMON | {"importance_sampling": {"mode": "token_truncate"}, "kl": {"type": "k3"}},
    ),
    "reinforce_plus_plus": (GRPO, COMMON | K1_IN_REWARD | {"advantage_estimator": "reinforce_plus_plus"}),
    "ppo": (PPO, PPO_OPTIONS),
    "ppo seq-mean-token-mean": (PPO, PPO_OPTIONS | K1_IN_REWARD | {"loss_agg_mode": "seq-mean-token-mean"}),
    "ppo lora": (PPO, PPO_OPTIONS | {"critic": LoRACritic(r=4, head_std=0.3), "whiten_advantages": False}),
    "ppo shared, detached": (PPO, PPO_OPTIONS | {"critic": SharedTrunkCritic(detach=True, head_std=0.3)}),
    "group_ppo": (GroupPPO, PPO_OPTIONS | {"bootstrap_truncated": True}),
    "group_ppo endpoint": (GroupPPO, PPO_OPTIONS | {"advantage_mode": "endpoint", "group_variance_threshold": 2.0}),
    "group_ppo sketch": (GroupPPO, PPO_OPTIONS | {"score_norm": "sketch", "critic_positions": "all"}),
}
RANK_CUTS = {name: (1, 4) if name in ("grpo token-mean", "ppo", "group_ppo") else (4,) for name in CASES}
NO_ACCUMULATION = ("ppo shared", PPO, PPO_OPTIONS | {"critic": SharedTrunkCritic(head_std=0.3)})


def rewards(completions: list[str], **columns: Any) -> list[float | None]:
    """Differ in a group; some rollouts have none."""
    return [None if len(text) == 7 else len(set(text)) / 5 - 0.3 * (len(text) % 2) for text in completions]


def gradients_of_a_step(
    cls: Any, options: dict[str, Any], *, cut: int = 1, sharing: str = "shared", folder: Any, devices: int = 1
) -> dict[str, Any]:
    """Cut one batch of rollouts into mini-batches and accumulate them all; what the optimizer got, by parameter.

    With them, as `threshold`, where the threshold of the token groups went.
    """
    seed_everything(1, verbose=False)
    task = MostFrequentDigit(prompt_length=20, majority_share=0.4, train_size=5, val_size=1)
    data = PromptDataModule(task, batch_size=5, shuffle=False)
    module = cls(
        TinyPolicy(), rewards, engine=RaggedEngine(logprobs="importance_sampling" in options), num_generations=4,
        sampling=SamplingConfig(max_new_tokens=12), optimizer=OptimizerConfig(learning_rate=1e-3),
        sharing={"verify": False, "mode": sharing}, num_mini_batches=cut, **options,
    )  # fmt: skip
    record = History(keep_tensors=True)
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", precision="64-true",
        max_steps=1, accumulate_grad_batches=cut, logger=False, enable_checkpointing=False, callbacks=[record],
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, data)
    found = record.gradients[-1]
    if isinstance(module, GroupPPO):
        found["threshold"] = torch.tensor(module.threshold_controller.threshold, dtype=torch.float64)
    return found


def main(folder: Path, names: list[str]) -> None:
    """Run cases on two ranks, cut so often that a rank has nothing to train in some updates; some uncut too."""
    found = {}
    for name in names:
        cls, options = CASES[name] if name in CASES else NO_ACCUMULATION[1:]
        for cut in RANK_CUTS.get(name, (1,)):
            found[name, cut] = gradients_of_a_step(cls, options, cut=cut, folder=folder, devices=2)
    torch.save(found, folder / f"rank{torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
