"""Finds what token sequences have in common at their beginning: their trie, with few and long nodes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

MIN_SHARED_TOKENS = 32
"""Tokens that a node must save. A segment more costs each layer of the model a pass over its descendants."""

Tokens = Sequence[int]


class Node(NamedTuple):
    """A run of tokens that one or more sequences have in common.

    Attributes:
        parent: Index of the node that it continues; None at the beginning of a sequence.
        sequence: A sequence that holds its tokens.
        start: Index of its first token there.
        stop: Index after its last token there.
    """

    parent: int | None
    sequence: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


class Trie(NamedTuple):
    """Sequences as paths through nodes.

    Attributes:
        nodes: Depth-first: each node is directly followed by its descendants.
        leaves: The node without children that ends each sequence, in the caller's order; it may be empty.
    """

    nodes: tuple[Node, ...]
    leaves: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all nodes."""
        return sum(node.length for node in self.nodes)


def build_trie(sequences: Sequence[Tokens], min_shared_tokens: int | None = MIN_SHARED_TOKENS) -> Trie:
    """Lay out sequences as a trie, in which a node with children saves at least `min_shared_tokens`.

    Each sequence ends in a leaf of its own, so equal sequences, and one that another continues, end in empty leaves.

    Args:
        sequences: Token ids, of any number and length.
        min_shared_tokens: A node of n tokens that k sequences share saves (k - 1) n; with less, each branch keeps
            its own copy. At least 1; None shares nothing.

    Raises:
        ValueError: If `min_shared_tokens` is less than 1.
    """
    if min_shared_tokens is None:
        return separate([len(tokens) for tokens in sequences])
    if min_shared_tokens < 1:
        raise ValueError(f"min_shared_tokens is {min_shared_tokens}; pass 1 or more, or None to share nothing.")
    nodes: list[Node] = []
    leaves = [0] * len(sequences)
    order = sorted(range(len(sequences)), key=lambda number: list(sequences[number]))
    # To do: some sequences in lexicographic order, alike up to `start`, below a node. The last one is next.
    remaining: list[tuple[list[int], int, int, int | None]] = [(order, 0, 0, None)] if order else []
    while remaining:
        members, start, alike, parent = remaining.pop()
        first = sequences[members[0]]
        if len(members) == 1:
            leaves[members[0]] = len(nodes)
            nodes.append(Node(parent, members[0], start, len(first)))
            continue
        common = alike + _common_length(first[alike:], sequences[members[-1]][alike:])
        if (len(members) - 1) * (common - start) >= min_shared_tokens:
            nodes.append(Node(parent, min(members), start, common))
            start, parent = common, len(nodes) - 1
        branches = sorted(_branches(sequences, members, common), key=min, reverse=True)
        remaining += [(branch, start, common, parent) for branch in branches]
    return Trie(tuple(nodes), tuple(leaves))


def separate(lengths: Sequence[int]) -> Trie:
    """The trie of sequences of these lengths that share nothing."""
    return Trie(
        tuple(Node(None, number, 0, length) for number, length in enumerate(lengths)), tuple(range(len(lengths)))
    )


def _branches(sequences: Sequence[Tokens], members: list[int], common: int) -> list[list[int]]:
    """Part sequences by the token after those in common; one that ends there is a branch of its own."""
    ended = [[member] for member in members if len(sequences[member]) == common]
    going_on = members[len(ended) :]  # in lexicographic order, the ended ones come first
    return ended + [list(branch) for _, branch in groupby(going_on, key=lambda member: sequences[member][common])]


def _common_length(left: Tokens, right: Tokens) -> int:
    """How many tokens two sequences have in common at their beginning."""
    length = min(len(left), len(right))
    differ = np.flatnonzero(np.asarray(left[:length]) != np.asarray(right[:length]))
    return int(differ[0]) if len(differ) else length
