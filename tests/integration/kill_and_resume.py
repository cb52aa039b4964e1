"""kill -9 at random moments, also inside saves; then resume, and compare with the run that was never disturbed.

    python tests/integration/kill_and_resume.py --runs 20 --strategy single

Half of the runs are killed after a random time, the others at a random change of the file system within a random save.
All ranks die. The run goes on from the newest complete checkpoint, if there is one, as `--ckpt_path last` finds it.
Weights, moments, counters and random numbers of all ranks must end bit-identical. Exit code 0: all did.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

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
    wait_for,
)
from lightning.pytorch import Callback

from pl_grouprl.utilities import checkpoint_files
from pl_grouprl.utilities.checkpoint_files import newest_complete, settle


class Begun(Callback):
    """Tells the parent that the training has begun."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, *args):
        self.path.touch()


def die_in_a_save(number: int) -> None:
    """Kill this process at its n-th change of the file system by saves."""
    count = 0

    def counting(function):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    os.replace, os.fsync, shutil.rmtree = counting(os.replace), counting(os.fsync), counting(shutil.rmtree)
    checkpoint_files._describe = counting(checkpoint_files._describe)


def train(
    folder: Path, strategy: str, rank: int, algorithm: str, change: int = 0, checkpoint: Path | None = None
) -> None:
    """One rank of a run; writes its final state."""
    if change and rank == 0:
        die_in_a_save(change)
    module = make_module(algorithm)
    trainer = make_trainer(folder, strategy, [checkpointing(folder), Begun(folder / f"begun-{rank}")])
    trainer.fit(module, make_data(), ckpt_path=checkpoint, weights_only=True)
    torch.save(final_state(trainer, module), folder / f"final-{rank}.pt")


def start(folder: Path, strategy: str, algorithm: str, change: int = 0, checkpoint: Path | None = None) -> list[int]:
    """Fork the ranks of a run."""
    return fork_ranks(
        strategy, lambda rank: train(folder, strategy, rank, algorithm, change, checkpoint), folder / "log.txt"
    )


def finish(folder: Path, pids: list[int], ranks: int) -> list[dict]:
    """Wait for the end of a run; its final states."""
    codes = wait_for(pids)
    if any(codes):
        raise RuntimeError(f"exit codes {codes}: " + (folder / "log.txt").read_text()[-3000:])
    return [torch.load(folder / f"final-{rank}.pt", weights_only=True) for rank in range(ranks)]


def newest(folder: Path) -> Path | None:
    """As `--ckpt_path last` finds it; a torn one under its own name would be a fault."""
    settle(folder)
    path, torn = newest_complete(folder.glob("*.ckpt"))
    if torn:
        raise RuntimeError(f"torn checkpoints: {torn}")
    return path


def main() -> int:
    """Run it all; the number of runs that did not end as the undisturbed one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", choices=RANKS, default="single")
    parser.add_argument("--algorithm", choices=("grpo", "group_ppo"), default="group_ppo")
    options = parser.parse_args()
    draw, ranks = random.Random(options.seed), RANKS[options.strategy]
    root = Path(tempfile.mkdtemp(prefix="kill_and_resume-"))
    if Path("/dev/shm").is_dir():
        os.environ["TMPDIR"] = tempfile.tempdir = "/dev/shm"
    whole = root / "whole"
    whole.mkdir()
    pids = start(whole, options.strategy, options.algorithm)
    while not (whole / "begun-0").exists():
        time.sleep(0.001)
    begun = time.monotonic()
    expected = finish(whole, pids, ranks)
    seconds = time.monotonic() - begun
    print(f"{options.strategy}, {options.algorithm}: undisturbed {seconds:.1f} s", flush=True)
    wrong = 0
    for number in range(options.runs):
        folder = root / str(number)
        folder.mkdir()
        change = draw.randint(1, 150) if number % 2 else 0
        pids = start(folder, options.strategy, options.algorithm, change)
        if change:
            while os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                time.sleep(0.001)
            moment = f"change {change} of the file system"
        else:
            while not (folder / "begun-0").exists():
                time.sleep(0.001)
            after = draw.uniform(0, 0.9 * seconds)
            time.sleep(after)
            moment = f"{after:.2f} s"
        kill(pids)
        codes = wait_for(pids)
        found = newest(folder)
        end = finish(folder, start(folder, options.strategy, options.algorithm, checkpoint=found), ranks)
        if found is not None and checkpoint_files.about(found)["step"] == expected[0]["counters"][-1]:
            for left, right in zip(expected, end, strict=True):
                # Killed after the last step: nothing is trained any more, so no random numbers go on.
                right |= {"random": left["random"], "counters": left["counters"]}
        equal = all(map(same, expected, end))
        wrong += not equal
        where = "the start" if found is None else found.name
        print(f"{number}: killed at {moment} {codes}, resumed from {where}: {'same' if equal else 'OTHER'}", flush=True)
        shutil.rmtree(folder)
    print(f"{options.runs - wrong} of {options.runs} runs end bit-identical")
    shutil.rmtree(root)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
