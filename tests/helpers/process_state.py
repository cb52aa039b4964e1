"""What one test can change for the next: loggers, environment, folder, torch's defaults, random numbers."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

SET_FOR_GOOD = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "TRITON_CACHE_DIR", "TRITON_PTXAS_PATH")
"""Environment variables that Lightning and torch's compiler set for good: put back without a word."""


_seed_torch = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
"""Without a GPU, `manual_seed` records a traceback for each kind of device that it would seed later."""


def seed_all(seed: int) -> None:
    """Seed the three global generators."""
    random.seed(seed)
    np.random.seed(seed)
    _seed_torch(seed)


@contextmanager
def left_changed() -> Iterator[list[str]]:
    """Put the process back to what it was on entry; the list then says what had to be."""
    quiet = {name: os.environ.get(name) for name in SET_FOR_GOOD}
    loggers, environment = _loggers(), _environment()
    values = {name: read() for name, (read, _) in PARTS.items()}
    changes: list[str] = []
    yield changes
    changes += _restore_loggers(loggers)
    changes += _restore_environment(environment)
    for name, (read, write) in PARTS.items():
        if read() != values[name]:
            changes.append(f"{name} {read()} (was {values[name]})")
            write(values[name])
    for name, value in quiet.items():
        _set_variable(name, value)


PARTS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the folder": (os.getcwd, os.chdir),
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "torch's gradients enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "torch's matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "a process group": (torch.distributed.is_initialized, lambda _: torch.distributed.destroy_process_group()),
}


def _loggers() -> dict[logging.Logger, tuple[int, bool, bool]]:
    known = [own for own in logging.root.manager.loggerDict.values() if isinstance(own, logging.Logger)]
    return {own: (own.level, own.disabled, own.propagate) for own in (logging.root, *known)}


def _restore_loggers(before: dict[logging.Logger, tuple[int, bool, bool]]) -> list[str]:
    changes = []
    for logger, state in before.items():
        if (logger.level, logger.disabled, logger.propagate) != state:
            changes.append(f"the logger {logger.name} with level {logger.level} (was {state[0]})")
            logger.setLevel(state[0])
            logger.disabled, logger.propagate = state[1:]
    return changes


def _environment() -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if name not in SET_FOR_GOOD and name != "PYTEST_CURRENT_TEST"
    }


def _restore_environment(before: dict[str, str]) -> list[str]:
    now = _environment()
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    for name in changed:
        _set_variable(name, before.get(name))
    return [f"the variable {name} {now.get(name)!r} (was {before.get(name)!r})" for name in changed]


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
