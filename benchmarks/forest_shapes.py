"""The forests of `python -m benchmarks forests`: trees, combs, conversations and branched rollouts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.cases import Case
from pl_grouprl.packing import SharedPrefixLayout, pack
from pl_grouprl.rollout import Branching
from pl_grouprl.training.run import PlainRun
from pl_grouprl.training.sampler import Sampler
from pl_grouprl.types import Prompt, SamplingConfig


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


def branched(
    branching: Branching, *, prompt: int = 256, roots: int = 4, longest: int = 512, vocabulary: int = 2048
) -> SharedPrefixLayout:
    """Rollouts that an engine sampled with `branching`, packed as in training.

    The model is small, with random weights, so that a rollout ends after each token with a probability of about
    1 / `vocabulary`. The seed is fixed.

    Args:
        branching: Where rollouts branch.
        prompt: Tokens of the prompt.
        roots: Rollouts that start from it (`num_generations`).
        longest: Most tokens of a rollout.
        vocabulary: Tokens that the model predicts.
    """
    model = Case(
        "sampler", prompt, longest, hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate=48,
        vocabulary=vocabulary,
    ).make_model()  # fmt: skip
    token_ids = torch.randint(1, vocabulary, (prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    sampling = SamplingConfig(max_new_tokens=longest, stop_token_ids=(0,))
    branching.check(roots, sampling)
    sampler = Sampler(PlainRun(model))
    return pack(sampler.generate([Prompt(token_ids)], sampling, roots, seed=("forests",), branching=branching)).layout


def _every(every_n: int, width: int, depth: int, **sizes: int) -> Callable[[], SharedPrefixLayout]:
    return partial(branched, Branching("every_n", width, depth, every_n), **sizes)


SHAPES: dict[str, Callable[[], SharedPrefixLayout]] = {
    "tree-1-256": partial(tree, 1, 2, 256),
    "tree-3-256": partial(tree, 3, 2, 256),
    "tree-3-32": partial(tree, 3, 2, 32),
    "tree-6-64": partial(tree, 6, 2, 64),
    "tree-8-32": partial(tree, 8, 2, 32),
    "comb-16-32": partial(comb, 16, 32),
    "comb-16-256": partial(comb, 16, 256),
    "conversation": partial(conversation, turns=8, rollouts=8, prompt=256, answer=64, reply=32),
    "branched-128-4-1": _every(128, width=4, depth=1),
    "branched-64-2-3": _every(64, width=2, depth=3),
    "branched-32-2-5": _every(32, width=2, depth=5, roots=2, longest=256),
}
"""Trees and combs by depth and tokens of a segment, all of width 2; branched rollouts by every_n, width and depth.
A full tree of depth 16 would have 131,071 segments, so depth 16 is a comb."""
