"""Shared prefixes of token sequences as a radix tree, and groups laid out as a forest.

Legend: B rollouts, T packed tokens, N response tokens of all rollouts, concatenated, M response tokens of the row,
C numbers per token in array sequences (tokens are equal if all C are).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pl_grouprl.packing.layout import Segment, SharedPrefixLayout
from pl_grouprl.types import RolloutGroup

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
        max_depth: Maximum number of nodes above a leaf; no limit if None. 0 shares nothing.
    """
    if min_saved_tokens is None:
        return separate([len(tokens) for tokens in sequences])
    tree = _radix_tree(sequences)
    nodes: list[Node] = []
    leaves = [0] * len(sequences)
    # Stack of (radix node, first token not yet in a node, parent, depth).
    pending: list[tuple[int, int, int | None, int]] = [(0, 0, None, 0)] if tree else []
    while pending:
        index, start, parent, depth = pending.pop()
        members, stop, children = tree[index]
        first = members[0]
        if not children:
            leaves[first] = len(nodes)
            nodes.append(Node(parent, first, start, stop))
            continue
        depth_left = None if max_depth is None else max_depth - depth
        saved = (len(members) - 1) * (stop - start)
        # On the deepest level it competes with longer nodes that fewer sequences share.
        if (
            saved >= min_saved_tokens
            and depth_left != 0
            and (depth_left != 1 or saved >= _most_saved_below(tree, index, start, min_saved_tokens))
        ):
            nodes.append(Node(parent, first, start, stop))
            start, parent, depth = stop, len(nodes) - 1, depth + 1
        if max_depth is not None and depth >= max_depth:  # only leaves follow, in the order of their sequences
            below = (number for number in _subtree(tree, index) if not tree[number].children)
            children = sorted(below, key=lambda number: tree[number].members)
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

    def node(members: list[int], num_equal: int) -> _RadixNode:
        """A node whose members are known to be equal in their first `num_equal` tokens."""
        first, *others = members
        stop = len(sequences[first])
        for other in others:
            if stop == num_equal:
                break
            stop = _common_length(sequences[first], sequences[other], num_equal, stop)
        return _RadixNode(members, stop, [])

    nodes = [node(list(range(len(sequences))), 0)] if sequences else []
    for members, stop, children in nodes:  # grows meanwhile
        if len(members) == 1:
            continue
        branches: dict[object, list[int]] = {}
        for member in members:
            tokens = sequences[member]
            key: object = "end", member  # a sequence that ends here has its own branch
            if stop < len(tokens):
                key = tokens[stop].tobytes() if isinstance(tokens, np.ndarray) else tokens[stop]
            branches.setdefault(key, []).append(member)
        for branch in branches.values():
            children.append(len(nodes))
            nodes.append(node(branch, stop))
    return nodes


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


def _most_saved_below(tree: list[_RadixNode], index: int, start: int, min_saved_tokens: int) -> int:
    """Maximum number of tokens that a single level of nodes below this one can save."""
    best: dict[int, int] = {}
    for number in reversed(_subtree(tree, index)):
        members, stop, children = tree[number]
        below = sum(best[child] for child in children)
        saved = (len(members) - 1) * (stop - start)
        best[number] = max(below, saved if saved >= min_saved_tokens and number != index else 0)
    return best[index]


def _subtree(tree: list[_RadixNode], index: int) -> list[int]:
    """A radix node and its descendants, parents first."""
    found = [index]
    for number in found:
        found += tree[number].children
    return found


class SharedTokens(NamedTuple):
    """Maps the N response tokens of all rollouts to the M tokens of the row that encode them.

    Attributes:
        distinct_M: For each token of the row, the index of one response token that it encodes, int64.
        index_N: For each response token, the index of the token of the row that encodes it, int64.
    """

    distinct_M: Tensor
    index_N: Tensor


class Forest(NamedTuple):
    """A packed row of groups, with the places of the response tokens in it.

    Attributes:
        layout: The segments of the row.
        token_ids: Tokens of each segment.
        predict_index_N: Index in the row of the token that predicts each response token, int64.
        final_index_B: Index in the row of each rollout's last token, int64; for an empty rollout, of its prompt's last
            token.
        shared_tokens: Which response tokens share a token of the row; None if the row has no fewer tokens than the
            responses.
        ends: By group, the last segments of its prompt and of each rollout.
    """

    layout: SharedPrefixLayout
    token_ids: list[Tokens]
    predict_index_N: Tensor
    final_index_B: Tensor
    shared_tokens: SharedTokens | None
    ends: dict[int, tuple[int, list[int]]]


def lay_out_forest(
    groups: Sequence[RolloutGroup],
    *,
    share_across_groups: bool,
    min_saved_tokens: int | None,
    path: Tokens,
    prompts_first: bool = False,
) -> Forest:
    """Lay out each prompt once, and after it its rollouts, which share their common tokens; arguments as in `pack`.

    With `prompts_first`, all prompts come before all rollouts, unless a segment has grandchildren.
    """
    if share_across_groups and any(group.media for group in groups):
        raise ValueError("share_across_groups=True compares only tokens, and these prompts have images; pass False.")
    lengths: list[int] = []
    parents: list[int | None] = []
    group_ids: list[Hashable] = []
    token_ids: list[Tokens] = []

    def add(tokens: Tokens, parent: int | None, group: int) -> int:
        """Append a segment; return its index."""
        lengths.append(len(tokens))
        parents.append(parent)
        group_ids.append(group if groups[group].group_id is None else groups[group].group_id)
        token_ids.append(tokens)
        return len(lengths) - 1

    prompts = build_trie([group.prompt_ids for group in groups], min_saved_tokens if share_across_groups else None)
    group_of = {leaf: number for number, leaf in enumerate(prompts.leaves)}
    segments: list[int] = []  # of each node of the prompts
    ends: dict[int, tuple[int, list[int]]] = {}
    for index, node in enumerate(prompts.nodes):
        tokens = groups[node.sequence].prompt_ids[node.start : node.stop]
        segments.append(add(tokens, None if node.parent is None else segments[node.parent], node.sequence))
        if index not in group_of:
            continue
        number = group_of[index]
        root = add(path, segments[-1], number) if path else segments[-1]
        after_path = [rollout.token_ids[len(path) :] for rollout in groups[number].rollouts]
        has_images = any(rollout.media for rollout in groups[number].rollouts)  # which their tokens do not tell apart
        first, trie = len(lengths), build_trie(after_path, None if has_images else min_saved_tokens)
        for own in trie.nodes:
            tokens = after_path[own.sequence][own.start : own.stop]
            add(tokens, root if own.parent is None else first + own.parent, number)
        ends[number] = segments[-1], [first + leaf for leaf in trie.leaves]
    num_response_tokens = sum(lengths) - sum(lengths[segment] for segment in segments)
    if prompts_first and all(parent is None or parents[parent] is None for parent in parents):
        order = sorted(range(len(lengths)), key=lambda index: parents[index] is not None)
        lengths, token_ids = [lengths[index] for index in order], [token_ids[index] for index in order]
        group_ids, above = [group_ids[index] for index in order], [parents[index] for index in order]
        places = {index: place for place, index in enumerate(order)}
        parents = [None if parent is None else places[parent] for parent in above]
        ends = {group: (places[last], [places[leaf] for leaf in leaves]) for group, (last, leaves) in ends.items()}
    layout = SharedPrefixLayout(lengths, parents, group_ids)
    return Forest(layout, token_ids, *_places(layout, groups, ends, num_response_tokens), ends)


def _places(
    layout: SharedPrefixLayout,
    groups: Sequence[RolloutGroup],
    ends: Mapping[int, tuple[int, list[int]]],
    num_response_tokens: int,
) -> tuple[Tensor, Tensor, SharedTokens | None]:
    """The fields of a `Forest` before `ends`, from the last segments of each prompt and its rollouts."""
    runs: list[tuple[int, int]] = []  # first token and number of tokens
    before: list[int] = []  # the last token of each rollout's prompt
    for number, group in enumerate(groups):
        prompt, leaves = ends[number]
        last = layout.segments[prompt]
        while last.length == 0 and last.parent is not None:  # an empty segment has no last token
            last = layout.segments[last.parent]
        before += [last.stop - 1] * len(leaves)
        for rollout, leaf in zip(group.rollouts, leaves, strict=True):
            below: list[Segment] = []
            index: int | None = leaf
            while index is not None and index > prompt:  # parents precede their children
                below.append(layout.segments[index])
                index = below[-1].parent
            remaining = len(rollout.token_ids)
            for segment in reversed(below):
                length = min(segment.length, remaining)  # a rollout that is a prefix of the path ends within it
                runs.append((segment.start, length))
                remaining -= length
    starts, lengths = np.array(runs, np.int64).reshape(-1, 2).T
    places_N = np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    lengths_B = np.array([len(rollout.token_ids) for group in groups for rollout in group.rollouts], np.int64)
    before_B, nonempty, stops_B = np.array(before, np.int64), lengths_B > 0, np.cumsum(lengths_B)
    predict_N, final_B = np.roll(places_N, 1), before_B.copy()
    predict_N[(stops_B - lengths_B)[nonempty]] = before_B[nonempty]
    final_B[nonempty] = places_N[stops_B[nonempty] - 1]
    shared = None
    if len(places_N) != num_response_tokens:
        _, distinct_M, index_N = np.unique(places_N, return_index=True, return_inverse=True)
        shared = SharedTokens(torch.from_numpy(distinct_M), torch.from_numpy(index_N))
    return torch.from_numpy(predict_N), torch.from_numpy(final_B), shared
