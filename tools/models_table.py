"""Tests which decoder families share prefixes exactly: builds a small model of each family in transformers and runs it.

    python tools/models_table.py                          # all families, printed
    python tools/models_table.py --families llama gemma2  # some
    python tools/models_table.py --write docs/models.md
    python tools/models_table.py --check docs/models.md   # exits 1 with a diff if the page is outdated

Exits 1 if a family is wrong without an error, or breaks in a way that is not a refusal.
"""

from __future__ import annotations

import argparse
import difflib
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from family_parity import Outcome, try_family
from models_page import page, statuses
from tiny_families import Family, families

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"


def sweep(
    chosen: Sequence[Family], *, workers: int = 2, timeout: float = 120.0, backend: str = "auto"
) -> list[Outcome]:
    """Try each family in its own process, so a crash or a hang does not affect the others.

    Args:
        chosen: The families.
        workers: Number of processes at a time.
        timeout: Seconds per family.
        backend: Attention backend of the shared path.
    """
    context = multiprocessing.get_context("fork")
    waiting, done = list(enumerate(chosen)), {}
    running: list[tuple[int, Family, Any, Connection, float]] = []
    while waiting or running:
        while waiting and len(running) < workers:
            number, family = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(family, backend, sender), daemon=True)
            process.start()
            sender.close()
            running.append((number, family, process, receiver, time.monotonic()))
        multiprocessing.connection.wait([receiver for *_, receiver, _ in running], timeout=1.0)
        for entry in list(running):
            number, family, process, receiver, started = entry
            if receiver.poll():
                done[number] = _receive(receiver, family, process)
            elif time.monotonic() - started > timeout:
                done[number] = Outcome(family, "not built", reason=f"It takes longer than {timeout:.0f} seconds.")
            else:
                continue
            process.kill()
            process.join()
            running.remove(entry)
            _report(done[number], time.monotonic() - started)
    return [done[number] for number in range(len(chosen))]


def _work(family: Family, backend: str, sender: Connection) -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    try:
        outcome = try_family(family, backend)
    except Exception as error:
        outcome = Outcome(family, "wrong", reason=f"{type(error).__name__}: {error}"[:300], expected=False)
    sender.send(outcome)


def _receive(receiver: Connection, family: Family, process: multiprocessing.process.BaseProcess) -> Outcome:
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        return Outcome(family, "not built", reason=f"Its process ended with code {process.exitcode}.")


def _report(outcome: Outcome, seconds: float) -> None:
    figures = f"{outcome.logprob:.1e} {outcome.gradient:.1e}" if outcome.logprob == outcome.logprob else ""
    strange = "" if outcome.expected else " (not one of our refusals)"
    print(
        f"{outcome.status:9} {outcome.family.name:32} {seconds:4.1f} s  {figures}{outcome.reason[:200]}{strange}",
        file=sys.stderr,
        flush=True,
    )


def select(names: Iterable[str] | None) -> list[Family]:
    """Families by model type or by name, variants included; all of them if None.

    Raises:
        ValueError: If a name is unknown.
    """
    known = families()
    if names is None:
        return known
    names = list(names)
    unknown = sorted(set(names) - {family.name for family in known} - {family.model_type for family in known})
    if unknown:
        raise ValueError(f"--families has {', '.join(unknown)}, which the installed transformers does not have.")
    return [family for family in known if family.name in names or family.model_type in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", help="model types or names of variants; all by default")
    parser.add_argument("--write", type=Path, help="the page to write")
    parser.add_argument("--check", type=Path, nargs="?", const=PAGE, help="a page to compare with")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    try:
        chosen = select(options.families)
    except ValueError as error:
        parser.error(str(error))
    outcomes = sweep(chosen, workers=options.workers, backend=options.backend)
    text = page(outcomes, options.backend)
    if options.write is not None:
        options.write.write_text(text, encoding="utf-8")
    elif options.check is None:
        print(text)
    differences = check(text, options.check, partial=options.families is not None) if options.check else []
    print("\n".join(differences))
    wrong = [one for one in outcomes if one.status == "wrong" or not one.expected]
    for one in wrong:
        print(f"{one.family.name}: {one.status}, {one.reason}", file=sys.stderr)
    return 1 if wrong or differences else 0


def check(text: str, written: Path, *, partial: bool) -> list[str]:
    """A diff between the results and a page; if `partial`, only of the families that were run."""
    found, said = statuses(text), statuses(written.read_text(encoding="utf-8"))
    if partial:
        said = {name: status for name, status in said.items() if name in found}
    old, new = ([f"{name}: {status}" for name, status in sorted(table.items())] for table in (said, found))
    return list(difflib.unified_diff(old, new, str(written), "now", lineterm="", n=0))


if __name__ == "__main__":
    sys.exit(main())
