"""Log-probabilities of given tokens from hidden states: time, memory and accuracy of several methods.

All are compared with full logits. `python -m benchmarks head --help` lists the options.

Legend: N tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.head_methods import BASELINE, METHODS, Head, reference, refusal, run
from benchmarks.measure import cuda_peak_mib, in_fresh_process, resident_peak_mib, time_in_turns
from benchmarks.options import add_common, begin_on, write_json

PASSES = ("forward", "forward+backward")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Parse the command line, measure, print, and write JSON."""
    options = parse(arguments)
    head = Head(**{field.name: getattr(options, field.name) for field in fields(Head)})
    conditions = begin_on(head.device, options)
    print(f"{head}\nerrors: of the first {options.checked} tokens, against float64", flush=True)
    result: dict[str, Any] = {"head": asdict(head), "checked": options.checked}
    result["rows"] = []
    for measured in options.passes:
        notes = {name: refusal(name, head, options.most_gib) for name in options.methods}
        rows = [{"method": name, "measured": measured, "note": note} for name, note in notes.items()]
        _add_errors(rows, replace(head, tokens=min(head.tokens, options.checked)))
        _add_memory(rows, head)
        _add_times(rows, head, options.rounds, options.clock)
        print("\n".join(_line(row) for row in rows), flush=True)
        result["rows"] += rows
    write_json(options.output, conditions, result)
    return result


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind in (("tokens", int), ("vocabulary", int), ("hidden", int)):
        default = getattr(Head, name)
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"default: {default}")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--frozen", action="store_true", help="no gradient of the weight, as with adapters")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="NAME")
    parser.add_argument("--passes", nargs="+", default=list(PASSES), choices=PASSES)
    parser.add_argument("--rounds", type=int, default=5, help="how often each is timed; 0: memory and errors alone")
    parser.add_argument("--checked", type=int, default=256, help="tokens whose errors are looked at (default: 256)")
    parser.add_argument("--most-gib", type=float, default=8, help="full logits that take more are not run (default: 8)")
    add_common(parser)
    return parser.parse_args(arguments)


def _upstream(head: Head, measured: str) -> Tensor | None:
    """Upstream gradient of each log-probability; different for each token, as in policy gradients."""
    if measured == "forward":
        return None
    return torch.randn(head.tokens, generator=torch.Generator().manual_seed(1)).to(head.device)


def _add_errors(rows: list[dict[str, Any]], head: Head) -> None:
    """Largest error of a log-probability in nats, and of each gradient relative to its largest entry."""
    if not head.tokens:
        return
    tensors, upstream_N = head.tensors(), _upstream(head, "forward+backward")
    assert upstream_N is not None
    expected = reference(tensors, upstream_N)
    for row in rows:
        if row["note"] is not None:
            continue
        try:
            found = run(row["method"], tensors, None if row["measured"] == "forward" else upstream_N)
        except RuntimeError as error:  # no such kernel here; continue with the other methods
            row["note"] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
            continue
        errors = [(own - right).abs().max().item() for own, right in zip(found, expected, strict=False)]
        scales = [1.0, *(right.abs().max().item() for right in expected[1:])]
        names = ("error", "error_grad_hidden", "error_grad_weight")
        row.update({name: error / scale for name, error, scale in zip(names, errors, scales, strict=False)})


def _add_memory(rows: list[dict[str, Any]], head: Head) -> None:
    """Peak memory beyond hidden states and weight; on CPU in a fresh process."""
    for row in rows:
        if row["note"] is not None:
            continue
        if head.device == "cuda":
            row["peak_mib"] = cuda_peak_mib(_call(row, head))
        else:
            row["peak_mib"] = in_fresh_process(_peak_of_fresh_process, row, head, torch.get_num_threads())
    full = [row["peak_mib"] for row in rows if row["method"] == BASELINE and "peak_mib" in row]
    for row in rows:
        if full and row.get("peak_mib"):  # a few tokens may fit in pages that are already resident
            row["times_less_memory"] = full[0] / row["peak_mib"]


def _peak_of_fresh_process(row: dict[str, Any], head: Head, threads: int) -> float:
    torch.set_num_threads(threads)
    _call(row, replace(head, tokens=4, vocabulary=256))()  # exclude loading on the first call
    return resident_peak_mib(_call(row, head))


def _call(row: dict[str, Any], head: Head) -> partial[list[Tensor]]:
    return partial(run, row["method"], head.tensors(), _upstream(head, row["measured"]))


def _add_times(rows: list[dict[str, Any]], head: Head, rounds: int, clock: str) -> None:
    if not rounds:
        return
    tensors, upstream_N = head.tensors(), _upstream(head, rows[0]["measured"])
    calls = {row["method"]: partial(run, row["method"], tensors, upstream_N) for row in rows if row["note"] is None}
    timings = time_in_turns(calls, rounds, clock=clock)
    for row in rows:
        if row["method"] not in timings:
            continue
        row["seconds"] = timings[row["method"]].seconds
        row["median_s"] = timings[row["method"]].median
        if BASELINE in timings:
            row["speedup"] = timings[row["method"]].speedup_over(timings[BASELINE])


def _line(row: dict[str, Any]) -> str:
    start = f"{row['measured']:<16}  {row['method']:<22}"
    if row["note"] is not None:
        return f"{start}  not run: {row['note']}"
    parts = [f"{row['median_s']:8.3f} s" if "median_s" in row else ""]
    parts.append("x{:.2f} ({:.2f}-{:.2f})".format(*row["speedup"]) if "speedup" in row else "")
    parts.append(f"{row['peak_mib']:8.0f} MiB" if "peak_mib" in row else "")
    parts.append(f"x{row['times_less_memory']:.1f} less" if "times_less_memory" in row else "")
    names = {"error": "log-prob", "error_grad_hidden": "d hidden", "error_grad_weight": "d weight"}
    parts += [f"{label} {row[name]:.1e}" for name, label in names.items() if name in row]
    return "  ".join([start, *[part for part in parts if part]])
