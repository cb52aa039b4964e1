"""Small whole runs in processes forked from one that has imported everything; for scripts of their own, not for pytest.

A process that has already computed with several threads must not be forked: import this first thing in a script.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning.pytorch as pl
import numpy as np
import torch
import transformers.models.qwen3.modeling_qwen3  # noqa: F401
from helpers.chance_episodes import STOPS, ChancePolicy, Tally, add_or_double, double, register_chance_calls, tally_rows
from helpers.quick_fits import quick_fits
from helpers.tiny_runs import TinyPolicy, merged
from lightning.pytorch.strategies import ModelParallelStrategy

from pl_grouprl import GRPO, GroupPPO, PromptDataModule, SamplingConfig
from pl_grouprl.algorithms import OptimizerConfig
from pl_grouprl.callbacks import SafeCheckpoint
from pl_grouprl.demo import MostFrequentDigit

torch.set_num_threads(1)
RANKS = {"single": 1, "ddp": 2, "fsdp2": 2}


def noisy_reward(completions: Sequence[str], **columns: Any) -> list[float]:
    """Depends on all global random numbers, as code of users may."""
    noise = random.random() + np.random.random() + float(torch.rand(()))
    texts = [c if isinstance(c, str) else "".join(message["content"] for message in c) for c in completions]
    return [noise + sum(c.isalpha() for c in text) / max(len(text), 1) for text in texts]


def make_module(algorithm: str = "group_ppo", reward: Any = noisy_reward, **options: Any) -> Any:
    """Two passes of two mini-batches over each batch of rollouts, and a coefficient that adapts."""
    kl = {"beta": 0.1, "kl": {"target": 0.01, "horizon": 100}}
    shared = {
        "num_generations": 4,
        "num_iterations": 2,
        "num_mini_batches": 2,
        "sampling": SamplingConfig(max_new_tokens=4),
        "optimizer": OptimizerConfig(1e-2, weight_decay=0.1, schedule="cosine"),
        "sharing": {"verify": False},
    }
    policy = ChancePolicy(eos_token_id=1) if "tools" in options else TinyPolicy()
    cls = {"grpo": GRPO, "group_ppo": GroupPPO}[algorithm]
    return cls(policy, reward, **{**shared, **kl, **options})


def tool_options(**options: Any) -> dict[str, Any]:
    """Options of `make_module` for episodes of up to four turns, with a tool and an environment."""
    register_chance_calls(name_of=add_or_double)
    limits = {"episodes": {"max_tool_calling_iterations": 3, "max_turn_tokens": 10, "max_tokens": 80}}
    sampling = SamplingConfig(max_new_tokens=24, stop_token_ids=STOPS)
    return merged({"tools": [double], "environment_factory": Tally, "sampling": sampling}, limits, options)


def make_data(*, tools: bool = False, **options: Any) -> PromptDataModule:
    """Two batches of four prompts in an epoch, in random order."""
    if tools:
        return PromptDataModule(tally_rows(8), tally_rows(2), **{"batch_size": 4, **options})
    task = MostFrequentDigit(prompt_length=20, majority_share=0.4, train_size=8, val_size=2)
    return PromptDataModule(task, task, **{"batch_size": 4, **options})


def make_trainer(folder: Path, strategy: str, callbacks: Sequence[pl.Callback], **options: Any) -> pl.Trainer:
    """A Trainer that logs nothing and validates amid an epoch."""
    kinds: dict[str, Any] = {
        "single": "auto",
        "ddp": "ddp",
        "fsdp2": ModelParallelStrategy(2, 1, save_distributed_checkpoint=True),
    }
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    defaults = {"max_epochs": 2, "check_val_every_n_epoch": None, "val_check_interval": 5, "default_root_dir": folder}
    ranks = {"accelerator": "cpu", "devices": RANKS[strategy], "strategy": kinds[strategy]}
    return pl.Trainer(callbacks=list(callbacks), **{**quiet, **defaults, **ranks, **options})


def final_state(trainer: pl.Trainer, module: Any) -> dict[str, Any]:
    """All that a run ends with on this rank; sharded tensors as the rank's part."""

    def local(value: Any) -> Any:
        value = value.to_local() if hasattr(value, "to_local") else value
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    moments = trainer.optimizers[0].state_dict()["state"]
    return {
        "weights": {name: local(value) for name, value in module.state_dict().items()},
        "moments": {f"{key}.{name}": local(value) for key, own in moments.items() for name, value in own.items()},
        "counters": [
            module.beta,
            module.num_tokens,
            getattr(module, "token_group_threshold", 0.0),
            trainer.global_step,
        ],
        "random": [random.random(), float(np.random.random()), float(torch.rand(()))],
    }


def same(left: Any, right: Any) -> bool:
    """Whether two final states are the same bit by bit."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


def checkpointing(folder: Path, **options: Any) -> SafeCheckpoint:
    """A checkpoint after each step, the newest twice."""
    return SafeCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_last=True, **options)


def fork_ranks(strategy: str, run: Callable[[int], None], log: Path) -> list[int]:
    """Start one process for each rank of a strategy, in a process group of their own; returns their ids."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    gc.collect()
    gc.freeze()  # or each rank goes through all that is imported, and copies it
    pids: list[int] = []
    for rank in range(RANKS[strategy]):
        pid = os.fork()
        if pid == 0:
            _run_rank(rank, strategy, run, log, port)
        pids.append(pid)
    return pids


def _run_rank(rank: int, strategy: str, run: Callable[[int], None], log: Path, port: str) -> None:
    """Never returns: whatever happens, the child must not go on with what its parent does."""
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        warnings.simplefilter("ignore")
        if RANKS[strategy] > 1:
            os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": "0"}
        pl.seed_everything(rank, verbose=False)
        with quick_fits():
            run(rank)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_for(pids: Sequence[int], limit: float = 120.0) -> list[int]:
    """Wait for processes; their exit codes, or the negative of the signal that ended each.

    Raises:
        TimeoutError: If one still runs at the limit, in seconds; all are killed.
    """
    codes: dict[int, int] = {}
    end = time.monotonic() + limit
    while len(codes) < len(pids):
        for pid in set(pids) - codes.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            kill(set(pids) - codes.keys())
            raise TimeoutError(f"processes {sorted(set(pids) - codes.keys())} still run after {limit} s.")
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


def kill(pids: Any) -> None:
    """Kill processes at once (kill -9)."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
