"""Run by test_rollouts_in_flight_ranks.py: runs of two ranks whose engines take weights in flight.

Arguments: the strategy, a folder, and by the name of a run what rank 1's engine does at its fifth call: `lost`,
`failed`, or nothing. Each rank writes what came of it.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "helpers"))

import torch
from forked_runs import TinyPolicy, final_state, fork_ranks, make_trainer, wait_for
from helpers.in_flight_engine import InFlightEngine
from lightning.pytorch import Callback

from pl_grouprl import GRPO, PromptDataModule, SamplingConfig
from pl_grouprl.algorithms import OptimizerConfig
from pl_grouprl.callbacks import SafeCheckpoint
from pl_grouprl.demo import MostFrequentDigit
from pl_grouprl.distributed.checksum import SamplerLostError

TIME_LIMIT = 100.0


def share_of_letters(completions, **columns):
    """Reward: how much of a completion is letters."""
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


class Watch(Callback):
    """Notes what was trained, and metrics."""

    def __init__(self) -> None:
        self.prompts: list[Any] = []
        self.versions: list[Any] = []
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        groups = module.last_rollouts.groups
        self.prompts.append([group.prompt_ids for group in groups])
        self.versions.append([rollout.weight_versions for group in groups for rollout in group.rollouts])
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def run(rank: int, strategy: str, folder: Path, fault: str, checkpoint: str | None) -> None:
    """Train four steps."""
    done: list[int] = []

    def go_wrong(engine: InFlightEngine, call: int, token: int) -> None:
        if rank == 1 and fault and call == 4 and not done:
            done.append(call)
            if fault == "failed":
                raise OSError("no space left")
            engine.version = None
            raise SamplerLostError("it was restarted")

    module = GRPO(
        TinyPolicy(),
        share_of_letters,
        num_generations=4,
        sampling=SamplingConfig(max_new_tokens=5),
        optimizer=OptimizerConfig(learning_rate=1e-4),  # the made-up log-probabilities stay those of the policy
        engine=InFlightEngine(go_wrong),
        max_staleness=2,
        importance_sampling={"mode": "token_truncate"},
        sharing={"verify": False},
    )
    watch = Watch()
    saving = SafeCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = make_trainer(folder, strategy, [watch, saving], max_epochs=-1, max_steps=4)
    task = MostFrequentDigit(prompt_length=20, majority_share=0.4, train_size=40, val_size=3)
    result: dict[str, Any] = {"error": None}
    try:
        trainer.fit(module, PromptDataModule(task, batch_size=5), ckpt_path=checkpoint, weights_only=True)
        result["weights"] = final_state(trainer, module)["weights"]
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    result |= {"prompts": watch.prompts, "versions": watch.versions, "steps": watch.steps}
    torch.save(result, folder / f"rank{rank}.pt")


def main(strategy: str, folder: Path, cases: dict[str, str]) -> None:
    """Run cases, each within a time limit; `resumed` continues the first."""
    for name, fault in cases.items():
        own = folder / name
        own.mkdir()
        checkpoint = str(folder / next(iter(cases)) / "step=2.ckpt") if name == "resumed" else None
        pids = fork_ranks(
            strategy, lambda rank, own=own, rest=(fault, checkpoint): run(rank, strategy, own, *rest), own / "log.txt"
        )
        codes = wait_for(pids, TIME_LIMIT)
        if any(codes):
            sys.exit(f"{name} ended with {codes}:\n{(own / 'log.txt').read_text()[-4000:]}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
