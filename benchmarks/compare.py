"""Run all methods on one case in turns and set them in relation to the packed repeated run."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.measure import Timing, cuda_peak_mib, resident_peak_mib, time_in_turns
from benchmarks.methods import BASELINE, Method, Run, find_method

Measured = Literal["forward", "forward+backward"]
PASSES: dict[Measured, Callable[[Run], Any]] = {"forward": Run.forward, "forward+backward": Run.forward_backward}


@dataclass
class Row:
    """What one method did.

    Attributes:
        method: Its name.
        measured: Forward alone, without gradient, or forward and backward.
        timing: Durations of all rounds; None if it did not run.
        speedup: Times faster than the packed repeated run: median, smallest and largest over the rounds.
        share_of_ideal: That median over the ideal ratio.
        peak_mib: Memory beyond weights and batch.
        difference: Largest difference of a log-probability from the packed repeated run, in nats.
        note: Why it did not run.
    """

    method: str
    measured: Measured
    timing: Timing | None = None
    speedup: tuple[float, float, float] | None = None
    share_of_ideal: float | None = None
    peak_mib: float | None = None
    difference: float | None = None
    note: str | None = None


@dataclass
class Comparison:
    """All rows of a case.

    Attributes:
        case: Its shapes.
        token_ratio: Tokens of the repeated run over those of the shared one.
        ideal_ratio: The same for floating-point operations.
        rows: One for each pass and method.
    """

    case: Case
    token_ratio: float
    ideal_ratio: float
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """How to measure a case.

    Attributes:
        methods: Which methods. Without the packed repeated run among them there are no speedups.
        passes: What to time.
        rounds: How often each is timed; fewer once the time is up.
        clock: `wall` or `cpu`.
        memory: Whether to measure memory on CPU, which takes a fresh process for each row.
    """

    methods: Sequence[Method]
    passes: Sequence[Measured]
    rounds: int = 5
    clock: str = "wall"
    memory: bool = True


def compare(case: Case, plan: Plan, seconds: float = float("inf")) -> Comparison:
    """Measure a case; after `seconds` no further round begins."""
    deadline = time.monotonic() + seconds
    model = case.make_model()
    result = Comparison(case, case.layout.token_ratio, case.ideal_ratio(model))
    logprobs: dict[str, Tensor] = {}
    for measured in plan.passes:
        rows = [Row(method.name, measured, note=method.refusal(case, measured)) for method in plan.methods]
        ready = {}
        for row, method in zip(rows, plan.methods, strict=True):
            if row.note is None:
                run = method.prepare(case, model)
                row.note = _warm_up(row, run, plan.memory, case, logprobs)
            if row.note is None:
                ready[row.method] = partial(PASSES[measured], run)
        timings = time_in_turns(ready, plan.rounds, deadline, plan.clock)
        for row in rows:
            _relate(row, timings, logprobs, result.ideal_ratio)
        result.rows += rows
    return result


def _warm_up(row: Row, run: Run, memory: bool, case: Case, logprobs: dict[str, Tensor]) -> str | None:
    """Run once, measure memory, keep the log-probabilities; return why that is impossible, or None."""
    try:
        if row.method not in logprobs:
            logprobs[row.method] = run.forward()
        if case.device == "cuda":  # this is the warm-up of the backward pass too
            row.peak_mib = cuda_peak_mib(partial(PASSES[row.measured], run))
        elif memory:
            threads = torch.get_num_threads()
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
                row.peak_mib = fresh.submit(_peak_of_fresh_process, case, row.method, row.measured, threads).result()
    except RuntimeError as error:  # out of memory, or no such kernel here: the other methods go on
        run.model.zero_grad(set_to_none=True)
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
    return None


def _peak_of_fresh_process(case: Case, method_name: str, measured: Measured, threads: int) -> float:
    torch.set_num_threads(threads)
    model, method = case.make_model(), find_method(method_name)
    small = replace(case, prefix=min(case.prefix, 64), rollout=min(case.rollout, 16))
    PASSES[measured](method.prepare(small, model))  # what is loaded or compiled on the first call is not counted
    return resident_peak_mib(partial(PASSES[measured], method.prepare(case, model)))


def _relate(row: Row, timings: dict[str, Timing], logprobs: dict[str, Tensor], ideal_ratio: float) -> None:
    if row.method not in timings:
        return
    row.timing = timings[row.method]
    if BASELINE in timings:
        row.speedup = row.timing.speedup_over(timings[BASELINE])
        row.share_of_ideal = row.speedup[0] / ideal_ratio
    if BASELINE in logprobs:
        row.difference = (logprobs[row.method] - logprobs[BASELINE]).abs().max().item()
