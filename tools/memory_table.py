"""Memory of one GPU for Qwen3, counted: what training holds, and what is left for tokens and for rollouts.

    python tools/memory_table.py                            # printed
    python tools/memory_table.py --write docs/scaling.md    # between the page's markers
    python tools/memory_table.py --check docs/scaling.md    # exits 1 where the page differs

Weights, gradients and moments are counted exactly, from the shapes of the models' parameters. Activations follow a
formula whose coefficients were counted for PyTorch's operations of a Qwen3 layer under `bf16-mixed`;
tests/integration/test_memory_table.py compares both with what small models allocate. No GPU has measured the totals.

Legend: D hidden size, N query heads, K key/value heads, H head size, I intermediate size, V vocabulary.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

SIZES: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
"""Qwen3 by name; 8 key/value heads, head size 128 and a vocabulary of 151,936 are common to all."""

GPUS = (24, 48, 80)
"""Memory in GiB."""

USABLE = 0.9
"""Share of a GPU's memory that is counted on; the rest is for CUDA, the allocator and what is not counted."""

SEQUENCE = 1024
"""Tokens of a sequence in the cache."""

RANK = 16
"""Rank of the adapters, on all linear layers of the decoder."""

BEGIN, END = "<!-- memory table -->\n", "<!-- end of the memory table -->\n"


@dataclass(frozen=True)
class Method:
    """What is trained, and how it is stored.

    Attributes:
        name: In the table.
        trains_all: Train all weights, in float32; otherwise an adapter, in float32, on weights in bfloat16.
        state_bits: Of the optimizer.
        four_bits: Store the linear layers of the frozen base in 4 bits, with scales of 8 bits.
        has_reference: Keep a copy of the initial policy (`beta` above 0); an adapter needs none.
    """

    name: str
    trains_all: bool
    state_bits: int = 32
    four_bits: bool = False
    has_reference: bool = False


METHODS = (
    Method("AdamW", True),
    Method("AdamW, `beta` > 0", True, has_reference=True),
    Method("8-bit AdamW", True, 8),
    Method("8-bit AdamW, `beta` > 0", True, 8, has_reference=True),
    Method("LoRA", False),
    Method("4 bits and LoRA", False, four_bits=True),
)


@dataclass(frozen=True)
class Fixed:
    """Bytes that do not depend on the number of tokens.

    Attributes:
        weights: Of the policy, with an adapter and the scales of 4-bit weights.
        gradients: Of what is trained; kept until the next update begins.
        moments: Of AdamW.
        reference: Of the copy.
        copies: Weights that an update has in another dtype meanwhile: autocast's copies of the float32 matrices in
            bfloat16, and the largest 4-bit matrix, dequantized.
    """

    weights: int
    gradients: int
    moments: int
    reference: int
    copies: int

    @property
    def resident(self) -> int:
        """Bytes at any time, in rollouts too."""
        return self.weights + self.gradients + self.moments + self.reference


@cache
def qwen3(size: str) -> Any:
    """A model without data."""
    from transformers import Qwen3Config

    tied = size != "8B"
    common = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": tied}
    return empty_model(Qwen3Config(**SIZES[size], **common))


def empty_model(config: Any) -> Any:
    """A model on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def fixed_bytes(model: Any, method: Method, rank: int = RANK) -> Fixed:
    """Count the bytes of weights, gradients and moments under `bf16-mixed`."""
    matrices = [module.weight for module in model.model.modules() if isinstance(module, nn.Linear)]
    return _full_bytes(model, matrices, method) if method.trains_all else _adapter_bytes(model, matrices, method, rank)


def _full_bytes(model: Any, matrices: Sequence[nn.Parameter], method: Method) -> Fixed:
    embeddings = {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    count = sum(p.numel() for p in model.parameters())
    moments = sum(moment_bytes(p.numel(), method.state_bits, p in embeddings) for p in model.parameters())
    copies = 2 * sum(p.numel() for p in matrices)
    return Fixed(4 * count, 4 * count, moments, 4 * count * method.has_reference, copies)


def _adapter_bytes(model: Any, matrices: Sequence[nn.Parameter], method: Method, rank: int) -> Fixed:
    base = sum(four_bit_bytes(p.numel()) if method.four_bits else 2 * p.numel() for p in matrices)
    others = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in matrices)
    sizes = [rank * side for p in matrices for side in p.shape]
    adapter = sum(sizes)
    moments = sum(moment_bytes(size, method.state_bits) for size in sizes)
    copies = 2 * adapter + (2 * max(p.numel() for p in matrices) if method.four_bits else 0)
    return Fixed(base + 2 * others + 4 * adapter, 4 * adapter, moments, 0, copies)


def moment_bytes(size: int, bits: int, is_embedding: bool = False) -> int:
    """Both moments of a tensor; with 8 bits, a float32 scale for each block of 256 in either."""
    if bits == 32 or is_embedding or size < 4096:
        return 8 * size
    return 2 * (size + 4 * math.ceil(size / 256))


def four_bit_bytes(size: int) -> int:
    """A 4-bit matrix: codes, a scale of 8 bits for each 64 of them, and a float32 scale for each 256 scales."""
    scales = math.ceil(size / 64)
    return math.ceil(size / 2) + scales + 4 * math.ceil(scales / 256)


def kept_per_layer(config: Any, method: Method, rank: int = RANK) -> int:
    """Bytes per token that a layer keeps for its backward pass without checkpointing."""
    hidden, query, key, inner = _widths(config)
    heads = 8 * config.num_attention_heads + 4 * config.num_key_value_heads  # norms of heads, log-sum-exp
    if method.trains_all:
        return 26 * hidden + 10 * query + 10 * key + 8 * inner + heads + 8
    return 18 * hidden + 10 * query + 8 * key + 8 * inner + heads + 8 + 14 * rank


def working_per_token(config: Any, method: Method) -> int:
    """Bytes per token of the gradients inside the layer that is differentiated."""
    hidden, query, _, inner = _widths(config)
    return 8 * hidden + 2 * query + 4 * inner if method.trains_all else 14 * hidden + 6 * inner


def _widths(config: Any) -> tuple[int, int, int, int]:
    """D, N H, K H and I."""
    query, key = (own * config.head_dim for own in (config.num_attention_heads, config.num_key_value_heads))
    return config.hidden_size, query, key, config.intermediate_size


def bytes_per_token(config: Any, method: Method, checkpointing: bool, rank: int = RANK) -> tuple[int, int]:
    """Bytes per token of a micro-batch's activations.

    Returns:
        Those that the forward pass leaves, and those in addition while a layer is differentiated.
    """
    layers, kept = config.num_hidden_layers, kept_per_layer(config, method, rank)
    if not checkpointing:
        return layers * kept, working_per_token(config, method)
    stream = (4 if method.trains_all else 2) * config.hidden_size  # the input of a layer
    return layers * stream, kept + working_per_token(config, method)


def head_bytes(config: Any, method: Method) -> int:
    """Logits, kept for 512 tokens, and blocks of them; for a trained head also its new gradient."""
    logits = 512 * config.vocab_size
    return 3 * logits + 4 * config.vocab_size * config.hidden_size if method.trains_all else logits


def largest_budget(room: int, config: Any, method: Method, checkpointing: bool) -> int:
    """Most tokens whose activations fit; the head is done before the first layer is differentiated."""
    left, inside = bytes_per_token(config, method, checkpointing)
    return min(room // (left + inside), (room - head_bytes(config, method)) // left)


def cache_bytes_per_token(config: Any, method: Method) -> int:
    """Keys and values of a token in all layers; rollouts run in the dtype of the weights."""
    width = 4 if method.trains_all else 2
    return 2 * width * config.num_key_value_heads * config.head_dim * config.num_hidden_layers


@dataclass(frozen=True)
class Room:
    """What is left on a GPU.

    Attributes:
        tokens: Largest `max_tokens_per_micro_batch` with gradient checkpointing; 0 or less does not fit.
        tokens_without: The same without checkpointing.
        sequences: Sequences of `SEQUENCE` tokens that are decoded at once.
    """

    tokens: int
    tokens_without: int
    sequences: int

    def __str__(self) -> str:
        """A cell of the table."""
        if self.tokens < SEQUENCE or self.sequences < 1:
            return "-"
        without = short(self.tokens_without) if self.tokens_without >= SEQUENCE else "-"
        return f"{short(self.tokens)} ({without}), {self.sequences}"


def room_on(gpu: int, model: Any, method: Method) -> Room:
    """Compute what a GPU of so many GiB has left."""
    fixed, config = fixed_bytes(model, method), model.config
    usable = int(gpu * 2**30 * USABLE) - fixed.resident
    with_, without = (largest_budget(usable - fixed.copies, config, method, own) for own in (True, False))
    return Room(with_, without, usable // (SEQUENCE * cache_bytes_per_token(config, method)))


def short(tokens: int) -> str:
    """Tokens in thousands, rounded down to two digits: 12k, 1.5k."""
    digits = max(len(str(tokens)) - 2, 0)
    thousands = tokens // 10**digits * 10**digits / 1000
    return f"{thousands:g}k"


def table() -> str:
    """The rows in Markdown."""
    heads = [f"{gpu} GB" for gpu in GPUS]
    lines = [
        f"| Qwen3 | training | weights | gradients | moments | reference | {' | '.join(heads)} |",
        "|" + "---|" * (6 + len(heads)),
    ]
    for size in SIZES:
        model = qwen3(size)
        for method in METHODS:
            fixed = fixed_bytes(model, method)
            parts = [fixed.weights, fixed.gradients, fixed.moments, fixed.reference]
            numbers = [f"{part / 2**30:.2f}" if part else "" for part in parts]
            cells = [str(room_on(gpu, model, method)) for gpu in GPUS]
            lines.append(f"| {size} | {method.name} | {' | '.join([*numbers, *cells])} |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """A page with the table of today between its markers.

    Raises:
        ValueError: If a marker is missing.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no lines {BEGIN!r} and {END!r} to put the table between.")
    return f"{before}{begin}{table()}{end}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print, write or check the table."""
    parser = argparse.ArgumentParser(description="Memory of one GPU for Qwen3, counted.")
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
        print(f"{path} differs from the table; write it again with --write.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
