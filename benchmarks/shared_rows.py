"""The search for common prefixes in padded rows, as in the transparent mode, which runs it once per call.

`python -m benchmarks shared-rows --help` lists the options.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import time_in_turns
from benchmarks.options import add_common, begin_on, write_json
from pl_grouprl.attention.padded_rows import share_rows

SIZES = ((64, 2048), (80, 8192))
"""Rows and tokens of a row."""
GROUP, VOCABULARY = 8, 151_936
"""Rows that share three quarters of their tokens, and the number of token ids."""


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Parse the command line, measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser, rounds=5)
    options = parser.parse_args(arguments)
    conditions = begin_on("cpu", options)
    results = []
    for rows, tokens in SIZES:
        for kind, make in (("random", random_rows), (f"groups of {GROUP}", grouped_rows)):
            search = partial(share_rows, make(rows, tokens))
            search()
            timing = time_in_turns({kind: search}, options.rounds, clock=options.clock)[kind]
            results.append({"rows": rows, "tokens": tokens, "kind": kind, "seconds": timing.seconds})
            low, high = min(timing.seconds), max(timing.seconds)
            print(
                f"[{rows}, {tokens}] {kind:12} {1e3 * timing.median:7.1f} ms ({1e3 * low:.1f}-{1e3 * high:.1f})",
                flush=True,
            )
    write_json(options.output, conditions, {"results": results})
    return results


def random_rows(rows: int, tokens: int) -> Tensor:
    """Rows without a common prefix, shape [rows, tokens]."""
    return torch.randint(VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(0))


def grouped_rows(rows: int, tokens: int) -> Tensor:
    """Rows of which groups share the first three quarters."""
    ids = random_rows(rows, tokens)
    first = torch.arange(rows) // GROUP * GROUP
    shared = 3 * tokens // 4
    ids[:, :shared] = ids[first, :shared]
    return ids
