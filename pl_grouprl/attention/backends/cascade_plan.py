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

from pl_grouprl.attention.backends.kernels import Index, VarlenCall
from pl_grouprl.attention.backends.rule import AttentionRule
from pl_grouprl.packing import SharedPrefixLayout

LONG_RUN = {"cpu": 128, "cuda": 4096}
"""A piece with at least this many descendant queries gets a separate call, on slices. The others share one call per
depth, for which their tokens are gathered.

On CPU both take the same time at about 100 queries (measured: 16 prefixes of 64 tokens, 8 heads of 64). The CUDA value
is an estimate: a call forward and backward is about 50 microseconds of launches, and copying query, output and
gradients of a token with 32 heads of 128 takes about 20 nanoseconds at 3 TB/s, so they break even at 2,500 tokens;
calls not much longer do not fill a GPU.
"""


CHAIN = {"cpu": 256, "cuda": 0}
"""Most keys of a chain of several pieces; 0 makes no chains.

Each piece gets a copy of the keys of the pieces above it in its chain; in return, there are fewer calls and partial
outputs to merge. `python -m benchmarks forests` shows what they gain (docs/performance.md#forests). On CUDA chains are
not measured, so there are none.
"""

MOST_COPIES = 4
"""Most keys that a chain copies for the children of a piece, per token of theirs."""


@dataclass(frozen=True)
class CascadePlan:
    """The calls for a layout under a rule.

    Attributes:
        own: The call in which every token queries its own chain or window.
        others: Calls merged into that one: the chains above, by depth, and later tokens of a block.
        parts_of_query: Maximum number of calls in which a token is a query.
        parts_of_key: Maximum number of calls in which a token is a key.
    """

    own: VarlenCall
    others: tuple[VarlenCall, ...]
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

    @property
    def tokens(self) -> slice:
        """Its tokens in the row."""
        return slice(self.start, self.stop)


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
    """Turn a layout into calls, once per layout, rule and device. Prefilled tokens do not query."""
    if rule.window is None:
        pieces = cut(layout, rule.chunk)
        chains = _chains(pieces, CHAIN.get(device.type, CHAIN["cpu"]))
        own = _own_call(pieces, chains, layout.num_prefilled)
        others = _ancestor_calls(pieces, chains, layout.num_prefilled, LONG_RUN.get(device.type, LONG_RUN["cpu"]))
    else:
        own, others = _windowed(layout, rule.window), []
    others += [] if rule.blocks is None else _calls_ahead_in_blocks(rule.blocks)
    calls = (own, *others)
    return CascadePlan(
        own.to(device),
        tuple(call.to(device) for call in others),
        parts_of_query=_max_count([call.queries for call in calls], layout.num_queries),
        parts_of_key=_max_count([call.keys for call in calls], layout.num_tokens),
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


def _calls_ahead_in_blocks(blocks: tuple[int, ...]) -> list[VarlenCall]:
    """Each token of a block attends to later ones: in reverse order, a causal call that excludes the token itself."""
    runs = [(start, stop) for start, stop in _blocks(blocks) if stop - start > 1]
    if not runs:
        return []
    queries = torch.cat([torch.arange(stop - 2, start - 1, -1) for start, stop in runs])
    keys = torch.cat([torch.arange(stop - 1, start, -1) for start, stop in runs])
    lengths = tuple(stop - start - 1 for start, stop in runs)
    return [VarlenCall(lengths, lengths, causal=True, queries=queries, keys=keys)]


def _chains(pieces: list[Piece], most_keys: int) -> list[Chain]:
    """The chain that ends with each piece. Either all children of a piece continue its chain, or none.

    Rollouts do not continue the chain of their prompt, a root below which there is nothing else: they are one long run
    of queries.
    """
    children: list[list[int]] = [[] for _ in pieces]
    for number, piece in enumerate(pieces):
        if piece.parent is not None:
            children[piece.parent].append(number)
    chains: dict[int, Chain] = {}
    for number, piece in enumerate(pieces):
        chain = chains.setdefault(number, Chain([piece.tokens], None, 0))  # of a root; others have theirs by now
        lengths = [_length([pieces[child].tokens]) for child in children[number]]
        deeper = piece.parent is not None or any(children[child] for child in children[number])
        joined = deeper and _worth_copying(_length(chain.keys), lengths, most_keys)
        for child in children[number]:
            keys = chain.keys.copy() if joined else []
            _extend(keys, pieces[child].tokens)
            chains[child] = Chain(keys, chain.parent, chain.depth) if joined else Chain(keys, number, chain.depth + 1)
    return [chains[number] for number in range(len(pieces))]


def _worth_copying(num_keys: int, lengths: list[int], most_keys: int) -> bool:
    """Whether the children of a piece, of these lengths, get a copy of the keys of its chain."""
    return num_keys + max(lengths, default=0) <= most_keys and num_keys * len(lengths) <= MOST_COPIES * sum(lengths)


def _own_call(pieces: list[Piece], chains: list[Chain], num_prefilled: int) -> VarlenCall:
    """The call in which every piece attends to its chain."""
    queries = [
        slice(piece.start - num_prefilled, piece.stop - num_prefilled)
        for piece in pieces
        if piece.start >= num_prefilled
    ]
    keys = [chain.keys for piece, chain in zip(pieces, chains, strict=True) if piece.start >= num_prefilled]
    return _call([[run] for run in queries], keys, causal=True)


def _ancestor_calls(pieces: list[Piece], chains: list[Chain], num_prefilled: int, long_run: int) -> list[VarlenCall]:
    below: dict[int, list[slice]] = {}
    for piece, chain in zip(pieces, chains, strict=True):
        above = chain.parent if piece.start >= num_prefilled else None
        while above is not None:
            _extend(below.setdefault(above, []), slice(piece.start - num_prefilled, piece.stop - num_prefilled))
            above = chains[above].parent
    calls = []
    for depth in sorted({chains[number].depth for number in below}):
        short = []
        for number in sorted(below):
            if chains[number].depth != depth:
                continue
            if len(below[number]) == 1 and _length(below[number]) >= long_run:
                calls.append(_unmasked(chains, below, [number]))
            else:
                short.append(number)
        if short:
            calls.append(_unmasked(chains, below, short))
    return calls


def _unmasked(chains: list[Chain], below: dict[int, list[slice]], numbers: list[int]) -> VarlenCall:
    """A call in which the queries below each of these pieces attend to all of its chain."""
    return _call([below[number] for number in numbers], [chains[number].keys for number in numbers], causal=False)


def _call(queries: list[list[slice]], keys: list[list[slice]], causal: bool, window: int | None = None) -> VarlenCall:
    """A call with these runs of the row for each problem."""
    return VarlenCall(
        tuple(map(_length, queries)), tuple(map(_length, keys)), causal, window, _index(queries), _index(keys)
    )


def _length(runs: list[slice]) -> int:
    return sum(run.stop - run.start for run in runs)


def _windowed(layout: SharedPrefixLayout, window: int) -> VarlenCall:
    queries, keys = [], []
    for segment in layout.segments:
        if not segment.length or segment.start < layout.num_prefilled:
            continue
        queries.append([slice(segment.start - layout.num_prefilled, segment.stop - layout.num_prefilled)])
        keys.append([*_tail(layout, segment.parent, window - 1), slice(segment.start, segment.stop)])
    return _call(queries, keys, causal=True, window=window)


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


def _index(problems: list[list[slice]]) -> Index:
    joined: list[slice] = []
    for run in (run for runs in problems for run in runs):
        _extend(joined, run)
    if len(joined) < 2:
        return joined[0] if joined else slice(0, 0)
    return torch.cat([torch.arange(run.start, run.stop) for run in joined])
