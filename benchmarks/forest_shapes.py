"""The forests of `python -m benchmarks forests`: trees, combs, conversations and branched rollouts."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from pl_grouprl.packing import SharedPrefixLayout


def tree(depth: int, width: int, length: int) -> SharedPrefixLayout:
    """A full tree: `depth` levels below the root, `width` children each, segments of `length` tokens."""
    parents: list[int | None] = []
    pending: list[tuple[int | None, int]] = [(None, depth)]  # parent, levels below
    while pending:
        parent, below = pending.pop()
        parents.append(parent)
        pending += [(len(parents) - 1, below - 1)] * (width if below else 0)
    return SharedPrefixLayout([length] * len(parents), parents)


def comb(depth: int, length: int) -> SharedPrefixLayout:
    """A tree of width 2 in which one of two children ends at each level: 2 `depth` + 1 segments of `length` tokens."""
    parents: list[int | None] = [None]
    for level in range(depth):
        parents += [max(0, 2 * level)] * 2
    return SharedPrefixLayout([length] * len(parents), parents)


def conversation(turns: int, rollouts: int, prompt: int, answer: int, reply: int) -> SharedPrefixLayout:
    """A conversation in which every turn is sampled several times, and the last sample is continued.

    Args:
        turns: Turns of the model.
        rollouts: Rollouts of each turn.
        prompt: Tokens before the first turn.
        answer: Tokens of a rollout.
        reply: Tokens of the user or of a tool between two turns.
    """
    lengths, parents = [prompt], [None]  # type: list[int], list[int | None]
    for turn in range(turns):
        history = len(lengths) - 1
        lengths += [answer] * rollouts
        parents += [history] * rollouts
        if turn < turns - 1:
            parents.append(len(lengths) - 1)
            lengths.append(reply)
    return SharedPrefixLayout(lengths, parents)


def branched(prompt: int, rollout: int, width: int, depth: int, seed: int = 0) -> SharedPrefixLayout:
    """Rollouts of equal length that branch `depth` times into `width` at random tokens of what is left of them."""
    rng = random.Random(seed)
    lengths, parents = [prompt], [None]  # type: list[int], list[int | None]
    pending = [(0, rollout, depth)] * width  # parent, tokens left, branch points left
    while pending:
        parent, left, below = pending.pop()
        parents.append(parent)
        lengths.append(rng.randint(1, left - below) if below else left)
        pending += [(len(lengths) - 1, left - lengths[-1], below - 1)] * (width if below else 0)
    return SharedPrefixLayout(lengths, parents)


SHAPES: dict[str, Callable[[], SharedPrefixLayout]] = {
    "tree-1-256": partial(tree, 1, 2, 256),
    "tree-3-256": partial(tree, 3, 2, 256),
    "tree-3-32": partial(tree, 3, 2, 32),
    "tree-6-64": partial(tree, 6, 2, 64),
    "tree-8-32": partial(tree, 8, 2, 32),
    "comb-16-32": partial(comb, 16, 32),
    "comb-16-256": partial(comb, 16, 256),
    "conversation": partial(conversation, turns=8, rollouts=8, prompt=256, answer=64, reply=32),
    "branched": partial(branched, prompt=256, rollout=512, width=4, depth=1),
}
"""Names with depth and tokens of a segment; all trees and combs have width 2. A full tree of depth 16 would have
131,071 segments, so depth 16 is a comb."""
