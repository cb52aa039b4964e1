"""Splits a group larger than a token budget: what rollouts share runs by itself, and what continues it in slices."""

from __future__ import annotations

from dataclasses import dataclass

from pl_grouprl.packing.bins import pack_sizes
from pl_grouprl.packing.trie import Trie

_SHORTEST_BRANCH = 2
"""Stateful layers hand on no state after a single token; what continues it repeats it."""

Slices = tuple[tuple[int, ...], ...]
"""Indices of the rollouts in each slice."""


@dataclass(frozen=True)
class Branch:
    """Tokens that rollouts have in common, with more below them than a slice may hold.

    Attributes:
        rollout: Index of a rollout that has them.
        start: Index of the first of them among its tokens.
        stop: Index after the last.
        slices: Rollouts that continue them.
        branches: Branches that continue them.
    """

    rollout: int
    start: int
    stop: int
    slices: Slices
    branches: tuple[Branch, ...] = ()


@dataclass(frozen=True)
class SplitGroup:
    """A group larger than the budget. Each of its rollouts is in one slice, of its prompt or of a branch.

    Attributes:
        group: Index of the group.
        slices: Rollouts that continue the prompt.
        branches: Branches that continue it.
    """

    group: int
    slices: Slices
    branches: tuple[Branch, ...] = ()


def split_group(group: int, prompt: int, rollouts: Trie, max_tokens: int) -> SplitGroup:
    """Cut a group between the subtrees of its prompt, and deeper only where a subtree exceeds the budget.

    Args:
        group: Index of the group.
        prompt: Tokens of its prompt.
        rollouts: The trie of its rollouts.
        max_tokens: Most tokens of the prompt, of a branch, and of a slice without what it continues.

    Raises:
        ValueError: If the prompt, or what a rollout does not share, is longer than `max_tokens`.
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
    """Subtrees of a trie by their first node."""

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

    def below(self, parent: int | None, stop: int = 0) -> tuple[Slices, tuple[Branch, ...]]:
        """Slices of the subtrees that fit, and branches of the others.

        Args:
            parent: What they continue; None is the prompt.
            stop: How many tokens of a rollout have run by then.
        """
        fitting: list[int] = []
        branches: list[Branch] = []
        remaining = list(self._children[parent])
        while remaining:
            index = remaining.pop()
            node = self._nodes[index]
            if index not in self._children or self._size(index, stop) <= self._max_tokens:
                fitting.append(index)
            elif node.stop - stop < _SHORTEST_BRANCH:
                remaining += self._children[index]
            else:
                branches.append(Branch(node.sequence, stop, node.stop, *self.below(index, node.stop)))
        # What a leaf has before it may exceed the budget by less than a branch.
        sizes = [min(self._size(index, stop), self._max_tokens) for index in fitting]
        bins = pack_sizes(sizes, self._max_tokens)
        slices = (sorted(rollout for place in own for rollout in self._rollouts[fitting[place]]) for own in bins)
        return tuple(map(tuple, slices)), tuple(branches)

    def _size(self, index: int, stop: int) -> int:
        """Tokens of a subtree, with those between `stop` and its first node."""
        return self._sizes[index] + self._nodes[index].start - stop
