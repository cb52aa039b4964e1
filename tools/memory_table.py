"""Estimates the memory of one GPU for Qwen3: what training holds, and what is left for tokens and rollouts.

    python tools/memory_table.py                            # printed
    python tools/memory_table.py --write docs/memory.md    # between the page's markers
    python tools/memory_table.py --check docs/memory.md    # exits 1 where the page differs

The formulas are those of `pl_grouprl.planning.memory`; the totals have not been measured on a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pl_grouprl.planning.memory import GIB, METHODS, SEQUENCE, Footprint, Method, footprint_of_method

SIZES: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
"""Qwen3 sizes by name; all have 8 key/value heads, head size 128 and a vocabulary of 151,936."""

GPUS = (24, 48, 80)
"""Memory in GiB."""

BEGIN, END = "<!-- memory table -->\n", "<!-- end of the memory table -->\n"


def qwen3(size: str) -> Any:
    """The config of a size."""
    from transformers import Qwen3Config

    common = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": size != "8B"}
    return Qwen3Config(**SIZES[size], **common)


@cache
def footprint(size: str, method: Method) -> Footprint:
    """Memory of a GPU for a size and a method."""
    return footprint_of_method(qwen3(size), method)


@dataclass(frozen=True)
class Room:
    """What is left on a GPU.

    Attributes:
        tokens: Largest `max_tokens_per_micro_batch` with gradient checkpointing; 0 or less if nothing fits.
        sequences: Number of sequences of `SEQUENCE` tokens that can be decoded at once.
    """

    tokens: int
    sequences: int

    def cells(self) -> tuple[str, str]:
        """Both as cells of the table."""
        if self.tokens < SEQUENCE or self.sequences < 1:
            return "-", "-"
        return short(self.tokens), str(self.sequences)


def room_on(gpu: int, held: Footprint) -> Room:
    """Compute what is left on a GPU with this many GiB."""
    return Room(held.largest_budget(gpu, True), held.cached_tokens(gpu) // SEQUENCE)


def short(tokens: int) -> str:
    """Tokens in thousands, rounded down to two significant digits: 12k, 1.5k."""
    digits = max(len(str(tokens)) - 2, 0)
    thousands = tokens // 10**digits * 10**digits / 1000
    return f"{thousands:g}k"


def table() -> str:
    """The rows in Markdown."""
    heads = [f"{what}, {gpu} GB" for what in ("tokens", "sequences") for gpu in GPUS]
    lines = [f"| Qwen3 | training | GiB held | {' | '.join(heads)} |", "|" + "---|" * (3 + len(heads))]
    for size in SIZES:
        for method in METHODS:
            held = footprint(size, method)
            gib = (held.policy.weights + held.policy.gradients + held.policy.moments + held.reference) / GIB
            tokens, sequences = zip(*(room_on(gpu, held).cells() for gpu in GPUS), strict=True)
            lines.append(f"| {size} | {method.name} | {' | '.join([f'{gib:.1f}', *tokens, *sequences])} |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """The page with the current table between its markers.

    Raises:
        ValueError: If a marker is missing.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no lines {BEGIN!r} and {END!r} between which the table goes.")
    return f"{before}{begin}{table()}{end}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print, write or check the table."""
    parser = argparse.ArgumentParser(description="Estimate the memory of one GPU for Qwen3.")
    parser.add_argument("--write", type=Path, metavar="PAGE")
    parser.add_argument("--check", type=Path, metavar="PAGE")
    options = parser.parse_args(arguments)
    path = options.write or options.check
    if path is None:
        print(table(), end="")
        return 0
    page = path.read_text(encoding="utf-8")
    current = with_table(page)
    if options.write:
        path.write_text(current, encoding="utf-8")
    elif page != current:
        print(f"{path} is outdated; update it with --write.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
