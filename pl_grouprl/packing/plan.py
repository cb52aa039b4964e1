"""Plans rows within a token budget: groups packed, split, and balanced over ranks."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from pl_grouprl.packing.trie import Trie, separate

GroupShape = tuple[int, Sequence[int] | Trie]
"""Tokens of a prompt, and those of each rollout, or the trie of what they have in common."""

Slices = tuple[tuple[int, ...], ...]
"""Indices of the rollouts in each slice."""

SplitShape = tuple[tuple[int, int], ...]
"""Depth and number of slices of a prompt, which has depth 0, and of each of its branches, depth-first."""

_MIN_BRANCH_TOKENS = 2
"""Stateful layers cannot pass on a state after a single token, so the slices after it repeat it."""


@dataclass(frozen=True)
class RowPlan:
    """Rows of whole groups, and groups that do not fit into a row.

    Attributes:
        rows: Indices of the groups in each packed row; the row with the most tokens first.
        splits: The groups larger than the budget, with their slices.
    """

    rows: tuple[tuple[int, ...], ...]
    splits: tuple[SplitGroup, ...]


@dataclass(frozen=True)
class SplitGroup:
    """A group that exceeds the budget. Each rollout is in one slice, which continues the prompt or a branch.

    Attributes:
        group: Index of the group.
        slices: Slices of rollouts that continue the prompt.
        branches: All branches, depth-first: each is directly followed by its continuations.
    """

    group: int
    slices: Slices
    branches: tuple[Branch, ...] = ()

    @property
    def shape(self) -> SplitShape:
        """Its passes, without their contents."""
        return (0, len(self.slices)), *((branch.depth, len(branch.slices)) for branch in self.branches)


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


def plan_rows(groups: Sequence[GroupShape], max_tokens: int | None) -> RowPlan:
    """Pack groups into rows by their shared size: each token that rollouts share once, without padding.

    The row with the most tokens comes first, so rows that run on several ranks at the same time have similar sizes,
    and a budget too large for the device fails in the first micro-batch.

    Args:
        groups: The groups. Those without rollouts are skipped.
        max_tokens: Maximum number of tokens of a row; all groups form one row if None.

    Returns:
        Every group with rollouts exactly once: in a row, or split if its shared size exceeds `max_tokens`. A slice has
        at most `max_tokens` tokens; the path that it continues does not count, because it does not run again.

    Raises:
        ValueError: If a prompt alone or a rollout alone is longer than `max_tokens`.
    """
    tries = [own if isinstance(own, Trie) else separate(own) for _, own in groups]
    nonempty = [index for index, trie in enumerate(tries) if trie.leaves]
    if max_tokens is None:
        return RowPlan((tuple(nonempty),) if nonempty else (), ())
    sizes = {index: groups[index][0] + tries[index].num_tokens for index in nonempty}
    fitting = [index for index in nonempty if sizes[index] <= max_tokens]
    rows = pack_sizes([sizes[index] for index in fitting], max_tokens) if fitting else []
    large = (index for index in nonempty if sizes[index] > max_tokens)
    splits = (split_group(index, groups[index][0], tries[index], max_tokens) for index in large)
    return RowPlan(tuple(tuple(fitting[place] for place in row) for row in rows), tuple(splits))


def plan_repeated_rows(
    groups: Sequence[tuple[int, Sequence[int]]],
    max_tokens: int | None,
    episodes: Sequence[Sequence[int]] | None = None,
) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]:
    """Cut groups into padded batches [B, L], where each rollout is a row with its whole prompt.

    Fills batches with the longest rollouts first, which needs the fewest batches.

    Args:
        groups: Prompt length and rollout lengths of each group. Groups without rollouts are skipped.
        max_tokens: Maximum number of tokens per batch, including padding; one batch if None.
        episodes: For each group, the sizes of runs of rollouts that must stay in one batch; None if none must.

    Returns:
        For each batch, its groups as (group, indices of its rollouts), ascending. Every rollout occurs exactly once;
        the batch with the longest sequence comes first.

    Raises:
        ValueError: If a prompt with its rollout, or rollouts that must stay together (padding included), are longer
            than `max_tokens`.
    """
    units: list[tuple[int, list[tuple[int, int]]]] = []  # longest sequence, and (group, rollout) of what stays together
    for group, (prompt, rollouts) in enumerate(groups):
        ends = accumulate([1] * len(rollouts) if episodes is None else episodes[group], initial=0)
        for start, stop in pairwise(ends):
            longest = prompt + max(rollouts[start:stop])
            units.append((longest, [(group, rollout) for rollout in range(start, stop)]))
    units.sort(key=lambda unit: -unit[0])
    batches: list[list[tuple[int, int]]] = []
    room = 0  # rollouts that still fit into the last batch, which is as wide as its first rollout
    for longest, unit in units:
        if max_tokens is None:
            batches = batches or [[]]
        elif len(unit) > room:
            if longest * len(unit) > max_tokens:
                (group, rollout), count = unit[0], len(unit)
                what = f"rollout {rollout} has" if count == 1 else f"{count} rows of an episode has"
                what += f" {longest * count} tokens"
                raise ValueError(f"max_tokens is {max_tokens}, but group {group} with its {what}; raise the budget.")
            room = max_tokens // max(longest, 1) or 1
            batches.append([])
        batches[-1] += unit
        room -= len(unit)
    planned = []
    for batch in batches:
        chosen: dict[int, list[int]] = {}
        for group, rollout in sorted(batch):
            chosen.setdefault(group, []).append(rollout)
        planned.append(tuple((group, tuple(rollouts)) for group, rollouts in chosen.items()))
    return tuple(planned)


def split_group(group: int, prompt: int, rollouts: Trie, max_tokens: int) -> SplitGroup:
    """Pack whole subtrees of the trie into slices; a subtree that exceeds the budget becomes a branch.

    Args:
        group: Index of the group.
        prompt: Number of tokens of its prompt.
        rollouts: The trie of its rollouts.
        max_tokens: Maximum number of tokens of the prompt, of a branch, and of a slice without the path that it
            continues.

    Raises:
        ValueError: If the prompt or a node of the trie is longer than `max_tokens`.
    """
    if prompt > max_tokens:
        raise ValueError(f"max_tokens is {max_tokens}, but the prompt of group {group} alone has {prompt} tokens.")
    nodes = rollouts.nodes
    sizes = [node.length for node in nodes]  # of subtrees
    stops = [index + 1 for index in range(len(nodes))]  # the node after a subtree
    children: dict[int | None, list[int]] = {}
    ending: dict[int, list[int]] = {}  # the rollouts that end in a node
    for rollout, leaf in enumerate(rollouts.leaves):
        ending.setdefault(leaf, []).append(rollout)
    for index in reversed(range(len(nodes))):  # children come after their parent
        node = nodes[index]
        if node.length > max_tokens:
            length, what = nodes[rollouts.leaves[node.sequence]].stop, f"rollout {node.sequence} of group {group}"
            raise ValueError(f"max_tokens is {max_tokens}, but {what} alone has {length} tokens.")
        children.setdefault(node.parent, []).append(index)
        if node.parent is not None:
            sizes[node.parent] += sizes[index]
            stops[node.parent] = max(stops[node.parent], stops[index])

    def cut(parent: int | None, start: int) -> tuple[Slices, list[int]]:
        """Slices of the subtrees below a node (None for the prompt), and the nodes that become branches.

        `start` is the first response token that has not run by then.
        """
        fitting: dict[int, int] = {}  # the tokens of each node's subtree, and those between `start` and the node
        branches: list[int] = []
        remaining = list(children[parent])
        while remaining:
            index = remaining.pop()
            size = sizes[index] + nodes[index].start - start
            if index not in children or size <= max_tokens:
                # A leaf may exceed the budget by a shared token before it that is too short for a branch.
                fitting[index] = min(size, max_tokens)
            elif nodes[index].stop - start < _MIN_BRANCH_TOKENS:
                remaining += children[index]
            else:
                branches.append(index)
        indices, slices = list(fitting), []
        for places in pack_sizes(list(fitting.values()), max_tokens):
            subtrees = (range(indices[place], stops[indices[place]]) for place in places)
            slices.append(tuple(sorted(r for subtree in subtrees for node in subtree for r in ending.get(node, ()))))
        return tuple(slices), branches

    slices, below = cut(None, 0)
    found: list[Branch] = []
    pending = [(index, 0, 1) for index in reversed(below)]  # node, first token, depth
    while pending:
        index, start, depth = pending.pop()
        stop = nodes[index].stop
        own, below = cut(index, stop)
        found.append(Branch(nodes[index].sequence, start, stop, own, depth))
        pending += [(child, stop, depth + 1) for child in reversed(below)]
    return SplitGroup(group, slices, tuple(found))


def pack_sizes(sizes: Sequence[int], capacity: int) -> list[tuple[int, ...]]:
    """Pack sizes into few bins of at most `capacity`; returns their indices, the fullest bin first.

    Uses best fit decreasing. If that takes more bins than the sum requires, balances the sizes over fewer, as over
    ranks: if no bin is much fuller than the mean, all fit. Deterministic.
    """

    def total(items: list[int]) -> int:
        return sum(sizes[item] for item in items)

    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, bin), ascending
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        fullest = bisect_left(rooms, (sizes[item], -1))
        if fullest < len(rooms):
            room, place = rooms.pop(fullest)
        else:
            room, place = capacity, len(bins)
            bins.append([])
        bins[place].append(item)
        insort(rooms, (room - sizes[item], place))
    fewest = -(-sum(sizes) // capacity) or 1
    while fewest < len(bins):
        count = (fewest + len(bins)) // 2
        even: list[list[int]] = [[] for _ in range(count)]
        for item, place in enumerate(balance(sizes, count, good_enough=count * capacity / sum(sizes))):
            even[place].append(item)
        if max(map(total, even)) <= capacity:
            bins = even
        else:
            fewest = count + 1
    bins.sort(key=lambda items: (-total(items), min(items)))
    return [tuple(sorted(items)) for items in bins]


def balance(costs: Sequence[float], num_ranks: int, *, good_enough: float = 1.001) -> list[int]:
    """Assign groups to ranks, keeping the largest load small: a step takes as long as its slowest rank.

    Assigns groups, costliest first, to the least loaded rank; then moves or swaps groups of the most loaded rank as
    long as that helps. Deterministic, so every rank computes the same assignment.

    Args:
        costs: Cost of each group, in any unit, finite and 0 or more.
        num_ranks: Number of ranks.
        good_enough: The search ends when the largest load over the mean is at most this.

    Returns:
        The rank of each group. Every rank has a group if there are at least as many groups as ranks.
    """
    groups_of: list[list[int]] = [[] for _ in range(num_ranks)]
    loads: list[tuple[float, int, int]] = [(0.0, 0, rank) for rank in range(num_ranks)]  # a heap: load, groups, rank
    for group in sorted(range(len(costs)), key=lambda group: -costs[group]):
        load, count, rank = loads[0]
        groups_of[rank].append(group)
        heapq.heapreplace(loads, (load + costs[group], count + 1, rank))
    limit = good_enough * sum(load for load, _, _ in sorted(loads, key=lambda entry: entry[2])) / num_ranks
    order = sorted((-load, rank) for load, _, rank in loads)  # the largest load first
    while -order[0][0] > limit and _relieve(groups_of, order, costs):
        pass
    rank_of = {group: rank for rank, groups in enumerate(groups_of) for group in groups}
    return [rank_of[group] for group in range(len(costs))]


def _relieve(groups_of: list[list[int]], order: list[tuple[float, int]], costs: Sequence[float]) -> bool:
    """Reduce the largest load by a move to, or swap with, the least loaded rank that allows it; returns success."""
    load, largest = order[0]
    for other, rank in reversed(order[1:]):
        exchange = _best_exchange(groups_of[largest], groups_of[rank], other - load, costs)
        if exchange is not None:
            moved, returned = exchange
            groups_of[largest] = [group for group in groups_of[largest] if group != moved] + returned
            groups_of[rank] = [group for group in groups_of[rank] if group not in returned] + [moved]
            del order[bisect_left(order, (other, rank))], order[0]  # deletes the later element first
            for changed in (largest, rank):
                insort(order, (-sum(costs[group] for group in groups_of[changed]), changed))
            return True
    return False


def _best_exchange(
    heavy: Sequence[int], light: Sequence[int], difference: float, costs: Sequence[float]
) -> tuple[int, list[int]] | None:
    """The group to move, and the one to take in return, if any, that bring two loads closest."""
    best: tuple[int, list[int]] | None = None
    smallest = difference * (1 - 1e-9)  # ignores gains below rounding error, so the search ends
    for moved in heavy:
        after_move = difference - 2 * costs[moved]
        for returned in light:
            remaining = abs(after_move + 2 * costs[returned])
            if remaining < smallest:
                smallest, best = remaining, (moved, [returned])
        # A group moved without a swap must not leave the rank empty.
        if len(heavy) > 1 and abs(after_move) < smallest:
            smallest, best = abs(after_move), (moved, [])
    return best


def imbalance(costs: Sequence[float], ranks: Sequence[int], num_ranks: int) -> float:
    """Largest load over the mean: 1 if all ranks have the same load, `num_ranks` if one has everything.

    Args:
        costs: Cost of each group.
        ranks: The rank of each group.
        num_ranks: Number of ranks, including those without a group.
    """
    loads = [0.0] * num_ranks
    for cost, rank in zip(costs, ranks, strict=True):
        loads[rank] += cost
    mean = sum(loads) / num_ranks
    return max(loads) / mean if mean else 1.0
