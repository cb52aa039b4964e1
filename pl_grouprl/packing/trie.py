"""Finds what token sequences have in common at their beginning: their trie, with few and long nodes.

Legend: C numbers that are compared for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MIN_SAVED_TOKENS = 16
"""What sharing must save. A segment more costs each layer of the model a pass over its descendants."""

Tokens = Sequence[int]
"""Token ids."""


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
        nodes: Depth-first: each node is directly followed by its descendants; siblings in the caller's order.
        leaves: The node without children that ends each sequence, in the caller's order; it may be empty.
    """

    nodes: tuple[Node, ...]
    leaves: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all nodes."""
        return sum(node.length for node in self.nodes)


def build_trie(
    sequences: Sequence[Tokens | np.ndarray],
    min_saved_tokens: int | None = MIN_SAVED_TOKENS,
    *,
    max_depth: int | None = None,
) -> Trie:
    """Lay out sequences as a trie, in which each node with children saves at least `min_saved_tokens`.

    Each sequence ends in a leaf of its own, so equal sequences, and one that another continues, end in empty leaves.

    Args:
        sequences: Token ids, or arrays of shape [tokens] or [tokens, C]; of any number and length.
        min_saved_tokens: A node of n tokens that k sequences share saves (k - 1) n; with less, each branch keeps its
            own copy. At least 1; None shares nothing.
        max_depth: Most nodes above a leaf; None is any number. 0 shares nothing.

    Raises:
        ValueError: If `min_saved_tokens` is less than 1.
    """
    if min_saved_tokens is None:
        return separate([len(tokens) for tokens in sequences])
    if min_saved_tokens < 1:
        raise ValueError(f"min_saved_tokens is {min_saved_tokens}; pass 1 or more, or None to share nothing.")
    branchings = _branchings(sequences)
    nodes: list[Node] = []
    leaves = [0] * len(sequences)
    # To do: branchings with the first of their tokens that is not yet in a node, below a node. The last one is next.
    remaining: list[tuple[int, int, int | None, int]] = [(0, 0, None, 0)] if branchings else []
    while remaining:
        index, start, parent, depth = remaining.pop()
        own = branchings[index]
        first = own.members[0]
        if not own.branches:
            leaves[first] = len(nodes)
            nodes.append(Node(parent, first, start, own.stop))
            continue
        if _is_kept(branchings, index, start, min_saved_tokens, max_depth and max_depth - depth):
            nodes.append(Node(parent, first, start, own.stop))
            start, parent, depth = own.stop, len(nodes) - 1, depth + 1
        below = own.branches if max_depth is None or depth < max_depth else _leaves(branchings, index)
        remaining += [(branch, start, parent, depth) for branch in reversed(below)]
    return Trie(tuple(nodes), tuple(leaves))


def separate(lengths: Sequence[int]) -> Trie:
    """The trie of sequences of these lengths that share nothing."""
    nodes = tuple(Node(None, number, 0, length) for number, length in enumerate(lengths))
    return Trie(nodes, tuple(range(len(lengths))))


class _Branching(NamedTuple):
    """Sequences that are alike up to a token, and there part.

    Attributes:
        members: The sequences, ascending.
        stop: Tokens that they have in common from their beginning; all tokens of a single one.
        branches: Indices of the branchings after it, in the order of their first members; none for a single sequence.
    """

    members: list[int]
    stop: int
    branches: list[int]


def _branchings(sequences: Sequence[Tokens | np.ndarray]) -> list[_Branching]:
    """All branchings, each before those after it."""
    found: list[_Branching] = []
    remaining: list[tuple[list[int], int, list[int]]] = [(list(range(len(sequences))), 0, [])] if sequences else []
    while remaining:
        members, alike, siblings = remaining.pop()
        first, *others = members
        stop = len(sequences[first])
        for other in others:
            stop = _common_length(sequences[first], sequences[other], alike, stop)
        siblings.append(len(found))
        found.append(_Branching(members, stop, []))
        if others:
            branches: dict[object, list[int]] = {}
            for member in members:
                branches.setdefault(_next_token(sequences[member], stop, member), []).append(member)
            remaining += [(branch, stop, found[-1].branches) for branch in reversed(branches.values())]
    return found


def _common_length(left: Tokens | np.ndarray, right: Tokens | np.ndarray, start: int, stop: int) -> int:
    """How many of the first `stop` tokens are alike, if the first `start` are."""
    stop, count = min(stop, len(right)), 32
    while start < stop:
        end = min(start + count, stop)
        ours, others = left[start:end], right[start:end]
        # Lists compare faster as lists.
        both_lists = isinstance(ours, list) and isinstance(others, list)
        if ours != others if both_lists else not np.array_equal(ours, others):
            differ = np.asarray(ours) != np.asarray(others)
            return start + int(np.argmax(differ.reshape(end - start, -1).any(axis=1)))
        start, count = end, 4 * count
    return stop


def _next_token(tokens: Tokens | np.ndarray, place: int, number: int) -> object:
    """What two sequences that go on alike have in common; a sequence that ends there has it for itself."""
    if place == len(tokens):
        return "end", number
    return tokens[place].tobytes() if isinstance(tokens, np.ndarray) else tokens[place]


def _is_kept(
    branchings: list[_Branching], index: int, start: int, min_saved_tokens: int, depth_left: int | None
) -> bool:
    """Whether what a branching has in common becomes a node."""
    saved = _saved(branchings[index], start)
    if saved < min_saved_tokens or depth_left == 0:
        return False
    # On the deepest level it competes with longer ones that fewer sequences share.
    return depth_left != 1 or saved >= _best_below(branchings, index, start, min_saved_tokens)


def _saved(own: _Branching, start: int) -> int:
    """Tokens that a node from `start` on saves."""
    return (len(own.members) - 1) * (own.stop - start)


def _best_below(branchings: list[_Branching], index: int, start: int, min_saved_tokens: int) -> int:
    """Most tokens that one level of nodes after a branching can save."""
    best: dict[int, int] = {}
    for own in reversed(_subtree(branchings, index)):
        below = sum(best[branch] for branch in branchings[own].branches)
        saved = _saved(branchings[own], start)
        best[own] = max(below, saved if saved >= min_saved_tokens and own != index else 0)
    return best[index]


def _subtree(branchings: list[_Branching], index: int) -> list[int]:
    """A branching and all after it, each before those after it."""
    found = [index]
    for own in found:
        found += branchings[own].branches
    return found


def _leaves(branchings: list[_Branching], index: int) -> list[int]:
    """The single sequences of a branching, ascending."""
    leaves = (own for own in _subtree(branchings, index) if not branchings[own].branches)
    return sorted(leaves, key=lambda own: branchings[own].members)
