"""Run by table.py: one training of one row, as many ranks as it has; rank 0 writes what came of it into a folder.

A tiny Qwen3 samples for itself. Prompts differ in length and so do completions; five prompts a batch do not divide by
two ranks or two mini-batches. The token budget is smaller than the largest groups, which are split, and larger than two
of the smallest; gradients are clipped in every step. A rollout gives two updates, so that the checkpoint is amid one.
Episodes have up to four turns, so that those of the ranks differ in number.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "helpers"), str(TESTS)]

from helpers.chance_episodes import (  # noqa: E402
    STOPS,
    ChancePolicy,
    Tally,
    add_or_double,
    double,
    register_chance_calls,
    tally_rows,
)
from helpers.tiny_runs import TinyPolicy, share_of_letters  # noqa: E402

from pl_grouprl import GRPO, Distillation, GroupPPO, PromptDataModule, SamplingConfig  # noqa: E402
from pl_grouprl.algorithms import OptimizerConfig  # noqa: E402
from pl_grouprl.callbacks import ExportPolicy, SafeCheckpoint  # noqa: E402

FRAGMENTS = TESTS.parent / "configs" / "strategy"
STEPS, SAVED_STEP = 10, 5
PROBE = [5, 9, 2, 11, 3, 3, 8]
"""Token ids at which the trained and the exported policy are compared."""


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Prompts of 6 to 30 digits; with six completions of at most 8 tokens a group has 12 to 78 tokens."""
    lengths = torch.randint(6, 31, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [{"prompt": "".join(str((7 * i + j * j + seed) % 10) for j in range(n))} for i, n in enumerate(lengths)]


def make_strategy(name: str, devices: int, *, on_cpu: bool) -> Any:
    """The strategy of a fragment in configs/strategy; on the CPU a subclass, where Lightning wants a GPU."""
    from jsonargparse import ArgumentParser
    from lightning.pytorch.strategies import Strategy

    value = yaml.safe_load((FRAGMENTS / f"{name}.yaml").read_text())["trainer"]["strategy"]
    if isinstance(value, str):
        return value
    options = value["init_args"]
    if "data_parallel_size" in options:
        options["data_parallel_size"] = devices
    if on_cpu:
        swapped = {"FSDPStrategy": "CPUFSDPStrategy", "DeepSpeedStrategy": "CPUDeepSpeedStrategy"}
        own = value["class_path"].rpartition(".")[2]
        value["class_path"] = f"cpu_strategies.{swapped[own]}" if own in swapped else value["class_path"]
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Strategy, "strategy")
    return parser.instantiate_classes(parser.parse_object({"strategy": value})).strategy


def make_module(algorithm: str, **options: Any) -> LightningModule:
    """GRPO, GROUP PPO or distillation on the tiny policy."""
    defaults = {
        "num_generations": 6,
        "num_mini_batches": 2,
        "sampling": SamplingConfig(max_new_tokens=8),
        "evaluation": {"num_generations": 2},
        "beta": 0.05,
        "optimizer": OptimizerConfig(learning_rate=1e-2, eps=1e-4),
        "sharing": {"verify": False} | options.pop("sharing", {}),
    }
    if algorithm == "GRPO tools":
        return GRPO(ChancePolicy(eos_token_id=1), **{**defaults, **episode_options(), **options})
    if algorithm == "Distillation":
        defaults["teacher"] = TinyPolicy(seed=7, hidden_size=48, initializer_range=0.2)
    cls = {"GRPO": GRPO, "GROUP PPO": GroupPPO, "Distillation": Distillation}[algorithm]
    return cls(TinyPolicy(), share_of_letters, **{**defaults, **options})


def episode_options() -> dict[str, Any]:
    """A tool, and an environment that gives the rewards."""
    register_chance_calls(name_of=add_or_double)
    return {
        "rewards": None,
        "tools": [double],
        "environment_factory": Tally,
        "episodes": {"max_tool_calling_iterations": 3, "max_turn_tokens": 10, "max_tokens": 60},
        "sampling": SamplingConfig(max_new_tokens=24, stop_token_ids=STOPS),
    }


def make_data(algorithm: str) -> PromptDataModule:
    """Four batches of five prompts in an epoch."""
    train, val = (tally_rows(20), tally_rows(3)) if algorithm == "GRPO tools" else (rows(20, 1), rows(3, 2))
    return PromptDataModule(train, val, batch_size=5, val_batch_size=2)


class Recorder(Callback):
    """Keeps the metrics of every step, and at the end the whole weights and what the live policy computes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[dict[str, float]] = []
        self.rollouts: set[int] = set()
        self.validations: list[float] = []
        self.passes: list[int] = []
        self.splits: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        buffer = module.last_rollouts
        self.rollouts.add(buffer.rollout_number)
        members = buffer.members(buffer.updates_done - 1)
        passes = module.micro_batcher.for_update(buffer, members)
        self.passes.append(passes.number)
        self.splits.append(len(passes._shape.splits))

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        self.validations.append(float(trainer.callback_metrics["val/reward"]))

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        parts = {name: part for name, (part, _) in module.optimized_parts().items()}
        states = {name: module.support.full_state_dict(part) for name, part in parts.items()}
        with module.support.whole_weights(module.policy), torch.no_grad():
            logits = module.policy(torch.tensor([PROBE], device=module.device)).logits
        if trainer.is_global_zero:
            # Clones: tied weights are saved twice, and saving must not depend on who shares memory with whom.
            torch.save(
                {f"{k}.{n}": v.clone() for k, s in states.items() for n, v in s.items()}, self.folder / "weights.pt"
            )
            torch.save(logits.cpu(), self.folder / "logits.pt")
            found = {name: getattr(self, name) for name in ("steps", "validations", "passes", "splits")}
            (self.folder / "run.json").write_text(json.dumps(found | {"rollouts": sorted(self.rollouts)}))


def main(folder: Path, row: dict[str, Any]) -> None:
    """Train and then validate, or only validate a checkpoint.

    Args:
        folder: Where the files go.
        row: Strategy (a fragment's name, or none), devices, accelerator, algorithm, options, checkpoint, evaluate.
    """
    devices, on_cpu = row["devices"], row["accelerator"] == "cpu"
    trainer = Trainer(
        accelerator=row["accelerator"],
        devices=devices,
        strategy=make_strategy(row["strategy"], devices, on_cpu=on_cpu) if row["strategy"] else "auto",
        max_steps=STEPS,
        gradient_clip_val=0.3,
        val_check_interval=SAVED_STEP,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            SafeCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=SAVED_STEP, save_top_k=-1),
            Recorder(folder),
            ExportPolicy(folder=str(folder / "policy")),
        ],
        default_root_dir=folder,
    )
    module, data = make_module(row["algorithm"], **row["options"]), make_data(row["algorithm"])
    if not row["evaluate"]:
        trainer.fit(module, data, ckpt_path=row["checkpoint"], weights_only=True)
    checkpoint = row["checkpoint"] if row["evaluate"] else None  # without one, of what was trained: a second run
    trainer.validate(module, data, ckpt_path=checkpoint, weights_only=True)
    if trainer.is_global_zero:
        (folder / "evaluation.json").write_text(json.dumps(float(trainer.callback_metrics["val/reward"])))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
