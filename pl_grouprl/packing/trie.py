"""Builds a radix tree (compressed trie) of token sequences, which holds each shared prefix once.

Legend: C numbers per token in array sequences; tokens are equal if all C are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MIN_SAVED_TOKENS = 16
"""Minimum number of tokens that a shared node must save.

Each extra segment costs every layer a pass over its descendants.
"""

Tokens = Sequence[int]
"""Token ids."""


class Node(NamedTuple):
    """A run of tokens that one or more sequences share.

    Attributes:
        parent: Index of its parent node; None at the beginning of a sequence.
        sequence: Index of one sequence that contains its tokens.
        start: Index of its first token in that sequence.
        stop: Index after its last token in that sequence.
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
        leaves: Index of the leaf node that ends each sequence, in the caller's order; the node may be empty.
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
    """Build the trie of sequences, sharing a run of tokens only if that saves at least `min_saved_tokens`.

    Each sequence ends in its own leaf. The leaf is empty if the sequence equals another one or is a prefix of it.

    Args:
        sequences: Token ids, or arrays of shape [tokens] or [tokens, C]; of any number and length.
        min_saved_tokens: A node of n tokens that k sequences share saves (k - 1) n; if that is less, each branch keeps
            its own copy. At least 1; None shares nothing.
        max_depth: Maximum number of nodes above a leaf; None for no limit. 0 shares nothing.

    Raises:
        ValueError: If `min_saved_tokens` is less than 1.
    """
    if min_saved_tokens is None:
        return separate([len(tokens) for tokens in sequences])
    if min_saved_tokens < 1:
        raise ValueError(f"min_saved_tokens is {min_saved_tokens}; pass 1 or more, or None to share nothing.")
    radix_nodes = _radix_tree(sequences)
    nodes: list[Node] = []
    leaves = [0] * len(sequences)
    # Stack of (radix node, first token not yet in a node, parent, depth).
    pending: list[tuple[int, int, int | None, int]] = [(0, 0, None, 0)] if radix_nodes else []
    while pending:
        index, start, parent, depth = pending.pop()
        radix_node = radix_nodes[index]
        first = radix_node.members[0]
        if not radix_node.children:
            leaves[first] = len(nodes)
            nodes.append(Node(parent, first, start, radix_node.stop))
            continue
        depth_left = None if max_depth is None else max_depth - depth
        if _is_kept(radix_nodes, index, start, min_saved_tokens, depth_left):
            nodes.append(Node(parent, first, start, radix_node.stop))
            start, parent, depth = radix_node.stop, len(nodes) - 1, depth + 1
        children = radix_node.children if max_depth is None or depth < max_depth else _leaves(radix_nodes, index)
        pending += [(child, start, parent, depth) for child in reversed(children)]
    return Trie(tuple(nodes), tuple(leaves))


def separate(lengths: Sequence[int]) -> Trie:
    """The trie of sequences of these lengths that share nothing."""
    nodes = tuple(Node(None, number, 0, length) for number, length in enumerate(lengths))
    return Trie(nodes, tuple(range(len(lengths))))


class _RadixNode(NamedTuple):
    """A node of the full radix tree, before runs that save too little are dropped.

    Attributes:
        members: The sequences that pass through it, ascending.
        stop: Length of their common prefix; for a leaf, of the whole sequence.
        children: Indices of its children, in the order of their first members; none for a single sequence.
    """

    members: list[int]
    stop: int
    children: list[int]


def _radix_tree(sequences: Sequence[Tokens | np.ndarray]) -> list[_RadixNode]:
    """The nodes of the full radix tree, parents first."""
    nodes = [_make_radix_node(sequences, list(range(len(sequences))), 0)] if sequences else []
    for members, stop, children in nodes:  # grows meanwhile
        if len(members) == 1:
            continue
        branches: dict[object, list[int]] = {}
        for member in members:
            branches.setdefault(_branch_key(sequences[member], stop, member), []).append(member)
        for branch in branches.values():
            children.append(len(nodes))
            nodes.append(_make_radix_node(sequences, branch, stop))
    return nodes


def _make_radix_node(sequences: Sequence[Tokens | np.ndarray], members: list[int], num_equal: int) -> _RadixNode:
    """A node without its children. Its members are known to be equal in their first `num_equal` tokens."""
    first, *others = members
    stop = len(sequences[first])
    for other in others:
        if stop == num_equal:
            break
        stop = _common_length(sequences[first], sequences[other], num_equal, stop)
    return _RadixNode(members, stop, [])


def _common_length(left: Tokens | np.ndarray, right: Tokens | np.ndarray, start: int, stop: int) -> int:
    """Length of the common prefix, at most `stop`. The first `start` tokens are known to be equal."""
    if isinstance(left, list) and isinstance(right, list) and left == right:
        return stop
    stop, count = min(stop, len(right)), 32
    while start < stop:
        end = min(start + count, stop)
        ours, others = left[start:end], right[start:end]
        if isinstance(ours, list) and isinstance(others, list):  # faster than NumPy
            if ours != others:
                return start + next(place for place, (a, b) in enumerate(zip(ours, others, strict=True)) if a != b)
        elif not np.array_equal(ours, others):
            differ = np.asarray(ours) != np.asarray(others)
            return start + int(np.argmax(differ.reshape(end - start, -1).any(axis=1)))
        start, count = end, 4 * count
    return stop


def _branch_key(tokens: Tokens | np.ndarray, position: int, sequence: int) -> object:
    """Equal for sequences with the same token at `position`; unique for one that ends there."""
    if position == len(tokens):
        return "end", sequence
    return tokens[position].tobytes() if isinstance(tokens, np.ndarray) else tokens[position]


def _is_kept(
    radix_nodes: list[_RadixNode], index: int, start: int, min_saved_tokens: int, depth_left: int | None
) -> bool:
    """Whether the tokens from `start` to the end of a radix node become a node of the trie."""
    saved = _saved(radix_nodes[index], start)
    if saved < min_saved_tokens or depth_left == 0:
        return False
    # On the deepest level it competes with longer nodes that fewer sequences share.
    return depth_left != 1 or saved >= _best_below(radix_nodes, index, start, min_saved_tokens)


def _saved(radix_node: _RadixNode, start: int) -> int:
    """Tokens saved by sharing those from `start` to the end of a radix node."""
    return (len(radix_node.members) - 1) * (radix_node.stop - start)


def _best_below(radix_nodes: list[_RadixNode], index: int, start: int, min_saved_tokens: int) -> int:
    """Most tokens that a single level of nodes below this one can save."""
    best: dict[int, int] = {}
    for number in reversed(_subtree(radix_nodes, index)):
        below = sum(best[child] for child in radix_nodes[number].children)
        saved = _saved(radix_nodes[number], start)
        best[number] = max(below, saved if saved >= min_saved_tokens and number != index else 0)
    return best[index]


def _subtree(radix_nodes: list[_RadixNode], index: int) -> list[int]:
    """A radix node and its descendants, parents first."""
    found = [index]
    for number in found:
        found += radix_nodes[number].children
    return found


def _leaves(radix_nodes: list[_RadixNode], index: int) -> list[int]:
    """The leaves below a radix node, in the order of their sequences."""
    leaves = (number for number in _subtree(radix_nodes, index) if not radix_nodes[number].children)
    return sorted(leaves, key=lambda number: radix_nodes[number].members)
