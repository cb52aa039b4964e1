"""Run by test_ranks.py: runs of two ranks, one after another; each rank writes what came of each.

Arguments: the kind, the strategy, a folder, and cases by name as JSON; what a case is depends on the kind.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "helpers"))

import torch
from forked_runs import checkpointing, final_state, fork_ranks, make_data, make_module, make_trainer, wait_for
from helpers.copied_engine import CopiedPolicyEngine
from helpers.in_flight_engine import InFlightEngine
from helpers.tiny_runs import AHEAD, PLAIN, History, TinyPolicy
from helpers.tiny_runs import make_data as make_prompts
from helpers.tiny_runs import make_module as make_grpo
from lightning.pytorch import Callback

from pl_grouprl.algorithms import OptimizerConfig
from pl_grouprl.callbacks import SafeCheckpoint
from pl_grouprl.models import LoRAAdapter
from pl_grouprl.rewards import FunctionFromFile
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.rollout.engine import SamplerLostError

TIME_LIMIT = 100.0


class WithLoRA(TinyPolicy):
    def load(self) -> Any:
        return LoRAAdapter(r=4, alpha=64).add_to(super().load())


class WritesOnOneRank(Callback):
    """One rank alone changes a weight, until it samples."""

    def __init__(self, rank: int | None) -> None:
        self.rank = rank

    def on_validation_end(self, trainer, module):
        if trainer.global_rank == self.rank and trainer.global_step == 4:
            weight, engine = next(module.policy.parameters()).data, module.engine
            kept, generate = weight.clone(), engine.generate
            weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))

            def restore_and_generate(*args, **kwargs):
                weight.copy_(kept)
                return generate(*args, **kwargs)

            engine.generate = restore_and_generate


class BreaksOnOneRank(Callback):
    """NaN in the last number that the last rank holds of one weight."""

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if trainer.global_rank == trainer.world_size - 1:
            weight = module.policy.model.norm.weight.data
            getattr(weight, "to_local", lambda: weight)()[-1] = float("nan")


def sync(rank: int, strategy: str, folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Six steps, two to each batch of rollouts, and a validation after the fourth.

    A case has `lora` of the policy, the engine's `adapter` (none: HFRolloutEngine), its `faults` by rank as [method,
    number of the call, fault], `writes`: a rank that changes a weight, and the `checkpoint` to continue from.
    """
    faults = {(method, call): fault for method, call, fault in case.get("faults", {}).get(str(rank), ())}
    engine: Any = CopiedPolicyEngine(case["adapter"], faults) if "adapter" in case else HFRolloutEngine()
    policy = (WithLoRA if case.get("lora") else TinyPolicy)()
    module = make_grpo(policy=policy, num_mini_batches=2, optimizer=PLAIN, engine=engine)
    # One rank has none of the last prompts of validation.
    data = make_prompts(val=True, val_size=3, val_batch_size=2)
    checkpoint = folder.parent / case["checkpoint"] if "checkpoint" in case else None
    trainer = {"max_epochs": -1, "max_steps": 6, "val_check_interval": 4}
    watch = WritesOnOneRank(case.get("writes"))
    result = watched(module, data, strategy, folder, [watch], checkpoint, every=3, **trainer)
    return result | {name: getattr(engine, name, None) for name in ("updates", "calls", "closes")}


def in_flight(rank: int, strategy: str, folder: Path, fault: str) -> dict[str, Any]:
    """Four steps; rank 1's engine may be `lost` or have `failed` at its fifth call. `resumed` continues `plain`."""
    done: list[int] = []

    def go_wrong(engine: InFlightEngine, call: int, token: int) -> None:
        if rank == 1 and fault and call == 4 and not done:
            done.append(call)
            if fault == "failed":
                raise OSError("no space left")
            engine.version = None
            raise SamplerLostError("it was restarted")

    still = OptimizerConfig(learning_rate=1e-4)  # the made-up log-probabilities stay those of the policy
    module = make_grpo(optimizer=still, engine=InFlightEngine(go_wrong), **{**AHEAD, "max_staleness": 2})
    checkpoint = folder.parent / "plain" / "step=2.ckpt" if folder.name == "resumed" else None
    trainer = {"max_epochs": -1, "max_steps": 4}
    return watched(module, make_prompts(40, batch_size=5), strategy, folder, [], checkpoint, every=2, **trainer)


def broken(rank: int, strategy: str, folder: Path, case: Any) -> dict[str, Any]:
    return watched(make_module("grpo"), make_data(), strategy, folder, [BreaksOnOneRank()], None)


def rewards(rank: int, strategy: str, folder: Path, saved: str) -> dict[str, Any]:
    """Each rank has a copy of the reward file; on the last one, it is another when the run is resumed."""
    file = folder / f"rank-{rank}" / "reward.py"
    file.parent.mkdir(exist_ok=True)
    text = "-len(text)" if saved and rank else "len(text)"
    file.write_text(f"def score(completions, **columns):\n    return [{text} for text in completions]\n")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        callbacks = [] if saved else [checkpointing(folder)]
        trainer = make_trainer(folder, strategy, callbacks, max_steps=4, enable_checkpointing=not saved)
        checkpoint = folder.parent / saved / "last.ckpt" if saved else None
        module = make_module("grpo", FunctionFromFile(str(file), "score"))
        trainer.fit(module, make_data(), ckpt_path=checkpoint, weights_only=True)
    return {"warnings": "\n".join(str(warning.message) for warning in told)}


def watched(
    module: Any,
    data: Any,
    strategy: str,
    folder: Path,
    callbacks: list[Any],
    checkpoint: Any,
    every: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Train; what was trained, the weights, and the error that ended it, if any."""
    watch, saves = History(), []
    if every:
        saves = [SafeCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=every, save_top_k=-1)]
    trainer = make_trainer(
        folder, strategy, [watch, *callbacks, *saves], **{"enable_checkpointing": bool(every), **options}
    )
    result: dict[str, Any] = {"error": None}
    try:
        trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
        result["weights"] = final_state(trainer, module)["weights"]
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    result |= {"steps": watch.steps, "tokens": watch.tokens}
    result["prompts"] = [[group.prompt_ids for group in groups] for groups in watch.groups]
    result["versions"] = [[r.weight_versions for group in groups for r in group.rollouts] for groups in watch.groups]
    return result


def run(kind: str, rank: int, strategy: str, folder: Path, case: Any) -> None:
    result = {"sync": sync, "in_flight": in_flight, "broken": broken, "rewards": rewards}[kind](
        rank, strategy, folder, case
    )
    torch.save(result, folder / f"rank{rank}.pt")


def main(kind: str, strategy: str, folder: Path, cases: dict[str, Any]) -> None:
    """Run cases, each within a time limit."""
    for name, case in cases.items():
        own = folder / name
        own.mkdir()
        pids = fork_ranks(
            strategy, lambda rank, own=own, case=case: run(kind, rank, strategy, own, case), own / "log.txt"
        )
        codes = wait_for(pids, TIME_LIMIT)
        if any(codes):
            sys.exit(f"{name} ended with {codes}:\n{(own / 'log.txt').read_text()[-4000:]}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4]))
