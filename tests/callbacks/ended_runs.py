"""Run by test_end_of_run.py: runs that end between two periodic checkpoints; prints what came of them as JSON.

Each run is resumed to the end of one that never stopped, and compared with it: weights, moments, counters and random
numbers of all ranks.
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import torch
from forked_runs import RANKS, final_state, fork_ranks, make_data, make_module, make_trainer, same, wait_for
from lightning.pytorch import Callback

from pl_grouprl.algorithms import OptimizerConfig
from pl_grouprl.callbacks import SafeCheckpoint
from pl_grouprl.utilities.checkpoint_files import newest_complete, read_manifest

CASES = json.loads(sys.argv[1])
"""Of each: strategy, how it ends (a limit of the Trainer, the hook that asks to stop, or `broken shard`), the step."""


def asks_to_stop(trainer, step):
    """Whether a rank sets `should_stop`: the last one alone, at a step."""
    return trainer.global_step == step and trainer.global_rank == trainer.world_size - 1


class Stops(Callback):
    """Sets `should_stop` at a step, in one hook or another."""

    def __init__(self, hook: str, step: int) -> None:
        self.step = step
        setattr(self, hook, self.stop)

    def stop(self, trainer, *args):
        trainer.should_stop = trainer.should_stop or asks_to_stop(trainer, self.step)


class BreaksShard(Callback):
    """Puts a NaN into what the last rank alone holds of the last weight."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_step == self.step and trainer.global_rank == trainer.world_size - 1:
            weight = [parameter for parameter in pl_module.policy.parameters() if parameter.ndim == 2][-1]
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            local.data[0, 0] = torch.nan


def train(folder, strategy, rank, how=None, step=0, checkpoint=None):
    """One rank of a run of 16 steps in two epochs, or of one that ends before."""
    optimizer = OptimizerConfig(1e-2, weight_decay=0.1)  # no schedule that knows the length of the run
    module = make_module("group_ppo", optimizer=optimizer)
    every = 5 if how == "broken shard" else 100
    callbacks = [SafeCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=every)]
    limits = {how: step} if how in ("max_steps", "max_epochs") else {}
    if how == "broken shard":
        callbacks.insert(0, BreaksShard(step))
    elif how == "module":
        own = type(module).on_train_batch_end

        def on_train_batch_end(*args):
            own(module, *args)
            module.trainer.should_stop = asks_to_stop(module.trainer, step)

        module.on_train_batch_end = on_train_batch_end
    elif how and not limits:
        callbacks.append(Stops(how, step))
    trainer = make_trainer(folder, strategy, callbacks, **limits)
    trainer.fit(module, make_data(), ckpt_path=checkpoint, weights_only=True)
    torch.save(final_state(trainer, module), folder / f"final-{rank}.pt")


def final(folder, strategy):
    return [torch.load(folder / f"final-{rank}.pt", weights_only=True) for rank in range(RANKS[strategy])]


def run(folder, strategy, *arguments):
    """All ranks of a run; exit codes and what it printed, if it failed."""
    log = folder / "log.txt"
    codes = wait_for(fork_ranks(strategy, lambda rank: train(folder, strategy, rank, *arguments), log))
    return f"{codes}: {log.read_text()[-3000:]}" if any(codes) else None


def main():
    """Run all cases; a line of JSON for each."""
    root = Path(tempfile.mkdtemp())
    whole = {}
    for strategy, how, step in CASES:
        if strategy not in whole:
            folder = root / strategy
            folder.mkdir()
            failure = run(folder, strategy)
            assert failure is None, failure
            whole[strategy] = final(folder, strategy)
        folder = root / f"{strategy}-{how}-{step}"
        folder.mkdir()
        result = {"case": [strategy, how, step], "failure": run(folder, strategy, how, step)}
        last, _ = newest_complete(folder.glob("*.ckpt"))
        if last is not None:
            result["saved"] = read_manifest(last)["step"]
            result["failure"] = result["failure"] or run(folder, strategy, None, 0, last)
            result["same"] = not result["failure"] and all(map(same, whole[strategy], final(folder, strategy)))
        print(json.dumps(result), flush=True)


main()
