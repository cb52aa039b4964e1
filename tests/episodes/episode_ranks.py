"""Run by test_episode_ranks.py: runs with tools, one after another; each rank writes the result of each.

Arguments: a folder, and cases by name as JSON: the `strategy`; `algorithm`, GRPO by default; `brief`: all episodes of
rank 1 end after their first turn; `copied`: the engine has a copy of the weights; its `faults` by rank as
[method, number of the call, fault]; `unfit`: the number of a row that the environment refuses.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import torch
from copied_engine import CopiedPolicyEngine
from forked_runs import fork_ranks, make_trainer, wait_for
from helpers.chance_episodes import STOPS, ChancePolicy, Tally, add_or_double, double, register_chance_calls, tally_rows
from lightning.pytorch import Callback

from pl_grouprl import GRPO, GroupPPO, PromptDataModule, SamplingConfig
from pl_grouprl.algorithms import OptimizerConfig
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.utilities.distributed import gather_plain, local_shard

TIME_LIMIT = 100.0
LIMITS = {"max_tool_calling_iterations": 3, "max_turn_tokens": 12, "max_tokens": 100}


class Record(Callback):
    """The groups of all ranks by place, gradients and weights of each step; how often the weights were gathered."""

    def __init__(self) -> None:
        self.gathers = self.depth = self.greatest_depth = 0
        self.groups: list[dict[int, Any]] = []
        self.gradients: list[dict[str, Any]] = []
        self.weights: list[dict[str, Any]] = []
        self.restarts: list[float] = []
        self.validation: dict[str, float] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        whole_weights = module.support.whole_weights

        @contextmanager
        def counted(*models: Any) -> Iterator[None]:
            self.gathers, self.depth = self.gathers + 1, self.depth + 1
            self.greatest_depth = max(self.greatest_depth, self.depth)
            with whole_weights(*models):
                yield
            self.depth -= 1

        module.support.whole_weights = counted

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        own = {group.group_id: [_plain(r) for r in group.rollouts] for group in module.last_rollouts.groups}
        self.groups.append({place: own for part in gather_plain(own, module.device) for place, own in part.items()})
        trained = dict(module.named_parameters())
        self.weights.append({name: local_shard(weight).clone() for name, weight in trained.items()})
        self.gradients.append({n: local_shard(w.grad).clone() for n, w in trained.items() if w.grad is not None})
        self.restarts.append(float(trainer.callback_metrics.get("sync/restarts", 0)))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        figures = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
        self.validation = {name: value for name, value in figures.items() if "seconds" not in name}


def _plain(rollout: Any) -> dict[str, Any]:
    fields = ("token_ids", "loss_mask", "messages", "prompt", "reward", "rewards", "finish_reason", "logprobs")
    fields += ("branch_points", "branch_path")
    counts = {name: count for name, count in rollout.tool_counts.items() if name != "seconds"}
    return {**{name: getattr(rollout, name) for name in fields}, "counts": counts}


def share_of_letters(completions: list[Any], **columns: Any) -> list[float]:
    """Reward: how much of an episode is letters."""
    texts = ["".join(message["content"] for message in own) for own in completions]
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in texts]


def make_module(case: dict[str, Any], engine: Any) -> Any:
    """An algorithm with a tool and an environment; in brief cases with the environment alone."""
    brief = case.get("brief", False)
    register_chance_calls(name_of=(lambda number: "add") if brief else add_or_double)
    cls = {"GRPO": GRPO, "GROUP PPO": GroupPPO}[case.get("algorithm", "GRPO")]
    return cls(
        ChancePolicy(eos_token_id=1),
        share_of_letters,
        tools=None if brief else [double],
        environment_factory=Tally,
        num_generations=3,
        num_mini_batches=2,
        sampling=SamplingConfig(max_new_tokens=30, stop_token_ids=STOPS),
        optimizer=OptimizerConfig(learning_rate=1e-2, eps=1e-4),
        engine=engine,
        sharing={"verify": False},
        episodes=LIMITS,
    )


def make_data(case: dict[str, Any]) -> PromptDataModule:
    """Batches of five prompts, in order: every second one is sampled by rank 1, which has none in validation."""
    rows = tally_rows(15, brief=lambda number: bool(case.get("brief")) and number % 5 % 2 == 1)
    if "unfit" in case:
        rows[case["unfit"]]["start"] = None
    return PromptDataModule(rows, tally_rows(1), batch_size=5, shuffle=False)


def run(rank: int, folder: Path, case: dict[str, Any]) -> None:
    """Train two batches of rollouts, four steps, and validate; write what came of it."""
    faults = {(method, call): fault for method, call, fault in case.get("faults", {}).get(str(rank), ())}
    engine: Any = CopiedPolicyEngine(faults=faults) if case.get("copied") else HFRolloutEngine()
    record, error = Record(), None
    options: dict[str, Any] = {"enable_checkpointing": False, "val_check_interval": 4}
    precision = "32-true" if case["strategy"] == "fsdp2" else "64-true"  # which FSDP2 does not support
    trainer = make_trainer(folder, case["strategy"], [record], max_steps=4, precision=precision, **options)
    module = make_module(case, engine)
    try:
        trainer.fit(module, make_data(case))
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    found = {name: getattr(record, name) for name in ("groups", "gradients", "weights", "restarts", "validation")}
    found |= {"gathers": [record.gathers, record.greatest_depth]}
    counts = {"calls": getattr(engine, "calls", {}).get("generate"), "environments": Tally.made}
    torch.save({**found, **counts, "error": error, "brief": case.get("brief", False)}, folder / f"rank{rank}.pt")


def main(folder: Path, cases: dict[str, Any]) -> None:
    """Run cases, each within a time limit."""
    for name, case in cases.items():
        own = folder / name
        own.mkdir()
        pids = fork_ranks(case["strategy"], lambda rank, own=own, case=case: run(rank, own, case), own / "log.txt")
        codes = wait_for(pids, TIME_LIMIT)
        if any(codes):
            sys.exit(f"{name} ended with {codes}:\n{(own / 'log.txt').read_text()[-4000:]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
