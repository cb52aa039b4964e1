"""Where the time of scoring or of an update goes, by kind of operator, and what the host waited for.

The figures include the profiler's overhead, so shares say more than seconds.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.cases import Case, profile_cases
from benchmarks.methods import BASELINE, METHODS, find_method, make_optimizer
from benchmarks.options import add_shape, begin, change, positive, write_json

KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn::"),
    "attention": ("flash_attention", "flex_attention"),
    "optimizer": ("_fused_adamw", "_foreach_"),
    "copies": (
        "aten::copy_",
        "aten::index",
        "aten::cat",
        "aten::gather",
        "aten::scatter",
        "aten::fill_",
        "aten::zero_",
    ),
}
"""Parts of operators' names by kind; everything else is `elementwise`."""

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
"""Calls in which the host waits for the device. The first is also how `Tensor.item()` waits."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Profile each method on the profile's first case, print, and write JSON."""
    options = parse(arguments)
    conditions = begin(options)
    case = change(profile_cases(options.profile)[0], options)
    report = {"case": asdict(case), "pass": options.measured, "rows": {}}
    print(f"{options.measured}, {case}")
    for name in options.methods:
        reason = find_method(name).refusal(case, options.measured)
        if reason is not None:
            print(f"{name}: not run: {reason}")
            continue
        report["rows"][name] = row = profile_method(case, name, options.measured, options.rounds)
        print(_line(name, row), flush=True)
        write_json(options.output, conditions, report)
    return report


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line; those that describe a case override the profile's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(clock="wall")
    parser.add_argument("--profile", choices=("cpu", "gpu"), default="cpu", help="whose first case (default: cpu)")
    parser.add_argument("--rounds", type=positive, default=1, help="how often each runs (default: 1)")
    parser.add_argument("--threads", type=positive, help="of PyTorch; default: as many as PyTorch takes")
    parser.add_argument("--output", type=Path, help="write OUTPUT.json")
    names = [method.name for method in METHODS]
    parser.add_argument("--pass", dest="measured", choices=("scoring", "update"), default="update", help="what runs")
    parser.add_argument("--methods", nargs="+", choices=names, default=[BASELINE, "cascade"], metavar="NAME")
    add_shape(parser, Case(""))
    return parser.parse_args(arguments)


def profile_method(case: Case, name: str, measured: str, rounds: int) -> dict[str, Any]:
    """Seconds of each kind of operator per round, on the case's device, and how often the host waited.

    Returns:
        `seconds` by kind and `waits` by name, both per round.
    """
    model = case.make_model()
    run = find_method(name).prepare(case, model, make_optimizer(model) if measured == "update" else None)
    function = run.update if measured == "update" else run.score
    on_cuda = case.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    seconds: dict[str, float] = defaultdict(float)
    waits: dict[str, float] = defaultdict(float)
    with run.patched():
        function()  # warm-up
        with profile(activities=activities) as profiler:
            for _ in range(rounds):
                function()
            if on_cuda:
                torch.cuda.synchronize()
    for event in profiler.key_averages():
        microseconds = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        if event.key.startswith(("aten::", "mkldnn::")):
            seconds[kind_of(event.key)] += microseconds / 1e6 / rounds
        if event.key in WAITS:
            waits[event.key] += event.count / rounds
    return {"seconds": dict(seconds), "waits": dict(waits)}


def kind_of(operator: str) -> str:
    """The kind of an operator."""
    return next((kind for kind, parts in KINDS.items() if any(part in operator for part in parts)), "elementwise")


def _line(name: str, row: dict[str, Any]) -> str:
    total = sum(row["seconds"].values())
    parts = sorted(row["seconds"].items(), key=lambda item: -item[1])
    shares = ", ".join(f"{kind} {own:.3f} s ({100 * own / max(total, 1e-9):.1f} %)" for kind, own in parts)
    waits = ", ".join(f"{key} {count:g}" for key, count in row["waits"].items()) or "none seen"
    return f"{name:20} {total:8.3f} s: {shares}; the host waited: {waits}"
