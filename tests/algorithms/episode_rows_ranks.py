"""The gradient of one step whose episodes are one rollout each, or two rows with the same tokens; also run by ranks."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything

sys.path.insert(0, str(Path(__file__).parent))

from conftest import History, RaggedEngine, TinyPolicy
from denominator_cases import CASES, COMMON, rewards

from pl_grouprl.algorithms import GRPO, GroupPPO, OptimizerConfig
from pl_grouprl.data import PromptDataModule
from pl_grouprl.demo import MostFrequentDigit
from pl_grouprl.types import Rollout, SamplingConfig

PROCESS: dict[str, Any] = COMMON | {"loss_agg_mode": "seq-mean-token-mean"}


def letter_rewards(completion_ids: list[list[int]], completions: list[str], **columns: Any) -> list[Any]:
    """A reward of a late token, and one of the whole completion."""
    return [[*[None] * (len(ids) - 1), float(ids[-1] % 5)] if len(ids) > 3 else None for ids in completion_ids]


ALL_CASES = {
    **CASES,
    "grpo process supervision": (GRPO, PROCESS | {"rewards": [letter_rewards, rewards]}),
    "grpo masked sequences": (
        GRPO, COMMON | {"loss_agg_mode": "token-mean", "importance_sampling": {"mode": "sequence_mask"}},
    ),
    "reinforce_plus_plus discounted": (
        GRPO, COMMON | {"advantage_estimator": "reinforce_plus_plus", "advantage_options": {"gamma": 0.9}},
    ),
    "opo, truncated masked": (GRPO, COMMON | {"advantage_estimator": "opo", "mask_truncated_completions": True}),
}  # fmt: skip


class RowsEngine(RaggedEngine):
    """The rollouts of `RaggedEngine`, where asked cut into two rows: the second has the first one's tokens as context.

    Args:
        rows: Whether to cut them; otherwise they stay as they are.
        at_gaps: Cut only before a gap of the loss mask.
        logprobs: As for `RaggedEngine`.
    """

    def __init__(self, rows: bool, at_gaps: bool = False, logprobs: bool = False) -> None:
        super().__init__(logprobs)
        self.rows, self.at_gaps = rows, at_gaps

    def _group(self, number: int, longest: int) -> list[Rollout]:
        whole = super()._group(number, longest)
        return [row for name, rollout in enumerate(whole) for row in self._rows(rollout, name)] if self.rows else whole

    def _rows(self, rollout: Rollout, name: int) -> list[Rollout]:
        length, mask = len(rollout.token_ids), rollout.loss_mask or [1] * len(rollout.token_ids)
        cut = 2 if self.at_gaps else length // 2
        if length < 2 or (self.at_gaps and 0 not in mask):
            return [rollout]
        first = Rollout(
            rollout.token_ids[:cut], rollout.logprobs and rollout.logprobs[:cut], mask[:cut], "length", episode=name
        )
        return [first, replace(rollout, loss_mask=[0] * cut + mask[cut:], episode=name)]


def step(case: str, *, rows: bool, folder: Any, devices: int = 1, **options: Any) -> tuple[dict[str, Any], Any]:
    """Train one step; the gradients by parameter, and the module."""
    cls, of_case = ALL_CASES[case]
    seed_everything(1, verbose=False)
    turns = {"boundary_at_turn_ends": True} if cls is GroupPPO else {}
    engine = RowsEngine(rows, cls is GroupPPO, "importance_sampling" in of_case)
    defaults = {
        "rewards": rewards,
        "sampling": SamplingConfig(max_new_tokens=12),
        "sharing": {"verify": False},
        "engine": engine,
    }
    module = cls(
        TinyPolicy(), num_generations=4, optimizer=OptimizerConfig(learning_rate=1e-3),
        **{**defaults, **turns, **of_case, **options, "sharing": {"verify": False} | options.get("sharing", {})},
    )  # fmt: skip
    record = History(keep_tensors=True)
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", precision="64-true",
        max_steps=1, logger=False, enable_checkpointing=False, callbacks=[record], enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    task = MostFrequentDigit(prompt_length=20, majority_share=0.4, train_size=5, val_size=1)
    trainer.fit(module, PromptDataModule(task, batch_size=5, shuffle=False))
    metrics = {name: value.clone() for name, value in trainer.callback_metrics.items()}
    return record.gradients[-1] | {"metrics": metrics}, module


RANK_CASES = ("grpo seq-mean-token-mean", "grpo process supervision", "ppo seq-mean-token-mean")


def main(folder: Path) -> None:
    """Run some cases on two ranks."""
    found = {case: step(case, rows=True, folder=folder, devices=2)[0] for case in RANK_CASES}
    torch.save(found, folder / f"rank{torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
