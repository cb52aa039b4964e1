"""Plans the batches in which a stateful layer runs the segments of a packed row.

Each segment starts from its parent's final state, so parents come first. Within that order, segments are batched.
Those whose final state is needed cannot be padded on the right; the others can, as no real token sees that padding.

Legend: T packed tokens that run, R runs of a batch, L length of its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from pl_grouprl.packing import SharedPrefixLayout

_MIN_FILLED = 0.75
"""Minimum fraction of a batch that is tokens, not padding."""


@dataclass(frozen=True)
class Batch:
    """Runs that start together: R rows of length L.

    Attributes:
        size: R and L.
        slots: Index of each token in the flattened batch [R * L], int64.
        tokens: Index of each of these tokens among the tokens that run, int64.
        starts: Index of the final state that each row starts from, shape [R], int64; None if all start from zero.
        keeps_state: Whether other runs start from the final states. These are numbered in batch order; the final state
            of prefilled tokens, if any, comes first.
    """

    size: tuple[int, int]
    slots: Tensor
    tokens: Tensor
    starts: Tensor | None
    keeps_state: bool


@dataclass(frozen=True)
class RunPlan:
    """How a packed row runs.

    Attributes:
        batches: In this order.
        outputs: Index of each token that runs among the tokens of all batches, shape [T], int64.
    """

    batches: tuple[Batch, ...]
    outputs: Tensor


@dataclass
class _Run:
    """Consecutive tokens that start from the final state of the run `start`, or from zero if None."""

    tokens: list[int]
    start: _Run | None
    level: int
    keeps_state: bool = False
    num_outputs: int = 0  # tokens at the end that belong to its segment; earlier ones are recomputed
    state: int = field(default=-1)  # index of its final state


def plan_runs(layout: SharedPrefixLayout, *, pad_roots: bool, device: torch.device) -> RunPlan:
    """Batch the segments of a layout.

    A one-token segment that starts from a state does not run for its final state: that would select decoding kernels,
    which have no gradient. Its children recompute the token instead, and its own output is computed with padding.

    Args:
        layout: The forest.
        pad_roots: Whether left-padding a root with zeros leaves its output and final state unchanged.
        device: Device of the indices.
    """
    runs = _runs(layout)
    batches: list[Batch] = []
    outputs = torch.empty(layout.num_queries, dtype=torch.long)
    num_states, num_tokens = int(layout.num_prefilled > 0), 0
    for group in _groups(runs, pad_roots):
        length = max(len(run.tokens) for run in group)
        keeps_state, starts = group[0].keeps_state, None
        if group[0].start is not None:
            length = max(length, 2)
            starts = torch.tensor([run.start.state for run in group if run.start is not None], device=device)
        slots: list[int] = []
        tokens: list[int] = []
        for row, run in enumerate(group):
            first = row * length + (length - len(run.tokens) if keeps_state else 0)
            slots += range(first, first + len(run.tokens))
            tokens += run.tokens
            output_tokens = run.tokens[len(run.tokens) - run.num_outputs :]
            outputs[output_tokens] = torch.arange(num_tokens + len(tokens) - run.num_outputs, num_tokens + len(tokens))
            if keeps_state:
                run.state, num_states = num_states, num_states + 1
        num_tokens += len(tokens)
        slot_index, token_index = (torch.tensor(index, device=device) for index in (slots, tokens))
        batches.append(Batch((len(group), length), slot_index, token_index, starts, keeps_state))
    return RunPlan(tuple(batches), outputs.to(device))


def _runs(layout: SharedPrefixLayout) -> list[_Run]:
    """The runs, parents before children."""
    leaves = set(layout.leaves)
    runs: list[_Run] = []
    continuations: list[_Run] = []  # per segment, the start and first tokens of its children's runs
    for index, segment in enumerate(layout.segments):
        above = _Run([], None, 0) if segment.parent is None else continuations[segment.parent]
        if segment.start < layout.num_prefilled:
            continuations.append(_Run([], _Run([], None, 0, keeps_state=True, state=0), 1))
            continue
        tokens = [*above.tokens, *range(segment.start - layout.num_prefilled, segment.stop - layout.num_prefilled)]
        run = _Run(tokens, above.start, above.level, num_outputs=segment.length)
        continuations.append(run)
        if index not in leaves and len(tokens) > (0 if run.start is None else 1):
            run.keeps_state = True
            continuations[-1] = _Run([], run, run.level + 1)
        if run.keeps_state or run.num_outputs:
            runs.append(run)
    return runs


def _groups(runs: list[_Run], pad_roots: bool) -> Iterator[list[_Run]]:
    """Group runs that may share a batch: those whose final state is needed, by level, then all others."""
    kept = [run for run in runs if run.keeps_state]
    for level, same_level in groupby(sorted(kept, key=lambda run: run.level), key=lambda run: run.level):
        yield from _by_length(same_level, 1.0 if level or not pad_roots else _MIN_FILLED)
    for from_nothing in (True, False):
        last = (run for run in runs if not run.keeps_state and (run.start is None) == from_nothing)
        yield from _by_length(last, _MIN_FILLED)


def _by_length(runs: Iterable[_Run], min_filled: float) -> Iterator[list[_Run]]:
    """Group runs of similar length, so at least `min_filled` of each batch is tokens."""
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
