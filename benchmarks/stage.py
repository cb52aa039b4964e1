"""What a stage of measurements on a GPU runs on: its device, its rows of results, and what it does about failures.

`dry` runs the same code on a CPU with tiny shapes.
"""

from __future__ import annotations

import argparse
import gc
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Case
from benchmarks.measure import Conditions, now
from benchmarks.methods import missing
from benchmarks.options import write_json
from pl_grouprl.models.kernels import apply_kernels

TINY = {
    "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 96, "vocabulary": 500,
    "device": "cpu",
}  # fmt: skip
"""Sizes of every model of a dry run."""

PAD, END, FIRST_WORD = 0, 1, 5
"""Token ids. Random tokens begin at `FIRST_WORD`, so no prompt or recorded rollout contains a special one."""


@dataclass
class Stage:
    """What a stage runs on, and its results so far.

    Attributes:
        dry: Whether shapes are tiny and the device is the CPU.
        output: Where to write the JSON, without suffix; None prints only.
        rows: One per measurement: `seconds_in`, the seconds since the stage began, and what was measured; `failed` and
            `error`, or `missing` for an optional package, where nothing was.
    """

    dry: bool = False
    output: Path | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.device = "cpu" if self.dry else "cuda"
        self.conditions = Conditions.here(self.device, "wall")

    @classmethod
    def begin(cls, options: argparse.Namespace) -> Stage:
        """The stage of a command line with `--dry-run` and `--output`; prints the conditions.

        Raises:
            SystemExit: If there is no GPU for it.
        """
        if not options.dry_run and not torch.cuda.is_available():
            raise SystemExit("this benchmark needs a CUDA device and there is none; use --dry-run.")
        stage = cls(options.dry_run, options.output)
        print(f"conditions: {stage.conditions}", flush=True)
        return stage

    def finish(self) -> dict[str, Any]:
        """All rows.

        Raises:
            SystemExit: If a measurement failed.
        """
        if failed := [row["label"] for row in self.rows if "failed" in row]:
            raise SystemExit(f"failed: {', '.join(failed)}")
        return {"rows": self.rows}

    def add(self, **row: Any) -> None:
        """Print a row and write all of them."""
        self.rows.append({"seconds_in": round(time.monotonic() - self.started, 1), **row})
        shown = {name: f"{value:.5g}" if isinstance(value, float) else value for name, value in row.items()}
        print(", ".join(f"{name} {value}" for name, value in shown.items()), flush=True)
        write_json(self.output, self.conditions, {"rows": self.rows})

    def measure(
        self, label: str, function: Callable[..., Any], *args: Any, needs: Sequence[str] = (), **kw: Any
    ) -> Any:
        """Call a function that adds rows, and go on if it fails or a package is missing; None then."""
        for package in needs:
            if note := missing(package, package.replace("_", "-")):
                self.add(label=label, missing=note)
                return None
        if not self.dry:
            torch.cuda.reset_peak_memory_stats()
        result = None
        try:
            result = function(*args, **kw)
        except Exception as error:  # whatever it is, the next measurement may work
            where = traceback.format_exc().splitlines()[-12:]
            self.add(label=label, failed=type(error).__name__, error=str(error)[:500], where=where)
        gc.collect()
        if not self.dry:
            torch.cuda.empty_cache()
        return result

    def pick(self, real: Any, tiny: Any) -> Any:
        """The second value in a dry run."""
        return tiny if self.dry else real

    def case(self, case: Case, **changes: Any) -> Case:
        """A case with changes, and in a dry run with the sizes of a tiny model."""
        return replace(case, **changes | (TINY if self.dry else {}))

    def peak_gib(self) -> float | None:
        """Peak of the memory that tensors took during this measurement; None on a CPU."""
        return None if self.dry else torch.cuda.max_memory_allocated() / 2**30


def seconds_of(function: Callable[[], Any], times: int = 1) -> float:
    """Mean seconds of a call, the GPU's work included."""
    start = now("wall")
    for _ in range(times):
        function()
    return (now("wall") - start) / times


def liger_layers(model: Any) -> None:
    """Let a model run liger-kernel's layers, as `kernels="liger"` of a policy does; nothing on a CPU."""
    if model.device.type == "cuda":
        apply_kernels(model, "liger")
