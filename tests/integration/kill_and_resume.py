"""kill -9 at random moments of every phase; then resume, and compare with the run that was never disturbed.

    python tests/integration/kill_and_resume.py --runs 20 --strategy single [--tools] [--ahead]

Runs are killed in turn after a random time, at a random change of the file system within a save, in a rollout, in a
reward call, and in an update; with tools also in a call of a tool, and while the second turns of episodes are sampled.
With several ranks, a random one dies first and the others follow. The run resumes from
the newest complete checkpoint, if there is one, as `--ckpt_path last` finds it. Weights, moments, counters and random
numbers of all ranks must end bit-identical. Exit code 0: all did.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import torch
from forked_runs import (
    RANKS,
    checkpointing,
    final_state,
    fork_ranks,
    kill,
    make_data,
    make_module,
    make_trainer,
    same,
    tool_options,
    wait_for,
)
from helpers.chance_episodes import Tally
from lightning.pytorch import Callback

from pl_grouprl.training.sampler import EngineRounds
from pl_grouprl.utilities import checkpoint_files
from pl_grouprl.utilities.checkpoint_files import finish_interrupted, newest_complete

PHASES = {"time": 0, "save": 110, "rollout": 6, "reward": 4, "update": 16}
"""Where a run is killed, and the largest number of the call in which it is; `time` counts none."""
TOOL_PHASES = {"tool": 10, "turn": 5, **PHASES}


@dataclass(frozen=True)
class Variant:
    """What is trained.

    Attributes:
        strategy: One of `RANKS`.
        algorithm: `grpo` or `group_ppo`.
        tools: Whether rollouts are episodes with a tool and an environment.
        ahead: Whether rollouts are sampled during the updates.
        epochs: Each of two batches of rollouts, and a validation.
    """

    strategy: str
    algorithm: str
    tools: bool = False
    ahead: bool = False
    epochs: int = 2

    @property
    def phases(self) -> dict[str, int]:
        """Where it is killed."""
        return TOOL_PHASES if self.tools else PHASES

    def make_module(self) -> Any:
        """The module to train."""
        options = {"max_staleness": 1, "importance_sampling": {"mode": "token_truncate"}} if self.ahead else {}
        return make_module(self.algorithm, **(tool_options(**options) if self.tools else options))

    def __str__(self) -> str:
        words = [self.strategy, self.algorithm, "tools" * self.tools, "ahead" * self.ahead]
        return ", ".join(word for word in words if word)


class Begun(Callback):
    """Tells the parent that the training has begun."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, *args):
        self.path.touch()


@dataclass(frozen=True)
class Death:
    """Where a run dies.

    Attributes:
        phase: One of `PHASES` or `TOOL_PHASES`.
        number: In which call of the phase, from 1.
        delay: Seconds from the start of that call, or of the training.
        rank: Which rank dies first.
    """

    phase: str
    number: int = 0
    delay: float = 0.0
    rank: int = 0

    @classmethod
    def draw(cls, phase: str, draw: random.Random, ranks: int, seconds: float) -> Death:
        """A random one in a run of so many seconds."""
        if phase == "time":
            return cls(phase, delay=draw.uniform(0, 0.9 * seconds))
        rank = 0 if phase == "save" else draw.randrange(ranks)  # under DDP rank 0 alone writes
        return cls(phase, draw.randint(1, TOOL_PHASES[phase]), draw.uniform(0, 0.03), rank)

    def prepare(self, module: Any) -> None:
        """Make this process die there."""
        places: dict[str, list[tuple[Any, str]]] = {
            "time": [],
            "save": [(os, "replace"), (os, "fsync"), (shutil, "rmtree"), (checkpoint_files, "_describe")],
            "rollout": [(module, "generate")],
            "update": [(module, "training_step")],
            "reward": [(random, "random")],  # once in each call of the reward function
            "tool": [(Tally, "add")],
            "turn": [(EngineRounds, "sample")],
        }
        calls = 0

        def counting(function: Any) -> Any:
            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += self.phase != "turn" or args[1] == 1  # of a turn, counted from 0
                if calls == self.number:
                    self.strike()
                return function(*args, **kwargs)

            return call

        for owner, name in places[self.phase]:
            setattr(owner, name, counting(getattr(owner, name)))

    def strike(self) -> None:
        """Die at once, or within something that takes long."""
        if self.phase in ("rollout", "update", "turn"):
            threading.Timer(self.delay, die).start()
        else:
            die()


def die() -> None:
    """End this process so that no handler sees it."""
    os.kill(os.getpid(), signal.SIGKILL)


def train(
    folder: Path, variant: Variant, rank: int, death: Death | None = None, checkpoint: Path | None = None
) -> None:
    """One rank of a run; writes its final state."""
    module = variant.make_module()
    if death is not None and death.rank == rank:
        death.prepare(module)
    callbacks = [checkpointing(folder), Begun(folder / f"begun-{rank}")]
    trainer = make_trainer(folder, variant.strategy, callbacks, max_epochs=variant.epochs)
    trainer.fit(module, make_data(tools=variant.tools), ckpt_path=checkpoint, weights_only=True)
    torch.save(final_state(trainer, module), folder / f"final-{rank}.pt")


def start(folder: Path, variant: Variant, death: Death | None = None, checkpoint: Path | None = None) -> list[int]:
    """Fork the ranks of a run."""
    return fork_ranks(
        variant.strategy, lambda rank: train(folder, variant, rank, death, checkpoint), folder / "log.txt"
    )


def finish(folder: Path, pids: list[int], ranks: int) -> list[dict]:
    """Wait for the end of a run; its final states."""
    codes = wait_for(pids)
    if any(codes):
        raise RuntimeError(f"exit codes {codes}: " + (folder / "log.txt").read_text()[-3000:])
    return [torch.load(folder / f"final-{rank}.pt", weights_only=True) for rank in range(ranks)]


def newest(folder: Path) -> Path | None:
    """As `--ckpt_path last` finds it; a torn one under its own name would be a fault."""
    finish_interrupted(folder)
    path, torn = newest_complete(folder.glob("*.ckpt"))
    if torn:
        raise RuntimeError(f"torn checkpoints: {torn}")
    return path


def run_until_death(folder: Path, variant: Variant, death: Death) -> list[int]:
    """Start a run and let it die; the exit codes of its ranks."""
    pids = start(folder, variant, death)
    if death.phase == "time":
        while not (folder / "begun-0").exists():
            time.sleep(0.001)
        time.sleep(death.delay)
    else:
        while os.waitid(os.P_PID, pids[death.rank], os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.001)
    kill(pids)
    return wait_for(pids)


def ends_the_same(expected: list[dict], end: list[dict], found: Path | None) -> bool:
    """Whether a resumed run ended as the undisturbed one."""
    manifest = {} if found is None else checkpoint_files.read_manifest(found)
    if found is not None and not manifest:  # killed between the removal of a file's manifest and its replacement
        manifest["step"] = torch.load(found, weights_only=True)["global_step"]
    if manifest.get("step") == expected[0]["counters"][-1]:
        for left, right in zip(expected, end, strict=True):
            # Killed after the last step: nothing is trained any more, so no random numbers are drawn.
            right |= {"random": left["random"], "counters": left["counters"]}
    return all(map(same, expected, end))


def main() -> int:
    """Run it all; the number of runs that did not end as the undisturbed one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", choices=RANKS, default="single")
    parser.add_argument("--algorithm", choices=("grpo", "group_ppo"), default="group_ppo")
    parser.add_argument("--tools", action="store_true")
    parser.add_argument("--ahead", action="store_true")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    variant = Variant(options.strategy, options.algorithm, options.tools, options.ahead, options.epochs)
    draw, ranks = random.Random(options.seed), RANKS[options.strategy]
    root = Path(tempfile.mkdtemp(prefix="kill_and_resume-"))
    if Path("/dev/shm").is_dir():
        os.environ["TMPDIR"] = tempfile.tempdir = "/dev/shm"
    whole = root / "whole"
    whole.mkdir()
    pids = start(whole, variant)
    while not (whole / "begun-0").exists():
        time.sleep(0.001)
    begun = time.monotonic()
    expected = finish(whole, pids, ranks)
    seconds = time.monotonic() - begun
    print(f"{variant}: undisturbed {seconds:.1f} s", flush=True)
    wrong, killed = 0, Counter()
    for number in range(options.runs):
        folder = root / str(number)
        folder.mkdir()
        death = Death.draw(list(variant.phases)[number % len(variant.phases)], draw, ranks, seconds)
        codes = run_until_death(folder, variant, death)
        killed[death.phase] += codes[death.rank] == -signal.SIGKILL
        found = newest(folder)
        end = finish(folder, start(folder, variant, checkpoint=found), ranks)
        equal = ends_the_same(expected, end, found)
        wrong += not equal
        where = "the start" if found is None else found.name
        print(f"{number}: {death} {codes}, resumed from {where}: {'same' if equal else 'OTHER'}", flush=True)
        shutil.rmtree(folder)
    print("killed: " + ", ".join(f"{count} by {phase}" for phase, count in killed.items()))
    print(f"{options.runs - wrong} of {options.runs} runs end bit-identical")
    shutil.rmtree(root)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
