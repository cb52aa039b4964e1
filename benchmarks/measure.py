"""Measures time and memory of callables that take turns, and records the conditions."""

from __future__ import annotations

import gc
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.allocator import give_back_freed
from pl_grouprl.utilities.device_defaults import DEVICES, find_device

MIB = 2**20

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""`cpu` is the processor time of this process, for runs on one thread while other programs use the machine."""


@dataclass
class Timing:
    """Durations of one callable over the rounds, in the same order for all callables.

    Attributes:
        seconds: Seconds of each round.
    """

    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median over the rounds, in seconds."""
        return statistics.median(self.seconds)

    def speedup_over(self, other: Timing) -> tuple[float, float, float]:
        """How many times faster than `other`, round by round: median, smallest, largest."""
        ratios = [theirs / own for own, theirs in zip(self.seconds, other.seconds, strict=True)]
        return statistics.median(ratios), min(ratios), max(ratios)


def time_in_turns(
    functions: Mapping[str, Callable[[], Any]],
    rounds: int,
    deadline: float = float("inf"),
    clock: str = "wall",
    contexts: Mapping[str, Callable[[], AbstractContextManager[Any]]] | None = None,
) -> dict[str, Timing]:
    """Run all functions once per round, in a different order each round, so a slow minute affects them all.

    Args:
        functions: The functions to time, already warm.
        rounds: Number of rounds.
        deadline: Value of `time.monotonic()` after which no further round begins; the first one always runs.
        clock: One of `CLOCKS`.
        contexts: Contexts that functions run in; entering and leaving is not timed.
    """
    timings = {name: Timing() for name in functions}
    names = list(functions)
    for number in range(rounds):
        if number and time.monotonic() > deadline:
            break
        shift = number % max(len(names), 1)
        for name in names[shift:] + names[:shift]:
            gc.collect()
            with (contexts or {}).get(name, nullcontext)():
                start = now(clock)
                functions[name]()
                timings[name].seconds.append(now(clock) - start)
    return timings


def now(clock: str) -> float:
    """Seconds on one of `CLOCKS`, after waiting for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return CLOCKS[clock]()


def peak_flops(dtype: str) -> float | None:
    """Peak operations per second of this machine's CUDA device in a dtype; None if unknown."""
    if dtype != "bfloat16" or not torch.cuda.is_available():
        return None
    name = find_device(torch.cuda.get_device_name())
    return None if name is None else DEVICES[name].operations


def cuda_peak_mib(function: Callable[[], Any]) -> float:
    """Peak memory of tensors while the function runs, beyond what was allocated before."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of a module in a process that has imported this project and run nothing else (POSIX).

    The processes are forks of a server that imports once, so each starts in milliseconds. They return freed tensors to
    the system at once, so resident memory is memory in use.

    Returns:
        The function's result.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.compare", "transformers.models.qwen3.modeling_qwen3"])
    with ProcessPoolExecutor(1, mp_context=context, initializer=give_back_freed) as fresh:
        return fresh.submit(function, *arguments).result()


def resident_peak_mib(function: Callable[[], Any]) -> float:
    """Peak resident set of this process while the function runs, beyond that before (Linux).

    Freed memory may stay resident, so call it via `in_fresh_process`, or in a process that has not run anything large.
    """
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark to what is resident now
    before = _status_kib("VmRSS")
    function()
    return (_status_kib("VmHWM") - before) / 1024


def _status_kib(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {key}; resident memory is measured on Linux only.")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Conditions:
    """Machine and package versions of a measurement; None for a package that is not installed."""

    device: str
    cores: int
    threads: int
    clock: str
    load_average: float
    python: str = platform.python_version()
    torch: str = torch.__version__
    transformers: str | None = _version("transformers")
    prefix_grouper: str | None = _version("prefix_grouper")
    started: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()))

    @classmethod
    def here(cls, device: str, clock: str) -> Conditions:
        """The conditions on this machine."""
        name = torch.cuda.get_device_name() if device == "cuda" else _processor()
        return cls(name, os.cpu_count() or 0, torch.get_num_threads(), clock, round(os.getloadavg()[0], 2))

    def __str__(self) -> str:
        """One line."""
        return ", ".join(f"{key} {value}" for key, value in asdict(self).items())


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    names = {key.strip(): value.strip() for key, value in fields.items()}
    wide = [flag for flag in ("amx_tile", "avx512f", "avx2") if flag in names.get("flags", "").split()]
    return f"{names.get('model name', platform.processor() or platform.machine())} ({', '.join(wide)})"
