"""Runs all methods on one case in turns and compares them with the repeated runs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.measure import (
    MIB,
    Timing,
    cuda_peak_mib,
    in_fresh_process,
    peak_flops,
    resident_peak_mib,
    time_in_turns,
)
from benchmarks.methods import BASELINE, Method, Run, find_method, make_optimizer, place_gradients, step_alone

Measured = Literal["scoring", "update"]
PASSES: dict[Measured, Callable[[Run], Any]] = {"scoring": Run.score, "update": Run.update}
FORWARDS: dict[Measured, int] = {"scoring": 1, "update": 3}
"""Operations in units of forward passes: a backward pass counts as two. Recomputation by checkpointing and the
optimizer do not count."""


@dataclass
class Row:
    """The results of one method.

    Attributes:
        method: Its name.
        timing: Durations of all rounds; None if it did not run.
        speedup: Over the packed repeated run: median, smallest and largest over the rounds.
        share_of_ideal: That median over the ideal ratio; for a repeated run, over 1.
        share_of_fastest: The same relative to the fastest repeated run.
        tokens_per_second: Tokens of all sequences, each with its prompt, so all methods count the same.
        utilization: Operations that this method needs, per second, over the device's peak (MFU), if known.
        peak_mib: Activations and workspace, without batch, weights, gradients and the optimizer's state.
        memory_share: `peak_mib` over the packed repeated run's, times the token ratio: 1 if memory scales with tokens.
        difference: Largest difference of a log-probability from the packed repeated run, in nats.
        note: Why it did not run.
    """

    method: str
    timing: Timing | None = None
    speedup: tuple[float, float, float] | None = None
    share_of_ideal: float | None = None
    share_of_fastest: float | None = None
    tokens_per_second: float | None = None
    utilization: float | None = None
    peak_mib: float | None = None
    memory_share: float | None = None
    difference: float | None = None
    note: str | None = None


@dataclass
class Comparison:
    """All rows of a case.

    Attributes:
        case: Its shapes.
        measured: What was timed.
        token_ratio: Tokens of the repeated run over those of the shared one.
        ideal_ratio: The same for floating-point operations.
        teraflops: Operations of the shared and of the repeated run, in units of 1e12.
        gradient_mib: Memory of all gradients, which is the same for all methods and not part of any peak.
        fastest_repeated: The repeated run with the smallest median.
        optimizer: Durations of the optimizer's step alone.
        rows: One for each method.
    """

    case: Case
    measured: Measured
    token_ratio: float
    ideal_ratio: float
    teraflops: dict[str, float]
    gradient_mib: float
    fastest_repeated: str | None = None
    optimizer: Timing | None = None
    rows: list[Row] = field(default_factory=list)

    def row(self, method: str) -> Row | None:
        """The row of a method that ran."""
        return next((row for row in self.rows if row.method == method and row.timing is not None), None)


@dataclass(frozen=True)
class Plan:
    """How to measure a case.

    Attributes:
        methods: The methods. Without the packed repeated run there are no speedups.
        measured: What to time.
        rounds: How often each is timed; fewer when time runs out.
        clock: `wall` or `cpu`.
        memory: Whether to measure memory on CPU, which needs a fresh process and another run per row.
        differences: Whether to compare log-probabilities, which needs another forward pass.
    """

    methods: Sequence[Method]
    measured: Measured
    rounds: int = 5
    clock: str = "wall"
    memory: bool = True
    differences: bool = True


def compare(case: Case, plan: Plan, seconds: float = float("inf")) -> Comparison:
    """Measure a case; no round begins after `seconds`."""
    deadline = time.monotonic() + seconds
    gc.collect()  # the previous case's model
    model = case.make_model()
    optimizer = make_optimizer(model) if plan.measured == "update" else None
    counts = {sharing: FORWARDS[plan.measured] * case.operations(sharing) / 1e12 for sharing in ("shared", "repeated")}
    gradient_mib = sum(parameter.nbytes for parameter in model.parameters()) / MIB if optimizer else 0.0
    result = Comparison(case, plan.measured, case.layout.token_ratio, case.ideal_ratio, counts, gradient_mib)
    logprobs: dict[str, Tensor] = {}
    ready: dict[str, Callable[[], Any]] = {}
    contexts: dict[str, Callable[[], Any]] = {}
    for method in plan.methods:
        row = Row(method.name, note=method.refusal(case, plan.measured))
        result.rows.append(row)
        if row.note is None:
            run = method.prepare(case, model, optimizer)
            row.note = _warm_up(row, run, plan, case, logprobs)
        if row.note is None:
            ready[row.method], contexts[row.method] = partial(PASSES[plan.measured], run), run.patched
    timings = time_in_turns(ready, plan.rounds, deadline, plan.clock, contexts)
    if optimizer is not None and timings:
        result.optimizer = time_in_turns({"": step_alone(model, optimizer)}, plan.rounds, deadline, plan.clock)[""]
    _relate(result, timings, logprobs)
    return result


def _warm_up(row: Row, run: Run, plan: Plan, case: Case, logprobs: dict[str, Tensor]) -> str | None:
    """Run once, measure memory, keep the log-probabilities; return why that is impossible, or None."""
    try:
        with run.patched():
            if plan.differences:
                logprobs[row.method] = run.score()
            if plan.measured == "update" or not plan.differences:
                PASSES[plan.measured](run)  # exclude loading, compilation and allocation on the first call
            if case.device == "cuda":
                row.peak_mib = _peak_mib(run, plan.measured, cuda_peak_mib)
        if plan.memory and case.device == "cpu":
            threads = torch.get_num_threads()
            row.peak_mib = in_fresh_process(_peak_of_fresh_process, case, row.method, plan.measured, threads)
    except (
        RuntimeError,
        ValueError,
    ) as error:  # out of memory, or no such kernel here; continue with the other methods
        run.model.zero_grad(set_to_none=True)
        logprobs.pop(row.method, None)
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
    return None


def _peak_of_fresh_process(case: Case, method_name: str, measured: Measured, threads: int) -> float:
    torch.set_num_threads(threads)
    model, method = case.make_model(), find_method(method_name)
    optimizer = make_optimizer(model) if measured == "update" else None
    small = replace(case, prefix=min(case.prefix, 64), rollout=min(case.rollout, 16))
    run = method.prepare(case, model, optimizer)
    with run.patched():
        PASSES[measured](method.prepare(small, model, optimizer))  # exclude loading on the first call
        return _peak_mib(run, measured, resident_peak_mib)


def _peak_mib(run: Run, measured: Measured, meter: Callable[[Callable[[], Any]], float]) -> float:
    """Peak memory of a pass, without the gradients, which are the same for all methods."""
    if measured == "update":
        place_gradients(run.model)
    return meter(partial(PASSES[measured], run))


def _relate(result: Comparison, timings: dict[str, Timing], logprobs: dict[str, Tensor]) -> None:
    """Fill in the figures of a row that are relative to other rows or to the device."""
    sharing = {row.method: find_method(row.method).sharing for row in result.rows}
    repeated = [name for name in timings if sharing[name] == "repeated"]
    if len(repeated) > 1:
        result.fastest_repeated = min(repeated, key=lambda name: timings[name].median)
    peak, tokens = peak_flops(result.case.dtype), sum(result.case.layout.repeated_lengths)
    for row in result.rows:
        if row.method not in timings:
            continue
        row.timing = timing = timings[row.method]
        row.tokens_per_second = tokens / timing.median
        if peak is not None:
            row.utilization = 1e12 * result.teraflops[sharing[row.method]] / timing.median / peak
        ideal = result.ideal_ratio if sharing[row.method] == "shared" else 1.0
        if BASELINE in timings:
            row.speedup = timing.speedup_over(timings[BASELINE])
            row.share_of_ideal = row.speedup[0] / ideal
        if result.fastest_repeated is not None:
            row.share_of_fastest = timing.speedup_over(timings[result.fastest_repeated])[0] / ideal
        if BASELINE in logprobs:
            row.difference = (logprobs[row.method] - logprobs[BASELINE]).abs().max().item()
    base = result.row(BASELINE)
    for row in result.rows:
        if base is not None and base.peak_mib and row.peak_mib is not None and sharing[row.method] == "shared":
            row.memory_share = row.peak_mib / base.peak_mib * result.token_ratio
