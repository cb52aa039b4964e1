"""Attention of one layer: each backend with a shared prompt against repeated prompts, and against the ideal.

The ideal ratio is the number of (query, visible key) pairs of the repeated run over that of the shared one.
`python -m benchmarks attention --help` lists the options.

Legend: T packed tokens, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Timing, time_in_turns
from benchmarks.methods import missing
from benchmarks.options import add_common, begin_on, write_json
from pl_grouprl.attention.backends.choice import get_backend
from pl_grouprl.attention.backends.interface import AttentionRule, Backend
from pl_grouprl.packing import SharedPrefixLayout

BASELINE = "repeated, packed"
METHODS = (BASELINE, "cascade", "flex", "prefix_grouper")
PASSES = ("forward", "forward+backward")
MOST_SCORES = 2**29
"""On CPU, FlexAttention computes all scores [H, T, T] at once; it is left out if there are more than this."""


@dataclass(frozen=True)
class Shape:
    """The shapes of one layer's attention.

    Attributes:
        prefix: Tokens of a prompt.
        rollout: Tokens of the longest rollout.
        shortest: Tokens of a group's shortest rollout; the others are evenly spaced. 0 gives all the same length.
        group_size: Rollouts of a prompt.
        groups: Prompts in the row.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Size of a head.
        dtype: Dtype of the tensors.
        device: Device of the tensors.
    """

    prefix: int = 2048
    rollout: int = 256
    shortest: int = 0
    group_size: int = 8
    groups: int = 1
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def layout(self) -> SharedPrefixLayout:
        """The groups as a forest."""
        span = self.rollout - (self.shortest or self.rollout)
        lengths = [self.rollout - span * i // max(self.group_size - 1, 1) for i in range(self.group_size)]
        return SharedPrefixLayout.from_groups([(self.prefix, lengths)] * self.groups)

    def tensors(self, tokens: int, gradient: bool) -> list[Tensor]:
        """Query, key and value of a row, shape [1, H or K, T, D], with the strides of a model's projections."""
        torch.manual_seed(0)
        return [
            torch.randn(1, tokens, heads, self.head_dim, device=self.device, dtype=getattr(torch, self.dtype))
            .transpose(1, 2)
            .requires_grad_(gradient)
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        ]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Parse the command line, measure, print, and write JSON."""
    options = parse(arguments)
    shape = Shape(**{field.name: getattr(options, field.name) for field in fields(Shape)})
    conditions = begin_on(shape.device, options)
    layout = shape.layout
    ideal = layout.repeated_attention_pairs / layout.attention_pairs
    print(f"{shape}\nideal: pairs x{ideal:.2f}, tokens x{layout.token_ratio:.2f}", flush=True)
    result: dict[str, Any] = {"shape": asdict(shape), "ideal_ratio": ideal}
    result["rows"] = []
    for measured in options.passes:
        rows = measure(shape, measured, options.methods, options.rounds, options.clock, ideal)
        result["rows"] += rows
        print("\n".join(_line(row) for row in rows), flush=True)
    write_json(options.output, conditions, result)
    return result


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = {"dtype": ("float32", "bfloat16", "float16"), "device": ("cpu", "cuda")}
    for field in fields(Shape):
        name = f"--{field.name.replace('_', '-')}"
        default: Any = field.default
        parser.add_argument(
            name, type=type(default), default=default, choices=choices.get(field.name), help=f"default: {default}"
        )
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, metavar="NAME")
    parser.add_argument("--passes", nargs="+", default=list(PASSES), choices=PASSES)
    add_common(parser, rounds=5)
    return parser.parse_args(arguments)


def measure(
    shape: Shape, measured: str, methods: Sequence[str], rounds: int, clock: str, ideal: float
) -> list[dict[str, Any]]:
    """Time all methods in turns; returns one row for each."""
    notes = {name: _refusal(shape, name, measured) for name in methods}
    calls = {name: _prepared(shape, name, measured) for name in methods if notes[name] is None}
    for name, call in list(calls.items()):
        try:
            call()  # plans, compiles
        except RuntimeError as error:  # out of memory, or no such kernel here; continue with the other methods
            notes[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
            del calls[name]
    timings = time_in_turns(calls, rounds, clock=clock)
    return [_row(name, measured, timings, notes[name], ideal) for name in methods]


def _refusal(shape: Shape, name: str, measured: str) -> str | None:
    if name == "prefix_grouper":
        return missing("prefix_grouper")
    if name != "flex" or shape.device != "cpu":
        return None
    if measured != "forward":
        return "FlexAttention has no backward pass on CPU"
    scores = shape.heads * shape.layout.num_tokens**2
    return f"dense scores of {scores / 2**20:,.0f} M elements" if scores > MOST_SCORES else None


def _prepared(shape: Shape, name: str, measured: str) -> Callable[[], None]:
    layout, backend = shape.layout, get_backend("cascade" if name == BASELINE else name)
    if name == BASELINE:  # every sequence is a root without children: one causal varlen call
        layout = SharedPrefixLayout(layout.repeated_lengths, [None] * len(layout.repeated_lengths))
    trains = measured != "forward"
    tensors = shape.tensors(layout.num_tokens, trains)
    rule = AttentionRule(shape.head_dim**-0.5)
    return partial(_train if trains else _forward, backend, tensors, layout, rule)


def _forward(backend: Backend, tensors: list[Tensor], layout: SharedPrefixLayout, rule: AttentionRule) -> None:
    with torch.no_grad():
        backend(*tensors, layout, rule)


def _train(backend: Backend, tensors: list[Tensor], layout: SharedPrefixLayout, rule: AttentionRule) -> None:
    out = backend(*tensors, layout, rule)
    torch.autograd.grad(out, tensors, torch.ones_like(out))


def _row(name: str, measured: str, timings: dict[str, Timing], note: str | None, ideal: float) -> dict[str, Any]:
    row: dict[str, Any] = {"measured": measured, "method": name, "note": note}
    if name in timings:
        row |= {"seconds": timings[name].seconds, "median": timings[name].median}
        if BASELINE in timings:
            row["speedup"] = timings[name].speedup_over(timings[BASELINE])
            row["share_of_ideal"] = row["speedup"][0] / (1.0 if name == BASELINE else ideal)
    return row


def _line(row: dict[str, Any]) -> str:
    start = f"{row['measured']:18} {row['method']:20}"
    if row["note"] is not None:
        return f"{start} not run: {row['note']}"
    seconds = row["seconds"]
    line = f"{start} {row['median']:9.4f} s ({min(seconds):.4f}-{max(seconds):.4f})"
    if "speedup" not in row:
        return line
    middle, low, high = row["speedup"]
    return f"{line} {middle:7.2f}x ({low:.2f}-{high:.2f}), of ideal {row['share_of_ideal']:.2f}"
