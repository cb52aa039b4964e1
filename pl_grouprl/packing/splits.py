"""Splits a group that exceeds the token budget: shared tokens run by themselves, then rollouts continue in slices."""

from __future__ import annotations

from dataclasses import dataclass

from pl_grouprl.packing.bins import pack_sizes
from pl_grouprl.packing.trie import Trie

_MIN_BRANCH_TOKENS = 2
"""Stateful layers cannot pass on a state after a single token, so the slices after it repeat it."""

Slices = tuple[tuple[int, ...], ...]
"""Indices of the rollouts in each slice."""


@dataclass(frozen=True)
class Branch:
    """A run of shared tokens that runs by itself, because the rollouts below it do not fit into one slice.

    Attributes:
        rollout: Index of one rollout that contains the tokens.
        start: Index of the first one in that rollout.
        stop: Index after the last one.
        slices: Slices of rollouts that continue this branch.
        branches: Branches that continue this one.
    """

    rollout: int
    start: int
    stop: int
    slices: Slices
    branches: tuple[Branch, ...] = ()


@dataclass(frozen=True)
class SplitGroup:
    """A group that exceeds the budget. Each rollout is in one slice, which continues the prompt or a branch.

    Attributes:
        group: Index of the group.
        slices: Slices of rollouts that continue the prompt.
        branches: Branches that continue the prompt.
    """

    group: int
    slices: Slices
    branches: tuple[Branch, ...] = ()


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
    return SplitGroup(group, *_Splitter(rollouts, max_tokens).below(None))


class _Splitter:
    """Cuts a trie into slices and branches. Sizes and rollouts are those of each node's subtree."""

    def __init__(self, trie: Trie, max_tokens: int) -> None:
        self._nodes, self._max_tokens = trie.nodes, max_tokens
        self._sizes = [node.length for node in trie.nodes]
        self._children: dict[int | None, list[int]] = {}
        self._rollouts: list[list[int]] = [[] for _ in trie.nodes]
        for rollout, leaf in enumerate(trie.leaves):
            self._rollouts[leaf].append(rollout)
        for index in reversed(range(len(trie.nodes))):  # children come after their parent
            parent = trie.nodes[index].parent
            self._children.setdefault(parent, []).append(index)
            if parent is not None:
                self._sizes[parent] += self._sizes[index]
                self._rollouts[parent] += self._rollouts[index]

    def below(self, parent: int | None, start: int = 0) -> tuple[Slices, tuple[Branch, ...]]:
        """Pack the subtrees below a node into slices, and turn those that do not fit into branches.

        Args:
            parent: The node; None is the prompt.
            start: Index of the first response token that has not run by then.
        """
        fitting: list[int] = []
        branches: list[Branch] = []
        remaining = list(self._children[parent])
        while remaining:
            index = remaining.pop()
            node = self._nodes[index]
            if index not in self._children or self._size(index, start) <= self._max_tokens:
                fitting.append(index)
            elif node.stop - start < _MIN_BRANCH_TOKENS:
                remaining += self._children[index]
            else:
                branches.append(Branch(node.sequence, start, node.stop, *self.below(index, node.stop)))
        # A leaf may exceed the budget by a shared token before it that is too short for a branch.
        sizes = [min(self._size(index, start), self._max_tokens) for index in fitting]
        bins = [[fitting[place] for place in places] for places in pack_sizes(sizes, self._max_tokens)]
        slices = (sorted(rollout for index in indices for rollout in self._rollouts[index]) for indices in bins)
        return tuple(map(tuple, slices)), tuple(branches)

    def _size(self, index: int, start: int) -> int:
        """Tokens of a subtree, and those between `start` and its first node."""
        return self._sizes[index] + self._nodes[index].start - start
