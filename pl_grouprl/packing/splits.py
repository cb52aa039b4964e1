"""Splits a group that exceeds the token budget: shared tokens run by themselves, then rollouts continue in slices."""

from __future__ import annotations

from dataclasses import dataclass

from pl_grouprl.packing.bins import pack_sizes
from pl_grouprl.packing.trie import Trie

_MIN_BRANCH_TOKENS = 2
"""Stateful layers cannot pass on a state after a single token, so the slices after it repeat it."""

Slices = tuple[tuple[int, ...], ...]
"""Indices of the rollouts in each slice."""

SplitShape = tuple[tuple[int, int], ...]
"""Depth and number of slices of a prompt, which has depth 0, and of each of its branches, depth-first."""


@dataclass(frozen=True)
class Branch:
    """A run of shared tokens that runs by itself, because the rollouts below it do not fit into one slice.

    Attributes:
        rollout: Index of one rollout that contains the tokens.
        start: Index of the first one in that rollout.
        stop: Index after the last one.
        slices: Slices of rollouts that continue this branch.
        depth: 1 if it continues the prompt, 2 if it continues such a branch, and so on.
    """

    rollout: int
    start: int
    stop: int
    slices: Slices
    depth: int = 1


@dataclass(frozen=True)
class SplitGroup:
    """A group that exceeds the budget. Each rollout is in one slice, which continues the prompt or a branch.

    Attributes:
        group: Index of the group.
        slices: Slices of rollouts that continue the prompt.
        branches: All branches, depth-first: each is directly followed by those that continue it.
    """

    group: int
    slices: Slices
    branches: tuple[Branch, ...] = ()

    @property
    def shape(self) -> SplitShape:
        """Its passes, without their contents."""
        return (0, len(self.slices)), *((branch.depth, len(branch.slices)) for branch in self.branches)


def split_group(group: int, prompt: int, rollouts: Trie, max_tokens: int) -> SplitGroup:
    """Pack whole subtrees of the trie into slices; a subtree that exceeds the budget becomes a branch.

    Args:
        group: Index of the group.
        prompt: Number of tokens of its prompt.
        rollouts: The trie of its rollouts.
        max_tokens: Most tokens of the prompt, of a branch, and of a slice without the path that it continues.

    Raises:
        ValueError: If the prompt or a node of the trie is longer than `max_tokens`.
    """
    if prompt > max_tokens:
        raise ValueError(
            f"max_tokens is {max_tokens}, but the prompt of group {group} alone has {prompt} tokens; raise the budget, "
            "or shorten prompts."
        )
    for node in rollouts.nodes:
        if node.length > max_tokens:
            length = rollouts.nodes[rollouts.leaves[node.sequence]].stop
            raise ValueError(
                f"max_tokens is {max_tokens}, but rollout {node.sequence} of group {group} alone has {length} tokens; "
                "raise the budget, or shorten completions."
            )
    return _Splitter(rollouts, max_tokens).split(group)


class _Splitter:
    """Cuts a trie into slices and branches. Sizes and stops are those of each node's subtree."""

    def __init__(self, trie: Trie, max_tokens: int) -> None:
        self._nodes, self._max_tokens = trie.nodes, max_tokens
        self._sizes = [node.length for node in trie.nodes]
        self._stops = [index + 1 for index in range(len(trie.nodes))]
        self._children: dict[int | None, list[int]] = {}
        self._ending: dict[int, list[int]] = {}
        for rollout, leaf in enumerate(trie.leaves):
            self._ending.setdefault(leaf, []).append(rollout)
        for index in reversed(range(len(trie.nodes))):  # children come after their parent
            parent = trie.nodes[index].parent
            self._children.setdefault(parent, []).append(index)
            if parent is not None:
                self._sizes[parent] += self._sizes[index]
                self._stops[parent] = max(self._stops[parent], self._stops[index])

    def split(self, group: int) -> SplitGroup:
        """Cut the whole trie."""
        slices, below = self._below(None, 0)
        branches: list[Branch] = []
        pending = [(index, 0, 1) for index in reversed(below)]  # node, first token, depth
        while pending:
            index, start, depth = pending.pop()
            node = self._nodes[index]
            own, below = self._below(index, node.stop)
            branches.append(Branch(node.sequence, start, node.stop, own, depth))
            pending += [(child, node.stop, depth + 1) for child in reversed(below)]
        return SplitGroup(group, slices, tuple(branches))

    def _below(self, parent: int | None, start: int) -> tuple[Slices, list[int]]:
        """Pack the subtrees below a node into slices; return also the nodes that become branches.

        Args:
            parent: The node; None is the prompt.
            start: Index of the first response token that has not run by then.
        """
        fitting: list[int] = []
        branches: list[int] = []
        remaining = list(self._children[parent])
        while remaining:
            index = remaining.pop()
            if index not in self._children or self._size(index, start) <= self._max_tokens:
                fitting.append(index)
            elif self._nodes[index].stop - start < _MIN_BRANCH_TOKENS:
                remaining += self._children[index]
            else:
                branches.append(index)
        # A leaf may exceed the budget by a shared token before it that is too short for a branch.
        sizes = [min(self._size(index, start), self._max_tokens) for index in fitting]
        bins = [[fitting[place] for place in places] for places in pack_sizes(sizes, self._max_tokens)]
        slices = (sorted(rollout for index in indices for rollout in self._rollouts(index)) for indices in bins)
        return tuple(map(tuple, slices)), branches

    def _size(self, index: int, start: int) -> int:
        """Tokens of a subtree, and those between `start` and its first node."""
        return self._sizes[index] + self._nodes[index].start - start

    def _rollouts(self, index: int) -> list[int]:
        """The rollouts that end in a subtree."""
        return [rollout for node in range(index, self._stops[index]) for rollout in self._ending.get(node, ())]
