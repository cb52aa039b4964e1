"""Run by test_rank_watchdog.py: runs of two ranks of which one is lost, or only slow; prints what came of them as JSON.

All cases run at the same time, since they wait for most of it.
"""

import ctypes
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import lightning.pytorch as pl
import torch
from forked_runs import fork_ranks, kill, make_data, make_module, make_trainer, noisy_reward, wait_for

from pl_grouprl.callbacks import RankWatchdog

CASES = json.loads(sys.argv[1])
"""Of each: what is lost, and the rank."""
TIMEOUT = 5.0


def freeze():
    os.kill(os.getpid(), signal.SIGSTOP)


def loop():
    while True:
        pass


def hold_the_lock():
    """In C, with Python's lock held."""
    ctypes.PyDLL(None).sleep(1000)


def fail():
    raise SystemError("the disk of rewards is gone")


def dwindle():
    """Slower than the other rank in each step, and in all steps together for longer than the timeout."""
    time.sleep(0.4 * TIMEOUT)


HAPPENS = {"freeze": freeze, "loop": loop, "hold_the_lock": hold_the_lock, "slow": dwindle}


class Reward:
    """Does something on one rank from its second call on."""

    def __init__(self, event):
        self.event, self.calls = event, 0

    def __call__(self, completions, **columns):
        self.calls += 1
        if self.calls >= 2:
            self.event()
        return noisy_reward(completions)


class FailingModule(pl.LightningModule):
    """Somebody's own module: an exception on one rank in the middle of a step, while the other waits."""

    def __init__(self, event):
        super().__init__()
        self.layer, self.event = torch.nn.Linear(1, 1), event

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            self.event()
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(kind, folder, rank, lost):
    event = HAPPENS.get(kind, fail) if lost in (rank, -1) else lambda: None
    if kind in HAPPENS:
        module = make_module(
            "grpo", Reward(event), guards={"rank_timeout": TIMEOUT}, num_iterations=1, num_mini_batches=1
        )
        data, callbacks = make_data(), []
    else:
        module, data = FailingModule(event), torch.utils.data.DataLoader(torch.ones(12, 1), batch_size=1)
        callbacks = [RankWatchdog(TIMEOUT)]
    trainer = make_trainer(folder, "ddp", callbacks, max_epochs=2, val_check_interval=None, limit_val_batches=0)
    try:
        trainer.fit(module, data)
    except SystemError:
        if kind == "fails_and_stays":
            time.sleep(1000)
        raise
    print(f"rank {rank} is done", flush=True)


def main():
    """Run all cases; a line of JSON for each."""
    root = Path(tempfile.mkdtemp())
    runs = []
    for number, (kind, lost) in enumerate(CASES):
        folder = root / str(number)
        folder.mkdir()
        log = folder / "log.txt"
        pids = fork_ranks("ddp", lambda rank: train(kind, folder, rank, lost), log)  # noqa: B023
        runs.append((kind, lost, log, pids))
    for kind, lost, log, pids in runs:
        waited = [pid for rank, pid in enumerate(pids) if kind != "fails_and_stays" or rank != lost]
        try:
            codes = wait_for(waited, limit=100)
        except TimeoutError:
            codes = None
        if kind == "fails_and_stays":
            kill([pids[lost]])
        print(json.dumps({"case": [kind, lost], "pids": pids, "codes": codes, "log": log.read_text()}), flush=True)


main()
