"""One table: every strategy trains like a single process, resumes exactly, and exports what it trained.

    python tests/strategies/table.py            # or: make strategies

Each row trains ten steps (see table_run.py), then goes on from its own checkpoint of step five in new processes. Its
losses are compared with those of one process that cuts nothing; the weights of the resumed run with those of the row's
undisturbed run, on the CPU to the last bit; and the exported policy with the one that was trained. The module then runs
again, to validate, and a new process validates the last checkpoint alone: both as the last validation of the training.
Rows that need a GPU say so where there is none. The command exits with 1 if a row fails; a failed row tells its error
below the table.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from table_train import RunFailedError, train

ALGORITHMS = ("GRPO", "GROUP PPO")
LOSS_TOLERANCE = 1e-4
"""Of float32, over ten steps that each build on the one before."""
RESUME_TOLERANCE = {"cpu": 0.0, "gpu": 1e-6}
"""Of float32 weights; kernels on a GPU add up in no fixed order."""
LOGIT_TOLERANCE = {"cpu": 1e-5, "gpu": 1e-4}
"""Of float32 logits up to 4, by where the policy was trained; the exported one is looked at on the CPU.

One process with all threads rounds other sums than two with one each: by 2e-6 on some CPUs.
"""
CUT = {"max_tokens_per_micro_batch": 64}
"""Smaller than the largest groups, see table_run.py: several passes a step, and groups that are split."""
CUT_EPISODES = {"max_tokens_per_micro_batch": 160}
"""The same for episodes, which are longer."""


@dataclass(frozen=True)
class Row:
    """What is trained, and how.

    Attributes:
        name: As the table shows it.
        algorithm: `GRPO`, `GROUP PPO`, `Distillation`, or `GRPO tools`, whose rollouts are episodes with a tool and an
            environment.
        strategy: Name of a fragment in configs/strategy; None is a single process.
        devices: Processes, or GPUs.
        accelerator: `cpu` or `gpu`.
        options: Of the module, beside those of table_run.py.
    """

    name: str
    algorithm: str
    strategy: str | None = None
    devices: int = 1
    accelerator: str = "cpu"
    options: dict[str, Any] = field(default_factory=lambda: dict(CUT))


@dataclass
class Result:
    """What came of a row.

    Attributes:
        row: The row.
        status: `ok`, `failed` or `not run here`.
        seconds: Of all its processes, imports included.
        loss_difference: Largest difference to the reference, over the steps.
        resume_difference: Largest difference of a weight.
        logit_difference: Between the exported policy, loaded anew, and the trained one.
        evaluation_difference: Of the reward in a second run and in one that only evaluates to that in training.
        passes: Forward and backward passes of the steps, together.
        splits: Groups that were split, in all steps together.
        rollouts: Batches of prompts that were sampled.
        validations: Validations that ran.
        error: What is wrong; empty where nothing is.
    """

    row: Row
    status: str = "ok"
    seconds: float = 0.0
    loss_difference: float | None = None
    resume_difference: float | None = None
    logit_difference: float | None = None
    evaluation_difference: float | None = None
    passes: int = 0
    splits: int = 0
    rollouts: int = 0
    validations: int = 0
    error: str = ""


def table_rows(num_gpus: int) -> list[Row]:
    """All rows; those of the GPU use at most two, and one where there is no more."""
    # The budget is one of each rank, and a row has two.
    ulysses = {
        "max_tokens_per_micro_batch": CUT["max_tokens_per_micro_batch"] // 2,
        "sharing": {"sequence_parallel_size": 2},
    }
    rows = []
    for algorithm in ALGORITHMS:
        rows += [
            Row("single", algorithm),
            Row("ddp x2", algorithm, "ddp", 2),
            Row("fsdp2 x2", algorithm, "fsdp2", 2),
            Row("fsdp1 x2, on CPU", algorithm, "fsdp", 2, options={}),  # which differentiates a step in one pass
            Row("ZeRO-2 x2, on CPU", algorithm, "deepspeed_z2", 2),
            Row("ZeRO-3 x2, on CPU", algorithm, "deepspeed_z3", 2),
            Row("ulysses x2", algorithm, "fsdp2", 2, options=ulysses),
        ]
    rows += [
        Row("ddp x2", "GRPO tools", "ddp", 2, options=CUT_EPISODES),
        Row("fsdp2 x2", "GRPO tools", "fsdp2", 2, options=CUT_EPISODES),
        Row("ZeRO-2 x2, on CPU", "GRPO tools", "deepspeed_z2", 2, options=CUT_EPISODES),
        Row("ZeRO-3 x2, on CPU", "GRPO tools", "deepspeed_z3", 2, options=CUT_EPISODES),
    ]
    rows += [
        Row("ddp x2", "Distillation", "ddp", 2),
        Row("fsdp2 x2", "Distillation", "fsdp2", 2),
        Row("fsdp1 x2, on CPU", "Distillation", "fsdp", 2, options={}),
        Row("ZeRO-2 x2, on CPU", "Distillation", "deepspeed_z2", 2),
        Row("ZeRO-3 x2, on CPU", "Distillation", "deepspeed_z3", 2),
    ]
    fragments = ("ddp", "fsdp2", "fsdp", "deepspeed_z2", "deepspeed_z3", "deepspeed_z3_offload")
    devices = min(max(num_gpus, 1), 2)
    for algorithm in ALGORITHMS:
        for name in fragments:
            options = {} if name == "fsdp" else CUT
            rows.append(Row(f"{name}.yaml, GPU", algorithm, name, devices, "gpu", options))
    return rows


def reference_of(row: Row) -> Row:
    """The same run in one process that trains each mini-batch in one pass."""
    return Row("reference", row.algorithm, accelerator=row.accelerator, options={})


class Table:
    """Runs rows in a folder; the runs that others are compared with are trained once.

    Args:
        folder: Where runs leave their files.
        time_limit: Seconds for each of a row's three runs.
    """

    def __init__(self, folder: Path, time_limit: float = 240.0) -> None:
        self.folder = folder
        self.time_limit = time_limit
        self._references: dict[str, Path] = {}

    def run(self, row: Row) -> Result:
        """Train a row twice and compare. Never raises for what a row does."""
        start, result = time.perf_counter(), Result(row)
        try:
            reference = self._reference(row)
            start = time.perf_counter()
            whole, resumed, evaluated = (self._folder(row, kind) for kind in ("whole", "resumed", "evaluated"))
            train(whole, asdict(row), self.time_limit)
            train(resumed, asdict(row), self.time_limit, checkpoint=whole / "step=5.ckpt")
            train(evaluated, asdict(row), self.time_limit, checkpoint=whole / "step=10.ckpt", evaluate=True)
            compare(result, reference, whole, resumed, evaluated)
        except (RunFailedError, OSError, KeyError, ValueError) as failure:
            result.status, result.error = "failed", str(failure) or repr(failure)
        result.seconds = time.perf_counter() - start
        return result

    def _reference(self, row: Row) -> Path:
        key = f"{row.algorithm}, {row.accelerator}"
        if key not in self._references:
            folder = self._folder(reference_of(row), row.accelerator)
            train(folder, asdict(reference_of(row)), self.time_limit)
            self._references[key] = folder
        return self._references[key]

    def _folder(self, row: Row, kind: str) -> Path:
        name = f"{row.algorithm} {row.name} {kind}".replace(" ", "_").replace(",", "")
        return self.folder / name


def compare(result: Result, reference: Path, whole: Path, resumed: Path, evaluated: Path) -> None:
    """Fill in what the runs in four folders differ by, and whether that is too much."""
    import torch

    runs = {path: json.loads((path / "run.json").read_text()) for path in (reference, whole)}
    losses = [{"loss": torch.tensor([step["loss"] for step in run["steps"]])} for run in runs.values()]
    result.passes, result.splits = sum(runs[whole]["passes"]), sum(runs[whole]["splits"])
    result.rollouts, result.validations = len(runs[whole]["rollouts"]), len(runs[whole]["validations"])
    result.loss_difference = largest_difference(*losses)
    weights = [torch.load(path / "weights.pt", weights_only=True) for path in (whole, resumed)]
    result.resume_difference = largest_difference(*weights)
    result.logit_difference = largest_difference(
        {"logits": torch.load(whole / "logits.pt", weights_only=True)}, {"logits": exported_logits(whole / "policy")}
    )
    rewards = [json.loads((path / "evaluation.json").read_text()) for path in (whole, evaluated)]
    result.evaluation_difference = max(abs(reward - runs[whole]["validations"][-1]) for reward in rewards)
    resume_tolerance = RESUME_TOLERANCE[result.row.accelerator]
    logit_tolerance = LOGIT_TOLERANCE[result.row.accelerator]
    wrong = {
        f"losses differ by {result.loss_difference:.1e}": not result.loss_difference <= LOSS_TOLERANCE,
        f"resumed weights differ by {result.resume_difference:.1e}": not result.resume_difference <= resume_tolerance,
        f"logits of the export differ by {result.logit_difference:.1e}": not result.logit_difference <= logit_tolerance,
        f"later evaluations differ by {result.evaluation_difference:.1e}": not result.evaluation_difference <= 1e-6,
        f"{result.passes} passes in 10 steps": bool(result.row.options) and result.passes < 20,
        "no group was split": bool(result.row.options) and result.splits == 0,
        f"{result.rollouts} rollouts in place of 5": result.rollouts != 5,
        f"{result.validations} validations in place of 2": result.validations != 2,
    }
    result.error = "; ".join(text for text, is_wrong in wrong.items() if is_wrong)
    result.status = "failed" if result.error else "ok"


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Largest absolute difference of tensors of the same names; NaN where one is."""
    if one.keys() != other.keys():
        raise ValueError(f"other tensors than before: {sorted(one.keys() ^ other.keys())[:5]}")
    import torch

    return float(torch.stack([(one[name] - other[name]).abs().max() for name in one]).max())


def exported_logits(policy: Path) -> Any:
    """What the exported policy computes on the tokens that table_run.py shows the trained one."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    from table_run import PROBE

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(policy)(torch.tensor([PROBE])).logits


COLUMNS = (
    *("strategy", "algorithm", "loss difference", "resume difference", "export", "evaluation"),
    *("passes", "splits", "rollouts", "validations", "s"),
)
WIDTHS = (28, 14, 17, 19, 9, 12, 8, 8, 10, 13, 5)


def cells(result: Result) -> list[str]:
    """A line of the table."""
    row = result.row
    if result.status == "not run here":
        return [row.name, row.algorithm, "not run here"]
    numbers = (
        *(result.loss_difference, result.resume_difference),
        *(result.logit_difference, result.evaluation_difference),
    )
    shown = ["-" if number is None else f"{number:.1e}" if number else "0" for number in numbers]
    counts = [str(n) for n in (result.passes, result.splits, result.rollouts, result.validations)]
    counts.append(f"{result.seconds:.0f}")
    return [row.name, row.algorithm, *shown, *counts, *(["FAILED"] if result.status == "failed" else [])]


def line(texts: Sequence[str]) -> str:
    """Columns of equal width."""
    return "".join(text.ljust(width) for text, width in zip(texts, (*WIDTHS, 0), strict=False)).rstrip()


def run_rows(rows: Sequence[Row], table: Table, num_gpus: int) -> Iterator[Result]:
    """Run rows one after another; those for which there is no GPU are not run."""
    for row in rows:
        yield Result(row, "not run here") if row.accelerator == "gpu" and not num_gpus else table.run(row)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--only", default="", help="run rows whose name or algorithm contains this")
    parser.add_argument("--time-limit", type=float, default=240.0, help="seconds for each of a row's three runs")
    parser.add_argument("--keep", type=Path, help="an empty folder for the files of the runs")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `train`, which ends its processes
    num_gpus = torch.cuda.device_count()
    rows = [row for row in table_rows(num_gpus) if options.only in f"{row.name} {row.algorithm}"]
    results = []
    with tempfile.TemporaryDirectory(prefix="strategies_") as scratch:
        print(line(COLUMNS), flush=True)
        for result in run_rows(rows, Table(options.keep or Path(scratch), options.time_limit), num_gpus):
            print(line(cells(result)), flush=True)
            results.append(result)
    failed = [result for result in results if result.status == "failed"]
    for result in failed:
        print(f"\n{result.row.name}, {result.row.algorithm}: {result.error}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
