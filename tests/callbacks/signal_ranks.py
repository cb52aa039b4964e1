"""Run by test_stop_on_signal.py: runs that get a signal at one moment or another; prints what came of them as JSON.

Each case forks its ranks, sends signals, and, if there is a checkpoint, goes on from it and compares with the
undisturbed run.
"""

import functools
import json
import os
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
    make_data,
    make_module,
    make_trainer,
    noisy_reward,
    same,
    wait_for,
)
from lightning.pytorch import Callback

from pl_grouprl.algorithms import GRPO
from pl_grouprl.utilities import checkpoint_files

CASES = json.loads(sys.argv[1])
"""Of each: strategy, moment (rollout, reward, update, save, validation, last validation, export), which rank gets it
(-1: all), signal.
"""
AFTER_TRAINING = {"last validation": "on_validation_end", "export": "on_train_end"}


class At:
    """Sends this process a signal when a moment comes for the third time."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        if self.count == 3:
            os.kill(os.getpid(), self.signum)
            time.sleep(0.01)  # the handler runs


def wrap(function, moment):
    @functools.wraps(function)
    def call(*args, **kwargs):
        moment()
        return function(*args, **kwargs)

    return call


def train(folder, strategy, rank, moment=None, signum=0, checkpoint=None):
    """One rank of a run of few steps; writes its final state if it ends by itself."""
    at = At(signum)
    reward, extra = noisy_reward, []
    if moment == "reward":
        reward = wrap(noisy_reward, at)
    elif moment == "rollout":
        GRPO.generate = wrap(GRPO.generate, at)
    elif moment == "update":
        GRPO.on_before_optimizer_step = wrap(GRPO.on_before_optimizer_step, at)
    elif moment == "save":
        checkpoint_files._describe = wrap(checkpoint_files._describe, at)
    elif moment == "validation":
        extra = [AtValidation(signum)]
    elif moment is not None:
        extra = [AfterTraining(signum, AFTER_TRAINING[moment])]
    module = make_module("grpo", reward)
    trainer = make_trainer(folder, strategy, [checkpointing(folder), *extra], max_steps=12, val_check_interval=4)
    trainer.fit(module, make_data(), ckpt_path=checkpoint, weights_only=True)
    torch.save(final_state(trainer, module), folder / f"final-{rank}.pt")


class AtValidation(Callback):
    """Sends a signal when the validation begins."""

    def __init__(self, signum):
        self.signum = signum

    def on_validation_start(self, trainer, pl_module):
        os.kill(os.getpid(), self.signum)


class AfterTraining(Callback):
    """Sends a signal in a hook that comes after the last batch."""

    def __init__(self, signum, hook):
        self.signum = signum
        setattr(self, hook, self.send)

    def send(self, trainer, *args):
        if trainer.global_step == 12:
            os.kill(os.getpid(), self.signum)


def final(folder, strategy):
    return [torch.load(folder / f"final-{rank}.pt", weights_only=True) for rank in range(RANKS[strategy])]


def main():
    """Run all cases; a line of JSON for each."""
    root = Path(tempfile.mkdtemp())
    whole = {}
    for strategy, moment, receiver, name in CASES:
        if strategy not in whole:
            folder = root / strategy
            folder.mkdir()
            codes = wait_for(fork_ranks(strategy, lambda rank: train(folder, strategy, rank), folder / "log.txt"))  # noqa: B023
            assert not any(codes), (folder / "log.txt").read_text()[-2000:]
            whole[strategy] = final(folder, strategy)
        folder = root / f"{strategy}-{moment}-{receiver}-{name}"
        folder.mkdir()
        log = folder / "log.txt"

        def disturbed(rank):
            hit = receiver in (rank, -1)  # noqa: B023
            train(folder, strategy, rank, moment if hit else None, getattr(signal, name))  # noqa: B023

        codes = wait_for(fork_ranks(strategy, disturbed, log))
        last = folder / "last.ckpt"
        result = {"case": [strategy, moment, receiver, name], "codes": codes, "saved": last.exists()}
        if last.exists():
            result["flaw"] = checkpoint_files.corruption_reason(last)
            again = fork_ranks(strategy, lambda rank: train(folder, strategy, rank, checkpoint=last), log)  # noqa: B023
            result["resumed"] = wait_for(again)
            result["step"] = checkpoint_files.read_manifest(last)["step"]
            if not any(result["resumed"]):
                end = final(folder, strategy)
                if moment in AFTER_TRAINING:  # nothing was left to train, so no random numbers went on
                    for expected, own in zip(whole[strategy], end, strict=True):
                        own["random"] = expected["random"]
                result["same"] = all(map(same, whole[strategy], end))
        if not result.get("same"):
            result["log"] = log.read_text()[-2000:]
        print(json.dumps(result), flush=True)


main()
