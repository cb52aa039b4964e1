"""In which batches the segments of a packed row are run by a layer that carries a state from token to token.

Each segment starts from the final state of its parent, so parents come first. Within that order, segments are batched:
those whose state nobody needs may be padded behind, which no real token sees; those whose state is needed may not.

Legend: T packed tokens that are run, R runs of a batch, L length of its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from pl_grouprl.packing import SharedPrefixLayout

_MIN_FILLED = 0.75
"""Least share of a batch's places that hold tokens, not padding."""


@dataclass(frozen=True)
class Batch:
    """Runs that start at the same time: rows of L places.

    Attributes:
        size: Number of rows R and of places L.
        places: Place in the flattened batch, R * L places, of each token, int64.
        tokens: Place among the tokens that are run of each of these tokens, int64.
        starts: Index of the final state that each row starts from, shape [R], int64; None where all start from nothing.
        keeps_state: Whether other runs start from the final states. They are counted in the order of the batches; where
            tokens are given, their final state comes before all others.
    """

    size: tuple[int, int]
    places: Tensor
    tokens: Tensor
    starts: Tensor | None
    keeps_state: bool


@dataclass(frozen=True)
class RunPlan:
    """How a packed row is run.

    Attributes:
        batches: In this order.
        outputs: For each token that is run its place among the tokens of all batches, shape [T], int64.
    """

    batches: tuple[Batch, ...]
    outputs: Tensor


@dataclass
class _Run:
    """Tokens run one after another, from the final state of the run `start`, or from nothing if that is None."""

    tokens: list[int]
    start: _Run | None
    level: int
    keeps_state: bool = False
    own: int = 0  # of the tokens, how many at the end are its segment's: the others are run again
    state: int = field(default=-1)  # index of its final state


def plan_runs(layout: SharedPrefixLayout, *, pad_roots: bool, device: torch.device) -> RunPlan:
    """Batch the segments of a layout.

    A single token on top of a state is not run for its final state: kernels for decoding, which have no gradient,
    take over there. Its children run it again, in front of their own tokens, and it is run for its output with padding.

    Args:
        layout: The forest.
        pad_roots: Whether zeros in front of a root leave its output and its final state as they are.
        device: Where the indices are to live.
    """
    runs = _runs(layout)
    batches: list[Batch] = []
    outputs = torch.empty(layout.num_queries, dtype=torch.long)
    num_states, num_tokens = int(layout.given > 0), 0
    for group in _groups(runs, pad_roots):
        length = max(len(run.tokens) for run in group)
        keeps_state, starts = group[0].keeps_state, None
        if group[0].start is not None:
            length = max(length, 2)
            starts = torch.tensor([run.start.state for run in group if run.start is not None], device=device)
        places: list[int] = []
        tokens: list[int] = []
        for row, run in enumerate(group):
            first = row * length + (length - len(run.tokens) if keeps_state else 0)
            places += range(first, first + len(run.tokens))
            tokens += run.tokens
            own = run.tokens[len(run.tokens) - run.own :]
            outputs[own] = torch.arange(num_tokens + len(tokens) - run.own, num_tokens + len(tokens))
            if keeps_state:
                run.state, num_states = num_states, num_states + 1
        num_tokens += len(tokens)
        place_index, token_index = (torch.tensor(index, device=device) for index in (places, tokens))
        batches.append(Batch((len(group), length), place_index, token_index, starts, keeps_state))
    return RunPlan(tuple(batches), outputs.to(device))


def _runs(layout: SharedPrefixLayout) -> list[_Run]:
    """What is to be run: parents before children."""
    leaves = set(layout.leaves)
    runs: list[_Run] = []
    handed_on: list[_Run] = []  # for each segment a run whose start and tokens its children begin with
    for index, segment in enumerate(layout.segments):
        above = _Run([], None, 0) if segment.parent is None else handed_on[segment.parent]
        if segment.start < layout.given:
            handed_on.append(_Run([], _Run([], None, 0, keeps_state=True, state=0), 1))
            continue
        tokens = [*above.tokens, *range(segment.start - layout.given, segment.stop - layout.given)]
        run = _Run(tokens, above.start, above.level, own=segment.length)
        handed_on.append(run)
        if index not in leaves and len(tokens) > (0 if run.start is None else 1):
            run.keeps_state = True
            handed_on[-1] = _Run([], run, run.level + 1)
        if run.keeps_state or run.own:
            runs.append(run)
    return runs


def _groups(runs: list[_Run], pad_roots: bool) -> Iterator[list[_Run]]:
    """Runs that make a batch: those with a final state that is needed, level by level, then all others."""
    kept = [run for run in runs if run.keeps_state]
    for level, same_level in groupby(sorted(kept, key=lambda run: run.level), key=lambda run: run.level):
        yield from _by_length(same_level, 1.0 if level or not pad_roots else _MIN_FILLED)
    for from_nothing in (True, False):
        last = (run for run in runs if not run.keeps_state and (run.start is None) == from_nothing)
        yield from _by_length(last, _MIN_FILLED)


def _by_length(runs: Iterable[_Run], min_filled: float) -> Iterator[list[_Run]]:
    """Runs of similar length, so that of a batch's places at least the share `min_filled` holds tokens."""
    batch: list[_Run] = []
    filled = 0
    for run in sorted(runs, key=lambda run: len(run.tokens), reverse=True):
        if batch and filled + len(run.tokens) < min_filled * (len(batch) + 1) * len(batch[0].tokens):
            yield batch
            batch, filled = [], 0
        batch.append(run)
        filled += len(run.tokens)
    if batch:
        yield batch
