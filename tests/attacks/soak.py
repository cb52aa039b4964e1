"""A long run with everything enabled: does memory grow, and is anything left behind?

    python tests/attacks/soak.py --steps 300 [--tools threads | --tools worker]

Trains a tiny policy with a reward worker, or tools and an environment in threads or a worker, with validation,
checkpoints, loggers, tables, export and summary; reads this process's resident memory after each step, and fits a line
to the last two thirds. After the run, counts the threads, open files, processes and temporary files that it left. Exits
with 0 if memory grew by less than a MiB per 100 steps (two with tools) and nothing is left.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import numpy as np
from forked_runs import make_data, make_module, make_trainer, noisy_reward, tool_options
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from worker_rewards import length

from pl_grouprl.callbacks import CompletionsTable, ExportPolicy, RunSummary, SafeCheckpoint

LIMIT = 1.0
"""MiB per 100 steps."""
LIMIT_WITH_TOOLS = 2.0
"""The same with tools: the history of metrics, of which there are more, takes half a MiB per 100 steps."""
FEWEST_STEPS = 100
"""The growth of a shorter run is not meaningful, and not judged."""


class Memory(Callback):
    """Resident memory of this process after each step, in MiB."""

    def __init__(self) -> None:
        self.resident: list[float] = []

    def on_train_batch_end(self, *args):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.resident.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)

    def growth(self) -> float:
        """Slope of a line through the last two thirds, in MiB per 100 steps."""
        settled = self.resident[len(self.resident) // 3 :]
        return float(np.polyfit(range(len(settled)), settled, 1)[0]) * 100


def train(folder: Path, steps: int, tools: str | None = None) -> Memory:
    """Train a tiny policy with everything enabled, and with tools in `threads` or a `worker`."""
    memory = Memory()
    callbacks = [
        SafeCheckpoint(every_n_train_steps=5, save_last=True),
        CompletionsTable(every_n_steps=5),
        ExportPolicy(),
        RunSummary(),
        memory,
    ]
    loggers = [CSVLogger(folder, name="soak"), TensorBoardLogger(folder, name="soak")]
    if tools is None:
        module = make_module("grpo", length, reward_calls={"workers": 1, "timeout": 60.0})
    else:
        options = tool_options(episodes={"tool_timeout": 60.0, "tool_workers": int(tools == "worker")})
        module = make_module("grpo", noisy_reward, **options)
    trainer = make_trainer(
        folder, "single", callbacks, logger=loggers, max_epochs=-1, max_steps=steps, val_check_interval=5
    )
    trainer.fit(module, make_data(tools=tools is not None))
    return memory


def children() -> list[str]:
    """Child processes that still exist, zombies included."""
    own = str(os.getpid())
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, fields = status.read_text().rsplit(")", 1)
        except OSError:  # it has just ended
            continue
        if fields.split()[1] == own:
            found.append(name + ")")
    return found


def resources() -> dict[str, set[str]]:
    """The resources that exist now, by kind."""
    descriptors = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            descriptors[entry.name] = f"{entry.name} -> {os.readlink(entry)}"
        except OSError:  # the descriptor of this listing
            continue
    return {
        "threads": {thread.name for thread in threading.enumerate()},
        "open files": set(descriptors.values()),
        "processes": set(children()),
        "temporary files": {str(path) for path in Path(tempfile.gettempdir()).rglob("*")},
    }


def main() -> int:
    """Train and print the figures; returns 1 if memory grew or something is left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tools", choices=("threads", "worker"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, tempfile.TemporaryDirectory(prefix="soak-") as own:
        tempfile.tempdir = os.environ["TMPDIR"] = own
        train(
            Path(folder) / "first", min(20, options.steps), options.tools
        )  # so that what is loaded once does not count
        before = resources()
        memory = train(Path(folder) / "second", options.steps, options.tools)
        remains = {kind: sorted(now - before[kind]) for kind, now in resources().items()}
        tempfile.tempdir = None
    growth = memory.growth()
    counts = ", ".join(f"{len(names)} {kind}" for kind, names in remains.items())
    what = "" if options.tools is None else f" with tools in {options.tools}"
    print(f"{options.steps} steps{what}: memory grew by {growth:.2f} MiB per 100 steps; left: {counts}")
    for kind, names in remains.items():
        if names:
            print(f"  {kind}: {', '.join(names)}")
    limit = LIMIT if options.tools is None else LIMIT_WITH_TOOLS
    grew = growth >= limit and options.steps >= FEWEST_STEPS
    return int(grew or any(remains.values()))


if __name__ == "__main__":
    sys.exit(main())
