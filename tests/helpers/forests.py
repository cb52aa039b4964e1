"""Random forests of segments, and what attention over them is by its definition: one sequence at a time.

Nothing here uses the package, so that it can be an oracle for it.

Legend: T packed tokens, H query heads, K key/value heads, D head size of queries and keys, V of values.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor


class Forest(NamedTuple):
    lengths: list[int]
    parents: list[int | None]


def random_forest(seed: int, depth: int, roots: int = 2, lengths: tuple[int, ...] = (1, 2, 3, 5, 8)) -> Forest:
    """A forest whose deepest segment has `depth` ancestors; uneven, with lone roots, lone children, empty segments."""
    rng = random.Random(f"{seed} {depth} {roots}")
    forest = Forest([], [])

    def grow(parent: int | None, left: int, spine: bool) -> None:
        me = len(forest.lengths)
        children = (rng.randint(1, 4) if spine else rng.choice((0, 0, 1, 2, 3))) if left else 0
        empty = parent is not None and not spine and rng.random() < 0.2
        forest.lengths.append(0 if empty else rng.choice(lengths))
        forest.parents.append(parent)
        deepest = rng.randrange(children) if children else 0
        for child in range(children):
            grow(me, left - 1, spine and child == deepest)

    for root in range(roots):
        grow(None, depth, root == 0)
    return forest


def tokens_of(forest: Forest) -> list[range]:
    """The packed tokens of each segment."""
    starts = [sum(forest.lengths[:index]) for index in range(len(forest.lengths))]
    return [range(start, start + length) for start, length in zip(starts, forest.lengths, strict=True)]


def sequences(forest: Forest) -> list[list[int]]:
    """The packed tokens from the root to each segment without children: what a repeated run would encode."""
    tokens, found = tokens_of(forest), []
    for leaf in range(len(forest.lengths)):
        if leaf in forest.parents:
            continue
        path, index = [], leaf
        while index is not None:
            path = [*tokens[index], *path]
            index = forest.parents[index]
        found.append(path)
    return found


def visible_by_definition(forest: Forest) -> Tensor:
    """Token t sees token u if u stands before t, or is t, in a sequence that holds both; shape [T, T]."""
    seen = torch.zeros(sum(forest.lengths), sum(forest.lengths), dtype=torch.bool)
    for sequence in sequences(forest):
        for place, token in enumerate(sequence):
            seen[token, sequence[: place + 1]] = True
    return seen


class Rule(NamedTuple):
    """What a layer's attention is beyond plain causal softmax.

    `blocks` numbers tokens of the packed row that see each other both ways (-1 for none); a window holds inside a
    block too (`and(window, or(causal, block))`) unless `window_bounds_blocks` is False (`or(and(window, causal),
    block)`).
    """

    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    blocks: tuple[int, ...] | None = None
    window_bounds_blocks: bool = True


PLAIN = Rule()


def visible_in_sequence(sequence: list[int], rule: Rule) -> Tensor:
    """Which place of a sequence (row) sees which (column)."""
    query, key = torch.arange(len(sequence))[:, None], torch.arange(len(sequence))
    causal = key <= query
    near = torch.ones_like(causal)
    if rule.window is not None:
        near = near & (key > query - rule.window)
    if rule.chunk is not None:
        near = near & (key // rule.chunk == query // rule.chunk)
    block = torch.tensor([-1 if rule.blocks is None else rule.blocks[token] for token in sequence])
    in_one_block = (block[:, None] == block) & (block >= 0)
    return near & (causal | in_one_block) if rule.window_bounds_blocks else (near & causal) | in_one_block


def attention_by_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    forest: Forest,
    scale: float,
    rule: Rule = PLAIN,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Softmax attention of each sequence on its own; [1, H, T, D], [1, K, T, D] and [1, K, T, V] to [1, T, H, V].

    A token of several sequences takes its output from the first; they are equal, which is checked. Gradients come
    back to the packed tensors through the repetition. Each head's sink is one more score, with a value of zero.
    """
    repeats = query.shape[1] // key.shape[1]
    rows: dict[int, Tensor] = {}
    for sequence in sequences(forest):
        q = query[0][:, sequence]
        k, v = (tensor[0][:, sequence].repeat_interleave(repeats, dim=0) for tensor in (key, value))
        scores = (q @ k.transpose(1, 2)) * scale
        if rule.softcap is not None:
            scores = torch.tanh(scores / rule.softcap) * rule.softcap
        scores = scores.masked_fill(~visible_in_sequence(sequence, rule), float("-inf"))
        if sinks_H is not None:
            scores = torch.cat([scores, sinks_H[:, None, None].expand(-1, len(sequence), 1)], dim=-1)
            v = torch.cat([v, torch.zeros_like(v[:, :1])], dim=1)
        out = (scores.softmax(-1) @ v).transpose(0, 1)
        for place, token in enumerate(sequence):
            if token in rows:
                torch.testing.assert_close(out[place], rows[token])
            rows.setdefault(token, out[place])
    return torch.stack([rows[token] for token in range(query.shape[2])])[None]


def random_blocks(seed: int, forest: Forest) -> tuple[int, ...]:
    """Numbers of blocks for the tokens of a forest, -1 for most; none reaches from a segment into another."""
    rng = random.Random(seed)
    blocks, number = [], 0
    for length in forest.lengths:
        while length > 0:
            run = min(rng.randint(1, 4), length)
            in_block = rng.random() < 0.6
            blocks += [number if in_block else -1] * run
            number += in_block
            length -= run
    return tuple(blocks)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected; below a norm of 0.1 (a lone token) over 0.1."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=0.1)).item()
