"""Options that the benchmarks share, and their common setup and output."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Case
from benchmarks.measure import CLOCKS, Conditions

SHAPE_OPTIONS = [field.name for field in fields(Case) if field.name not in ("name", "device", "checkpointing")]


def positive(text: str) -> int:
    """Parse a positive integer.

    Raises:
        argparse.ArgumentTypeError: If it is not one.
    """
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def make_parser(description: str | None, *, rounds: int = 3, minutes: float = 8.0) -> argparse.ArgumentParser:
    """A parser with the options of all benchmarks; the arguments are defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=("cpu", "gpu"), default="cpu", help="the cases (default: cpu)")
    parser.add_argument(
        "--minutes", type=float, default=minutes, help=f"no new round or case after this (default: {minutes:g})"
    )
    add_common(parser, rounds)
    return parser


def add_common(parser: argparse.ArgumentParser, rounds: int | None = None) -> None:
    """Add threads, clock and output, and rounds if there are any."""
    if rounds is not None:
        parser.add_argument(
            "--rounds", type=positive, default=rounds, help=f"how often each is timed (default: {rounds})"
        )
    parser.add_argument("--threads", type=positive, help="of PyTorch; default: as many as PyTorch takes")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: processor time, with --threads 1")
    parser.add_argument("--output", type=Path, help="write OUTPUT.json, and OUTPUT.png where there is a figure")


def add_shape(parser: argparse.ArgumentParser, case: Case, *, without: tuple[str, ...] = ()) -> None:
    """Add an option for each size of a case; the help shows the defaults of the CPU profile."""
    for name in SHAPE_OPTIONS:
        if name not in without:
            default = getattr(case, name)
            kind = positive if isinstance(default, int) else type(default)
            parser.add_argument(f"--{name.replace('_', '-')}", dest=name, type=kind, help=f"cpu: {default}")


def add_memory(parser: argparse.ArgumentParser) -> None:
    """Add the option to skip memory."""
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="CPU: do not measure memory")


def change(case: Case, options: argparse.Namespace) -> Case:
    """The case with the sizes of the command line.

    Raises:
        SystemExit: If there is no such model.
    """
    given = {name: getattr(options, name, None) for name in SHAPE_OPTIONS}
    case = replace(case, **{name: size for name, size in given.items() if size is not None})
    if case.heads % case.kv_heads:
        raise SystemExit(f"--heads {case.heads} is not a multiple of --kv-heads {case.kv_heads}.")
    return case


def begin(options: argparse.Namespace) -> Conditions:
    """`begin_on` the device of the profile.

    Raises:
        SystemExit: If the profile needs a missing device.
    """
    if options.profile == "gpu" and not torch.cuda.is_available():
        raise SystemExit("--profile gpu needs a CUDA device and there is none; use --profile cpu.")
    return begin_on("cuda" if options.profile == "gpu" else "cpu", options)


def begin_on(device: str, options: argparse.Namespace) -> Conditions:
    """Set the number of threads, and print the conditions.

    Raises:
        SystemExit: If the device is missing.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda needs a CUDA device and there is none; use --device cpu.")
    conditions = Conditions.here(device, options.clock)
    print(f"conditions: {conditions}", flush=True)
    return conditions


def write_json(output: Path | None, conditions: Conditions | None, content: dict[str, Any]) -> None:
    """Write the results so far, if requested; benchmarks that only count have no conditions."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        written = content if conditions is None else {"conditions": asdict(conditions), **content}
        output.with_suffix(".json").write_text(json.dumps(written, indent=1) + "\n")
