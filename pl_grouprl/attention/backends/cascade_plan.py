"""Plans the attention calls for a forest under a layer's rule.

Segments are cut into *pieces* at chunk borders, across which there is no attention. Short pieces that follow each other
down the forest form a *chain* (see `CHAIN`). Every piece attends causally to its chain, which ends with the piece; all
descendants that start chains of their own attend to all of it, as one long run of queries. Under a window, each segment
attends in one call to itself and to the part of its prefix within the window. Tokens of a block (an image) attend to
later ones by a causal call on the block in reverse order.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch import Tensor

from pl_grouprl.attention.backends.kernels import VarlenCall
from pl_grouprl.attention.backends.rule import AttentionRule
from pl_grouprl.packing import SharedPrefixLayout

Index = slice | Tensor
"""Tokens of a packed row: a range, or their indices."""

LONG_RUN = {"cpu": 128, "cuda": 4096}
"""A piece with at least this many descendant queries gets a separate call, on slices. The others share one call per
depth, for which their tokens are gathered.

On CPU both take the same time at about 100 queries (measured: 16 prefixes of 64 tokens, 8 heads of 64). The CUDA value
is an estimate: a call forward and backward is about 50 microseconds of launches, and copying query, output and
gradients of a token with 32 heads of 128 takes about 20 nanoseconds at 3 TB/s, so they break even at 2,500 tokens;
calls not much longer do not fill a GPU.
"""


CHAIN = {"cpu": 128, "cuda": 0}
"""Most keys of a chain of several pieces; 0 makes no chains.

Each piece gets a copy of the keys of the pieces above it in its chain; in return, there are fewer calls and partial
outputs to merge. `python -m benchmarks forests` shows what they gain (docs/performance.md#forests). On CUDA chains are
not measured, so there are none.
"""

MOST_COPIES = 2
"""Most keys that a chain copies for a piece, per token of the piece."""


@dataclass(frozen=True)
class Step:
    """One call: which tokens query, and which keys of the row they attend to."""

    queries: Index
    keys: Index
    call: VarlenCall

    def to(self, device: torch.device) -> Step:
        """Move the indices to a device."""
        queries, keys = (i if isinstance(i, slice) else i.to(device) for i in (self.queries, self.keys))
        return Step(queries, keys, self.call)


@dataclass(frozen=True)
class CascadePlan:
    """The calls for a layout under a rule.

    Attributes:
        own: The call in which every token queries its own chain or window.
        others: Calls merged into that one: the chains above, by depth, and later tokens of a block.
        parts_of_query: Maximum number of calls in which a token is a query.
        parts_of_key: Maximum number of calls in which a token is a key.
    """

    own: Step
    others: tuple[Step, ...]
    parts_of_query: int
    parts_of_key: int


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of a segment.

    Attributes:
        start: Index of its first token in the row.
        stop: Index after its last token.
        parent: The piece that it continues, or None if it sees no earlier tokens.
    """

    start: int
    stop: int
    parent: int | None


@dataclass(frozen=True)
class Chain:
    """A piece and its nearest ancestors, to which it attends in one call.

    Attributes:
        keys: Tokens of these ancestors and of the piece, in order.
        parent: The piece directly above the first of these tokens, where another chain ends; None for a root.
        depth: Number of chains above.
    """

    keys: list[slice]
    parent: int | None
    depth: int


def plan_cascade(layout: SharedPrefixLayout, rule: AttentionRule, device: torch.device) -> CascadePlan:
    """Turn a layout into calls, once per layout, rule and device. Given tokens do not query."""
    if rule.window is None:
        pieces = cut(layout, rule.chunk)
        chains = _chains(pieces, CHAIN.get(device.type, CHAIN["cpu"]))
        own = _own_step(pieces, chains, layout.given)
        others = _ancestor_steps(pieces, chains, layout.given, LONG_RUN.get(device.type, LONG_RUN["cpu"]))
    else:
        own, others = _windowed(layout, rule.window), []
    others += [] if rule.blocks is None else _steps_ahead_in_blocks(rule.blocks)
    steps = (own, *others)
    return CascadePlan(
        own.to(device),
        tuple(step.to(device) for step in others),
        parts_of_query=_max_count([step.queries for step in steps], layout.num_queries),
        parts_of_key=_max_count([step.keys for step in steps], layout.num_tokens),
    )


def _max_count(indices: list[Index], tokens: int) -> int:
    """How many of the indices contain the most frequent token."""
    counts = torch.zeros(tokens, dtype=torch.long)
    for index in indices:
        if isinstance(index, slice):
            counts[index].add_(1)
        else:
            counts += index.bincount(minlength=tokens)
    return int(counts.max()) if tokens else 0


def cut(layout: SharedPrefixLayout, chunk: int | None) -> list[Piece]:
    """Cut segments into pieces, in row order."""
    pieces: list[Piece] = []
    last_of_segment: list[int | None] = []
    for segment in layout.segments:
        last = None if segment.parent is None else last_of_segment[segment.parent]
        left_of_chunk = segment.length if chunk is None else chunk - segment.position % chunk
        inner = range(segment.start + left_of_chunk, segment.stop, chunk or 1)
        borders = [segment.start, *inner, segment.stop]
        for start, stop in pairwise(borders):
            if start == stop:
                continue
            position = segment.position + start - segment.start
            forgets = chunk is not None and position % chunk == 0
            pieces.append(Piece(start, stop, None if forgets else last))
            last = len(pieces) - 1
        last_of_segment.append(last)
    return pieces


def longest_block(blocks: tuple[int, ...]) -> int:
    """Length of the longest block."""
    return max((stop - start for start, stop in _blocks(blocks)), default=0)


def _blocks(blocks: tuple[int, ...]) -> list[tuple[int, int]]:
    runs, start = [], 0
    for number, members in groupby(blocks):
        stop = start + sum(1 for _ in members)
        if number >= 0:
            runs.append((start, stop))
        start = stop
    return runs


def _steps_ahead_in_blocks(blocks: tuple[int, ...]) -> list[Step]:
    """Each token of a block attends to later ones: in reverse order, a causal call that excludes the token itself."""
    runs = [(start, stop) for start, stop in _blocks(blocks) if stop - start > 1]
    if not runs:
        return []
    queries = torch.cat([torch.arange(stop - 2, start - 1, -1) for start, stop in runs])
    keys = torch.cat([torch.arange(stop - 1, start, -1) for start, stop in runs])
    lengths = tuple(stop - start - 1 for start, stop in runs)
    return [Step(queries, keys, VarlenCall(lengths, lengths, causal=True))]


def _chains(pieces: list[Piece], most_keys: int) -> list[Chain]:
    """The chain that ends with each piece."""
    chains: list[Chain] = []
    for piece in pieces:
        own = slice(piece.start, piece.stop)
        above = None if piece.parent is None else chains[piece.parent]
        if above is not None and _continues(above, piece.stop - piece.start, most_keys):
            keys = above.keys.copy()
            _extend(keys, own)
            chains.append(Chain(keys, above.parent, above.depth))
        else:
            chains.append(Chain([own], piece.parent, 0 if above is None else above.depth + 1))
    return chains


def _continues(chain: Chain, length: int, most_keys: int) -> bool:
    """Whether a piece of this length continues its parent's chain.

    It never continues a root, whose descendants are one long run of queries. So prompts with rollouts have no chains.
    """
    copied = _length(chain.keys)
    return chain.parent is not None and copied + length <= most_keys and copied <= MOST_COPIES * length


def _own_step(pieces: list[Piece], chains: list[Chain], given: int) -> Step:
    """The call in which every piece attends to its chain."""
    queries = [slice(piece.start - given, piece.stop - given) for piece in pieces if piece.start >= given]
    keys = [chain.keys for piece, chain in zip(pieces, chains, strict=True) if piece.start >= given]
    call = VarlenCall(tuple(_length([run]) for run in queries), tuple(_length(runs) for runs in keys), causal=True)
    return Step(_index(queries), _index([run for runs in keys for run in runs]), call)


def _ancestor_steps(pieces: list[Piece], chains: list[Chain], given: int, long_run: int) -> list[Step]:
    below: dict[int, list[slice]] = {}
    for piece, chain in zip(pieces, chains, strict=True):
        above = chain.parent if piece.start >= given else None
        while above is not None:
            _extend(below.setdefault(above, []), slice(piece.start - given, piece.stop - given))
            above = chains[above].parent
    steps = []
    for depth in sorted({chains[number].depth for number in below}):
        short = []
        for number in sorted(below):
            if chains[number].depth != depth:
                continue
            if len(below[number]) == 1 and _length(below[number]) >= long_run:
                steps.append(_unmasked(chains, below, [number]))
            else:
                short.append(number)
        if short:
            steps.append(_unmasked(chains, below, short))
    return steps


def _unmasked(chains: list[Chain], below: dict[int, list[slice]], numbers: list[int]) -> Step:
    """A call in which the queries below each of these pieces attend to all of its chain."""
    keys = [chains[number].keys for number in numbers]
    call = VarlenCall(
        tuple(_length(below[number]) for number in numbers), tuple(_length(runs) for runs in keys), causal=False
    )
    return Step(
        _index([run for number in numbers for run in below[number]]),
        _index([run for runs in keys for run in runs]),
        call,
    )


def _length(runs: list[slice]) -> int:
    return sum(run.stop - run.start for run in runs)


def _windowed(layout: SharedPrefixLayout, window: int) -> Step:
    keys: list[slice] = []
    query_lens, key_lens = [], []
    for segment in layout.segments:
        if not segment.length or segment.start < layout.given:
            continue
        tail = _tail(layout, segment.parent, window - 1)
        keys += [*tail, slice(segment.start, segment.stop)]
        query_lens.append(segment.length)
        key_lens.append(segment.length + _length(tail))
    call = VarlenCall(tuple(query_lens), tuple(key_lens), causal=True, window=window)
    return Step(slice(0, layout.num_queries), _index(keys), call)


def _tail(layout: SharedPrefixLayout, index: int | None, wanted: int) -> list[slice]:
    """The last tokens of the path ending with a segment, in order."""
    runs: list[slice] = []
    while index is not None and wanted > 0:
        segment = layout.segments[index]
        taken = min(wanted, segment.length)
        if taken:
            runs.append(slice(segment.stop - taken, segment.stop))
        wanted -= taken
        index = segment.parent
    return runs[::-1]


def _extend(runs: list[slice], run: slice) -> None:
    if runs and runs[-1].stop == run.start:
        runs[-1] = slice(runs[-1].start, run.stop)
    else:
        runs.append(run)


def _index(runs: list[slice]) -> Index:
    joined: list[slice] = []
    for run in runs:
        _extend(joined, run)
    if len(joined) < 2:
        return joined[0] if joined else slice(0, 0)
    return torch.cat([torch.arange(run.start, run.stop) for run in joined])
