"""From a forest and a layer's rule to the calls that its attention takes.

Segments are cut into *pieces*: at the borders of chunks, where a piece forgets what came before, and at the borders of
blocks (images), which are not causal in themselves. Every piece attends to itself; all that lies below a piece attends
to it whole, as one long run of queries. Under a window, each piece attends to itself and to the short tail of its path
that the window reaches, in one call.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from pl_grouprl.attention.kernels import VarlenCall
from pl_grouprl.attention.rule import AttentionRule
from pl_grouprl.packing import SharedPrefixLayout

Index = slice | Tensor
"""Tokens of a packed row, one after another."""


@dataclass(frozen=True)
class Step:
    """One call: which tokens ask, which are asked."""

    queries: Index
    keys: Index
    call: VarlenCall


@dataclass(frozen=True)
class CascadePlan:
    """The calls that a layout takes under a rule.

    Attributes:
        own: Calls in which every token asks exactly once.
        ancestors: Calls whose results are merged into those, by depth of what is asked.
    """

    own: tuple[Step, ...]
    ancestors: tuple[Step, ...]


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of a segment.

    Attributes:
        start: Index of its first token in the row.
        stop: Index after its last.
        parent: The piece that it continues, or None if it sees nothing before itself.
        causal: Whether its tokens see only what is before them in it.
    """

    start: int
    stop: int
    parent: int | None
    causal: bool


def plan_cascade(layout: SharedPrefixLayout, rule: AttentionRule, device: torch.device) -> CascadePlan:
    """Turn a layout into calls; done once per layout, rule and device."""
    if rule.window is not None:
        return CascadePlan((_windowed(layout, rule.window, device),), ())
    pieces = cut(layout, rule)
    own = []
    for causal in (True, False):
        runs = [slice(piece.start, piece.stop) for piece in pieces if piece.causal is causal]
        if runs:
            lengths = tuple(run.stop - run.start for run in runs)
            index = _index(runs, device)
            own.append(Step(index, index, VarlenCall(lengths, lengths, causal=causal)))
    return CascadePlan(tuple(own), tuple(_ancestor_steps(pieces, device)))


def cut(layout: SharedPrefixLayout, rule: AttentionRule) -> list[Piece]:
    """Cut segments into pieces, in the order of the row."""
    pieces: list[Piece] = []
    last_of_segment: list[int | None] = []
    for segment in layout.segments:
        last = None if segment.parent is None else last_of_segment[segment.parent]
        borders = [segment.start, *_inner_borders(segment.start, segment.stop, segment.position, rule), segment.stop]
        for start, stop in pairwise(borders):
            if start == stop:
                continue
            position = segment.position + start - segment.start
            forgets = rule.chunk is not None and position % rule.chunk == 0
            causal = rule.blocks is None or rule.blocks[start] < 0
            pieces.append(Piece(start, stop, None if forgets else last, causal))
            last = len(pieces) - 1
        last_of_segment.append(last)
    return pieces


def _inner_borders(start: int, stop: int, position: int, rule: AttentionRule) -> list[int]:
    borders: set[int] = set()
    if rule.chunk is not None:
        first = start + (-position) % rule.chunk
        borders.update(range(first, stop, rule.chunk))
    if rule.blocks is not None:
        borders.update(i for i in range(start + 1, stop) if rule.blocks[i] != rule.blocks[i - 1])
    return sorted(borders - {start})


def _ancestor_steps(pieces: list[Piece], device: torch.device) -> list[Step]:
    depths: list[int] = []
    below: dict[int, list[slice]] = {}
    for piece in pieces:
        depths.append(0 if piece.parent is None else depths[piece.parent] + 1)
        above = piece.parent
        while above is not None:
            _extend(below.setdefault(above, []), slice(piece.start, piece.stop))
            above = pieces[above].parent
    steps = []
    for depth in sorted({depths[asked] for asked in below}):
        asked = [number for number in sorted(below) if depths[number] == depth]
        keys = [slice(pieces[number].start, pieces[number].stop) for number in asked]
        call = VarlenCall(
            tuple(sum(run.stop - run.start for run in below[number]) for number in asked),
            tuple(run.stop - run.start for run in keys),
            causal=False,
        )
        queries = [run for number in asked for run in below[number]]
        steps.append(Step(_index(queries, device), _index(keys, device), call))
    return steps


def _windowed(layout: SharedPrefixLayout, window: int, device: torch.device) -> Step:
    keys: list[slice] = []
    query_lens, key_lens = [], []
    for segment in layout.segments:
        if not segment.length:
            continue
        tail = _tail(layout, segment.parent, window - 1)
        keys += [*tail, slice(segment.start, segment.stop)]
        query_lens.append(segment.length)
        key_lens.append(segment.length + sum(run.stop - run.start for run in tail))
    call = VarlenCall(tuple(query_lens), tuple(key_lens), causal=True, window=window)
    return Step(slice(0, layout.num_tokens), _index(keys, device), call)


def _tail(layout: SharedPrefixLayout, index: int | None, wanted: int) -> list[slice]:
    """The last tokens of the path that ends with a segment, in order."""
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


def _index(runs: list[slice], device: torch.device) -> Index:
    joined: list[slice] = []
    for run in runs:
        _extend(joined, run)
    if len(joined) == 1:
        return joined[0]
    return torch.cat([torch.arange(run.start, run.stop) for run in joined]).to(device)
