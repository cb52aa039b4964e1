"""Shared prefixes of token sequences as a radix tree, and groups laid out as a forest."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pl_grouprl.packing.layout import Segment, SharedPrefixLayout
from pl_grouprl.types import RolloutGroup

# Builds a radix tree (compressed trie) of token sequences, which holds each shared prefix once.
#
# Legend: C numbers per token in array sequences; tokens are equal if all C are.

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


# Lays out rollout groups as a forest: each prompt once, and below it its rollouts, with what they share once.
#
# Legend: B rollouts, T packed tokens, N response tokens of all rollouts, concatenated, M response tokens of the row.


class SharedTokens(NamedTuple):
    """Maps the N response tokens of all rollouts to the M tokens of the row that encode them.

    Attributes:
        distinct_M: For each token of the row, the index of one response token that it encodes, int64.
        index_N: For each response token, the index of the token of the row that encodes it, int64.
    """

    distinct_M: Tensor
    index_N: Tensor


class Forest(NamedTuple):
    """A packed row of groups, with the row index of each response token.

    Attributes:
        layout: The segments of the row.
        token_ids: Tokens of each segment.
        num_prompt_tokens: Tokens of the row that belong to prompts.
        places_N: Index in the row of each response token, int64.
        before_B: Index in the row of the last token of each rollout's prompt, int64.
        lengths_B: Number of tokens of each rollout, int64.
    """

    layout: SharedPrefixLayout
    token_ids: list[Tokens]
    num_prompt_tokens: int
    places_N: np.ndarray
    before_B: np.ndarray
    lengths_B: np.ndarray

    @property
    def predict_index_N(self) -> Tensor:
        """Index in the row of the token that predicts each response token, int64."""
        index_N = np.roll(self.places_N, 1)
        nonempty = self.lengths_B > 0
        starts_B = np.cumsum(self.lengths_B) - self.lengths_B
        index_N[starts_B[nonempty]] = self.before_B[nonempty]
        return torch.from_numpy(index_N)

    @property
    def final_index_B(self) -> Tensor:
        """Index in the row of each rollout's last token, int64; for an empty rollout, of its prompt's last token."""
        index_B = self.before_B.copy()
        nonempty = self.lengths_B > 0
        index_B[nonempty] = self.places_N[np.cumsum(self.lengths_B)[nonempty] - 1]
        return torch.from_numpy(index_B)

    @property
    def shared_tokens(self) -> SharedTokens | None:
        """Which response tokens share a token of the row; None if the row has no fewer tokens than the responses."""
        if len(self.places_N) == self.layout.num_tokens - self.num_prompt_tokens:
            return None
        _, distinct_M, index_N = np.unique(self.places_N, return_index=True, return_inverse=True)
        return SharedTokens(torch.from_numpy(distinct_M), torch.from_numpy(index_N))


def lay_out_forest(
    groups: Sequence[RolloutGroup],
    *,
    share_across_groups: bool = False,
    min_saved_tokens: int | None = MIN_SAVED_TOKENS,
    path: Tokens = (),
) -> Forest:
    """Lay out each prompt once, followed by its rollouts, which share their common tokens.

    Args:
        groups: Groups with at least one rollout each.
        share_across_groups: Also share common prefixes of different prompts.
        min_saved_tokens: Minimum number of tokens that a shared segment must save, see `build_trie`; None shares only
            prompts.
        path: Response tokens to lay out as one segment after the prompt. Every rollout begins with them, or is a prefix
            of them.

    Raises:
        ValueError: If prompts to be compared have images or videos.
    """
    if share_across_groups and any(group.media for group in groups):
        raise ValueError(
            "share_across_groups=True compares prompts by their tokens, which are alike for different images and "
            "videos; pass False."
        )
    group_ids = [number if group.group_id is None else group.group_id for number, group in enumerate(groups)]
    prompts = build_trie([group.prompt_ids for group in groups], min_saved_tokens if share_across_groups else None)
    group_of = {leaf: number for number, leaf in enumerate(prompts.leaves)}
    row = _Row()
    prompt_segments: list[int] = []
    ends: dict[int, list[_RolloutEnd]] = {}
    for index, node in enumerate(prompts.nodes):
        parent = None if node.parent is None else prompt_segments[node.parent]
        tokens = groups[node.sequence].prompt_ids[node.start : node.stop]
        prompt_segments.append(row.add(tokens, parent, group_ids[node.sequence]))
        if index in group_of:
            number = group_of[index]
            rollouts = [rollout.token_ids for rollout in groups[number].rollouts]
            ends[number] = row.add_rollouts(rollouts, path, min_saved_tokens, prompt_segments[-1], group_ids[number])
    layout = SharedPrefixLayout(row.lengths, row.parents, row.group_ids)
    num_prompt_tokens = sum(row.lengths[segment] for segment in prompt_segments)
    in_order = [end for number in range(len(groups)) for end in ends[number]]
    return Forest(layout, row.token_ids, num_prompt_tokens, *_places(layout, in_order))


class _RolloutEnd(NamedTuple):
    """Index of the last segment of a rollout's prompt and of the rollout, and the rollout's number of tokens."""

    prompt: int
    leaf: int
    length: int


class _Row:
    """Segments of a packed row, in the order in which they are added."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.parents: list[int | None] = []
        self.group_ids: list[Hashable] = []
        self.token_ids: list[Tokens] = []

    def add(self, tokens: Tokens, parent: int | None, group_id: Hashable) -> int:
        """Append a segment; return its index."""
        self.lengths.append(len(tokens))
        self.parents.append(parent)
        self.group_ids.append(group_id)
        self.token_ids.append(tokens)
        return len(self.lengths) - 1

    def add_rollouts(
        self,
        rollouts: Sequence[Tokens],
        path: Tokens,
        min_saved_tokens: int | None,
        prompt: int,
        group_id: Hashable,
    ) -> list[_RolloutEnd]:
        """Append the path, if any, and the trie of what rollouts have after it, below a prompt's last segment."""
        root = self.add(path, prompt, group_id) if path else prompt
        after_path = [ids[len(path) :] for ids in rollouts]
        first, trie = len(self.lengths), build_trie(after_path, min_saved_tokens)
        for node in trie.nodes:
            tokens = after_path[node.sequence][node.start : node.stop]
            self.add(tokens, root if node.parent is None else first + node.parent, group_id)
        return [_RolloutEnd(prompt, first + leaf, len(ids)) for leaf, ids in zip(trie.leaves, rollouts, strict=True)]


def _places(layout: SharedPrefixLayout, ends: Sequence[_RolloutEnd]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return `places_N`, `before_B` and `lengths_B` of a `Forest`."""
    runs: list[tuple[int, int]] = []  # first token and number of tokens
    before: list[int] = []
    last_of_prompt: dict[int, int] = {}
    for prompt, leaf, remaining in ends:
        below: list[Segment] = []
        index: int | None = leaf
        while index is not None and index > prompt:  # parents precede their children
            below.append(layout.segments[index])
            index = below[-1].parent
        for segment in reversed(below):
            length = min(segment.length, remaining)  # a rollout that is a prefix of the path ends within it
            runs.append((segment.start, length))
            remaining -= length
        if prompt not in last_of_prompt:
            last_of_prompt[prompt] = _last_token(layout, prompt)
        before.append(last_of_prompt[prompt])
    starts, lengths = np.array(runs, np.int64).reshape(-1, 2).T
    places_N = np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return places_N, np.array(before, np.int64), np.array([end.length for end in ends], np.int64)


def _last_token(layout: SharedPrefixLayout, index: int) -> int:
    """Index in the row of the last token up to the end of a segment, which may itself be empty."""
    segment = layout.segments[index]
    while segment.length == 0 and segment.parent is not None:
        segment = layout.segments[segment.parent]
    return segment.stop - 1
