"""Lays out rollout groups as a forest: prompts, and below each what its rollouts have in common.

Legend: B rollouts, T packed tokens, N response tokens of all rollouts, concatenated, M distinct ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pl_grouprl.packing.layout import Segment, SharedPrefixLayout
from pl_grouprl.packing.trie import MIN_SAVED_TOKENS, Tokens, build_trie
from pl_grouprl.types import RolloutGroup


class SharedTokens(NamedTuple):
    """Response tokens that rollouts have in common: the N of all rollouts are M tokens of the row.

    Attributes:
        distinct_M: One of the N for each of the M, int64.
        index_N: For each of the N which of the M it is, int64.
    """

    distinct_M: Tensor
    index_N: Tensor


class Forest(NamedTuple):
    """Where the tokens of some groups are in a packed row.

    Attributes:
        layout: The segments.
        token_ids: Tokens of each segment.
        num_prompt_tokens: Tokens of the row that belong to prompts.
        places_N: Index in the row of each response token, int64.
        before_B: Index in the row of the last token of each rollout's prompt, int64.
        lengths_B: Tokens of each rollout, int64.
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
        begun = self.lengths_B > 0
        index_N[(np.cumsum(self.lengths_B) - self.lengths_B)[begun]] = self.before_B[begun]
        return torch.from_numpy(index_N)

    @property
    def final_index_B(self) -> Tensor:
        """Index in the row of each rollout's last token, int64; if it has none, of its prompt's."""
        index_B = self.before_B.copy()
        begun = self.lengths_B > 0
        index_B[begun] = self.places_N[np.cumsum(self.lengths_B)[begun] - 1]
        return torch.from_numpy(index_B)

    @property
    def shared_tokens(self) -> SharedTokens | None:
        """Which response tokens are the same token of the row; None if none are."""
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
    """Lay out each prompt once, and once what rollouts of a group have in common after it.

    Args:
        groups: Groups with at least one rollout each.
        share_across_groups: Also lay out once what prompts have in common at their beginning.
        min_saved_tokens: What a shared segment must save, see `build_trie`; None shares prompts alone.
        path: Response tokens that every rollout begins with, or is the beginning of; they are laid out with the prompt.

    Raises:
        ValueError: If prompts to be compared have images or videos.
    """
    if share_across_groups and any(group.media for group in groups):
        raise ValueError(
            "share_across_groups=True compares prompts by their tokens, which are alike for different images and "
            "videos; pass False."
        )
    names = [number if group.group_id is None else group.group_id for number, group in enumerate(groups)]
    least = min_saved_tokens if share_across_groups else None
    prompts = build_trie([group.prompt_ids for group in groups], least)
    group_of = {leaf: number for number, leaf in enumerate(prompts.leaves)}
    row = _Row()
    placed: list[int] = []
    ends: dict[int, list[tuple[int, int, int]]] = {}
    for place, node in enumerate(prompts.nodes):
        parent = None if node.parent is None else placed[node.parent]
        tokens = groups[node.sequence].prompt_ids[node.start : node.stop]
        placed.append(row.add(tokens, parent, names[node.sequence]))
        if place in group_of:
            number, prompt = group_of[place], placed[-1]
            rollouts = [rollout.token_ids for rollout in groups[number].rollouts]
            root = row.add(path, prompt, names[number]) if path else prompt
            leaves = row.graft([ids[len(path) :] for ids in rollouts], min_saved_tokens, root, names[number])
            ends[number] = [(prompt, leaf, len(ids)) for leaf, ids in zip(leaves, rollouts, strict=True)]
    layout = SharedPrefixLayout(row.lengths, row.parents, row.names)
    num_prompt_tokens = sum(row.lengths[place] for place in placed)
    in_order = [end for number in range(len(groups)) for end in ends[number]]
    return Forest(layout, row.token_ids, num_prompt_tokens, *_places(layout, in_order))


class _Row:
    """Segments of a packed row, in the order in which they are added."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.parents: list[int | None] = []
        self.names: list[Hashable] = []
        self.token_ids: list[Tokens] = []

    def add(self, tokens: Tokens, parent: int | None, name: Hashable) -> int:
        """Append a segment; return its index."""
        self.lengths.append(len(tokens))
        self.parents.append(parent)
        self.names.append(name)
        self.token_ids.append(tokens)
        return len(self.lengths) - 1

    def graft(self, sequences: Sequence[Tokens], min_saved_tokens: int | None, root: int, name: Hashable) -> list[int]:
        """Append the trie of sequences below a segment; return the segment that ends each."""
        first, trie = len(self.lengths), build_trie(sequences, min_saved_tokens)
        for node in trie.nodes:
            tokens = sequences[node.sequence][node.start : node.stop]
            self.add(tokens, root if node.parent is None else first + node.parent, name)
        return [first + leaf for leaf in trie.leaves]


def _places(
    layout: SharedPrefixLayout, ends: Sequence[tuple[int, int, int]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the tokens of rollouts are, [N], and the tokens before them, [B]; and their numbers, [B].

    Args:
        layout: The segments.
        ends: For each rollout the segments that end its prompt and itself, and the number of its tokens.
    """
    runs: list[tuple[int, int]] = []  # first token and number of tokens
    before: list[int] = []
    for prompt, leaf, remaining in ends:
        below = [segment for index, segment in _upwards(layout, leaf) if index > prompt]
        for segment in reversed(below):
            runs.append((segment.start, min(segment.length, remaining)))
            remaining -= runs[-1][1]
        before.append(next(segment.stop - 1 for _, segment in _upwards(layout, prompt) if segment.length))
    first, length = np.array(runs, np.int64).reshape(-1, 2).T
    places_N = np.arange(length.sum()) + np.repeat(first - (np.cumsum(length) - length), length)
    return places_N, np.array(before, np.int64), np.array([length for _, _, length in ends], np.int64)


def _upwards(layout: SharedPrefixLayout, index: int | None) -> Iterator[tuple[int, Segment]]:
    while index is not None:
        segment = layout.segments[index]
        yield index, segment
        index = segment.parent
