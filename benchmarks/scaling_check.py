"""Compares a predicted step of two processes with a measured one: `plan --gpus` on a CPU, one thread each.

GRPO with a reference model, random weights whose rollouts end at random. One process with half of the prompts and with
all of them gives the rates; the two processes share the prompts. README.md says how to read the table.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.cases import Case
from benchmarks.measure import CLOCKS, Conditions
from benchmarks.options import positive, write_json
from benchmarks.step_parts import StepParts
from benchmarks.vs_trl import Run, reward
from pl_grouprl import GRPO, OptimizerConfig, PromptDataModule, SamplingConfig
from pl_grouprl.planning.scaling import Lengths, StepModel

RANKS = 2
MODEL = Case(
    "two processes", prefix=64, rollout=192, groups=8, hidden=256, layers=6, heads=8, kv_heads=4, head_dim=32,
    intermediate=768, vocabulary=33,
)  # fmt: skip
"""Each of its 33 tokens is about as probable as the others, and one of them ends a rollout."""

UPDATE = ("forward", "backward", "optimizer")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one process twice and two processes once, print, and write JSON."""
    options = parse(arguments)
    conditions = Conditions.here("cpu", options.clock)
    half, alone, both = (
        run(ranks, groups, options) for ranks, groups in ((1, MODEL.groups // 2), (1, MODEL.groups), (2, MODEL.groups))
    )
    step = [[record["longest"], record["tokens"]] for record in (*half[0], *alone[0])]
    seconds = torch.tensor([record["rollouts"] for record in (*half[0], *alone[0])], dtype=torch.float64)
    floor, sequence = torch.linalg.lstsq(torch.tensor(step, dtype=torch.float64), seconds[:, None]).solution[:, 0]
    fitted = torch.tensor(step, dtype=torch.float64) @ torch.stack([floor, sequence])
    ours = parts_of(alone[0])
    lengths = Lengths.of_mean(mean(length for record in alone[0] for length in record["lengths"]), MODEL.rollout)
    floor, sequence = float(floor), float(sequence)
    model = StepModel(MODEL.groups, MODEL.group_size, lengths, floor + sequence, sequence, ours[1], ours[2])
    times = model.predict(RANKS)
    found = {
        "decode_floor": floor,
        "decode_sequence": sequence,
        "worst_fit": float(((fitted - seconds) / seconds).abs().max()),
        "mean_length": lengths.mean,
        "longest_predicted": lengths.longest(MODEL.groups * MODEL.group_size),
        "longest": mean(max(ranks) for ranks in zip(*([r["longest"] for r in steps] for steps in both), strict=True)),
        "one process": ours,
        "two, predicted": [times.rollouts + times.longest, times.scoring, times.update],
        **{f"two, rank {rank}": parts_of(steps) for rank, steps in enumerate(both)},
    }
    report(found)
    told = {"steps": options.steps, "ranks": RANKS}
    write_json(options.output, conditions, {"model": asdict(MODEL), "options": told, **found})


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=positive, default=7, help="of each run, after one that warms up (default: 7)")
    parser.add_argument("--clock", choices=list(CLOCKS), default="cpu", help="cpu: each process's own processor time")
    parser.add_argument("--output", type=Path, help="write OUTPUT.json")
    return parser.parse_args(arguments)


def run(ranks: int, groups: int, options: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """Train in new processes; returns what each rank recorded of each step."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, (ranks, groups, options, port, folder), nprocs=ranks)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]


@dataclass(frozen=True)
class Float32(Run):
    """A run with float32 weights."""

    def load(self, dtype: Any = None) -> Any:
        """Return a new model."""
        return super().load(dtype or "float32")


class Sampled(Callback):
    """Records the lengths of each step's completions on this rank."""

    def __init__(self) -> None:
        self.lengths: list[list[int]] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record a step."""
        groups = pl_module.last_rollouts.groups
        self.lengths.append([len(rollout.token_ids) for group in groups for rollout in group.rollouts])


def train(rank: int, ranks: int, groups: int, options: argparse.Namespace, port: int, folder: str) -> None:
    """Train on one rank, and write down its steps."""
    torch.set_num_threads(1)
    if ranks > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
        os.environ |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    source = Float32(MODEL)
    sampling, optimizer = SamplingConfig(max_new_tokens=MODEL.rollout), OptimizerConfig(learning_rate=1e-9)
    module = GRPO(
        source, reward, num_generations=MODEL.group_size, sampling=sampling, optimizer=optimizer, beta=0.1,
        sharing={"verify": False},
    )  # fmt: skip
    parts, sampled = StepParts(options.clock), Sampled()
    trainer = Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", max_steps=options.steps + 1,
        max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, callbacks=[parts, sampled],
    )  # fmt: skip
    trainer.fit(module, PromptDataModule(source.prompts(), batch_size=groups, shuffle=False))
    records = [
        {
            "rollouts": step["rollouts"],
            "scoring": step["scoring"],
            "update": sum(step[part] for part in UPDATE),
            "lengths": lengths,
            "longest": max(lengths),
            "tokens": sum(lengths),
        }
        for step, lengths in zip(parts.steps, sampled.lengths, strict=True)
    ]
    (Path(folder) / f"{rank}.json").write_text(json.dumps(records[1:]))


def parts_of(records: Sequence[dict[str, Any]]) -> list[float]:
    """Mean seconds of rollouts, scoring and update."""
    return [mean(record[part] for record in records) for part in ("rollouts", "scoring", "update")]


def report(found: dict[str, Any]) -> None:
    """Print the rates and the table."""
    print(
        f"a decoding step: {1e3 * found['decode_floor']:.1f} ms + {1e3 * found['decode_sequence']:.2f} ms per "
        f"sequence, off by at most {100 * found['worst_fit']:.0f} % in each rollout; {found['mean_length']:.0f} tokens "
        f"on average, the longest of {MODEL.groups * MODEL.group_size} {found['longest_predicted']:.0f} by prediction, "
        f"{found['longest']:.0f} measured\n\n"
        "                 rollouts  scoring   update      sum   shares"
    )
    for name, parts in found.items():
        if isinstance(parts, list):
            total = sum(parts)
            shares = ", ".join(f"{100 * part / total:.0f}" for part in parts)
            print(f"{name:15} {parts[0]:9.2f}{parts[1]:9.2f}{parts[2]:9.2f}{total:9.2f}   {shares} %")
