"""Lays out rollout groups as a forest: each prompt once, and below it its rollouts, with what they share once.

Legend: B rollouts, T packed tokens, N response tokens of all rollouts, concatenated, M response tokens of the row.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pl_grouprl.packing.layout import Segment, SharedPrefixLayout
from pl_grouprl.packing.trie import MIN_SAVED_TOKENS, Tokens, build_trie
from pl_grouprl.types import RolloutGroup


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
