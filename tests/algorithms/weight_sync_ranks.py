"""Run by test_weight_sync_ranks.py: runs of two ranks, one after another; each rank writes what came of each.

Arguments: the strategy, a folder, and cases by name as JSON: `lora` of the policy, the engine's `adapter` (none:
HFRolloutEngine), its `faults` by rank as [method, number of the call, fault], `writes`: a rank that changes a weight
behind the others' backs, and the `checkpoint` to go on from.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "helpers"))

import torch
from copied_engine import CopiedPolicyEngine
from forked_runs import TinyPolicy, final_state, fork_ranks, make_trainer, wait_for
from lightning.pytorch import Callback

from pl_grouprl import GRPO, PromptDataModule, SamplingConfig
from pl_grouprl.algorithms import OptimizerConfig
from pl_grouprl.callbacks import SafeCheckpoint
from pl_grouprl.demo import MostFrequentDigit
from pl_grouprl.models import LoRAAdapter
from pl_grouprl.rollout import HFRolloutEngine

TIME_LIMIT = 100.0


class Policy(TinyPolicy):
    """The tiny policy, perhaps with an adapter."""

    def __init__(self, lora: bool) -> None:
        super().__init__()
        self.lora = lora

    def load(self) -> Any:
        return LoRAAdapter(r=4, alpha=64).add_to(super().load()) if self.lora else super().load()


def share_of_letters(completions, **columns):
    """Reward: how much of a completion is letters."""
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


class Watch(Callback):
    """Notes rollouts and metrics; one rank may write to a weight that nobody else knows of."""

    def __init__(self, writes: int | None) -> None:
        self.writes = writes
        self.tokens: list[Any] = []
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.tokens.append([[r.token_ids for r in group.rollouts] for group in module.last_rollouts.groups])
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_validation_end(self, trainer, module):
        if trainer.global_rank == self.writes and trainer.global_step == 4:
            weight, engine = next(module.policy.parameters()).data, module.engine
            kept, generate = weight.clone(), engine.generate
            weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))

            def restore_and_generate(*args, **kwargs):
                weight.copy_(kept)
                return generate(*args, **kwargs)

            engine.generate = restore_and_generate


def run(rank: int, strategy: str, folder: Path, case: dict[str, Any]) -> None:
    """Train six steps, two to each batch of rollouts, and validate behind the fourth."""
    faults = {(method, call): fault for method, call, fault in case.get("faults", {}).get(str(rank), ())}
    engine: Any = CopiedPolicyEngine(case["adapter"], faults) if "adapter" in case else HFRolloutEngine()
    module = GRPO(
        Policy(case.get("lora", False)),
        share_of_letters,
        num_generations=4,
        num_mini_batches=2,
        sampling=SamplingConfig(max_new_tokens=5),
        optimizer=OptimizerConfig(learning_rate=1.0, eps=1.0),
        engine=engine,
        sharing={"verify": False},
    )
    watch = Watch(case.get("writes"))
    saving = SafeCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = make_trainer(folder, strategy, [watch, saving], max_epochs=-1, max_steps=6, val_check_interval=4)
    task = MostFrequentDigit(prompt_length=20, majority_share=0.4, train_size=12, val_size=3)
    data = PromptDataModule(task, task, batch_size=4, val_batch_size=2)  # one rank has none of the last prompts
    result: dict[str, Any] = {"error": None}
    try:
        trainer.fit(module, data, ckpt_path=case.get("checkpoint"), weights_only=True)
        result["weights"] = final_state(trainer, module)["weights"]
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    for name in ("updates", "calls", "closes"):
        result[name] = getattr(engine, name, None)
    torch.save({**result, "tokens": watch.tokens, "steps": watch.steps}, folder / f"rank{rank}.pt")


def main(strategy: str, folder: Path, cases: dict[str, Any]) -> None:
    """Run cases, each within a time limit."""
    for name, case in cases.items():
        own = folder / name
        own.mkdir()
        pids = fork_ranks(strategy, lambda rank, own=own, case=case: run(rank, strategy, own, case), own / "log.txt")
        codes = wait_for(pids, TIME_LIMIT)
        if any(codes):
            sys.exit(f"{name} ended with {codes}:\n{(own / 'log.txt').read_text()[-4000:]}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
