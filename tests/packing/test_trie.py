"""What sequences share is found whole, and only shared where it saves enough."""

import random

import numpy as np
import pytest
from helpers.branched import branched_rollouts

from pl_grouprl.packing.trie import Node, build_trie


def path(trie, sequences, leaf):
    """The tokens from the beginning to a node."""
    tokens, index = [], leaf
    while index is not None:
        node = trie.nodes[index]
        tokens = [*sequences[node.sequence][node.start : node.stop], *tokens]
        index = node.parent
    return tokens


def test_by_hand():
    sequences = [[1, 2, 3, 4], [5], [1, 2, 3], [1, 2, 9, 9], [5]]
    trie = build_trie(sequences, 1)
    assert trie.nodes == (
        Node(None, 0, 0, 2),  # 1 2, of three
        Node(0, 0, 2, 3),  # 3, of two
        Node(1, 0, 3, 4),  # 4
        Node(1, 2, 3, 3),  # ends there
        Node(0, 3, 2, 4),  # 9 9
        Node(None, 1, 0, 1),  # 5, twice
        Node(5, 1, 1, 1),
        Node(5, 4, 1, 1),
    )
    assert trie.leaves == (2, 6, 3, 4, 7)


def test_a_node_saves_at_least_so_many_tokens():
    sequences = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6], [7]]
    # 1 2 saves 4 tokens, 3 below it saves 1.
    assert [node[2:] for node in build_trie(sequences, 2).nodes] == [(0, 2), (2, 4), (2, 4), (2, 3), (0, 1)]
    # Not shared among three, so 1 2 3 is shared between two, and saves 3.
    sequences[2] = [1, 6]
    assert build_trie(sequences, 3).nodes == (
        Node(None, 0, 0, 3),
        Node(0, 0, 3, 4),
        Node(0, 1, 3, 4),
        Node(None, 2, 0, 2),
        Node(None, 3, 0, 1),
    )
    assert [node.parent for node in build_trie(sequences, 4).nodes] == [None] * 4


def test_nothing_is_shared_without_a_threshold():
    trie = build_trie([[1, 2], [1, 2], []], None)
    assert trie.nodes == (Node(None, 0, 0, 2), Node(None, 1, 0, 2), Node(None, 2, 0, 0))
    assert trie.leaves == (0, 1, 2)


@pytest.mark.parametrize("other", [tuple, np.array, list])
def test_sequences_may_be_of_different_types(other):
    assert build_trie([[1, 2, 3], other([1, 2, 4])], 1).nodes == (
        Node(None, 0, 0, 2),
        Node(0, 0, 2, 3),
        Node(0, 1, 2, 3),
    )


@pytest.mark.parametrize("seed", range(20))
def test_paths_are_the_sequences_and_no_token_is_there_twice(seed):
    rng = random.Random(seed)
    sequences = branched_rollouts(rng, rng.randint(0, 12), 9, 3)
    trie = build_trie(sequences, 1)
    assert [path(trie, sequences, leaf) for leaf in trie.leaves] == sequences
    beginnings = {tuple(tokens[: end + 1]) for tokens in sequences for end in range(len(tokens))}
    assert sum(node.stop - node.start for node in trie.nodes) == len(beginnings)
    parents = {node.parent for node in trie.nodes}
    assert parents.isdisjoint(trie.leaves)
    assert len(set(trie.leaves)) == len(sequences)
    # Each node that is no leaf branches.
    for index in parents - {None}:
        assert sum(node.parent == index for node in trie.nodes) > 1


@pytest.mark.parametrize("seed", range(8))
def test_every_node_with_children_pays(seed):
    sequences = branched_rollouts(random.Random(seed), 10, 9, 3)
    trie = build_trie(sequences, 6)
    assert [path(trie, sequences, leaf) for leaf in trie.leaves] == sequences
    for index, node in enumerate(trie.nodes):
        below = sum(index in ancestors(trie, leaf) for leaf in trie.leaves)
        assert index in trie.leaves or (below - 1) * (node.stop - node.start) >= 6


def ancestors(trie, leaf):
    found, index = set(), trie.nodes[leaf].parent
    while index is not None:
        found.add(index)
        index = trie.nodes[index].parent
    return found
