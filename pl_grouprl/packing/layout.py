"""A packed row as a forest of segments (Prefix Grouper, arXiv:2506.05433, at any depth).

Legend: T packed tokens, S segments, B sequences (a leaf each), L the longest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

_Value = TypeVar("_Value")


class Segment(NamedTuple):
    """A run of consecutive tokens of a packed row.

    Attributes:
        start: Index of its first token in the row.
        length: Number of tokens; 0 for an empty rollout.
        parent: Index of the segment that it continues, or None for a root.
        position: Position id of its first token: the total length of its ancestors.
        group_id: The caller's name for its group.
    """

    start: int
    length: int
    parent: int | None
    position: int
    group_id: Hashable

    @property
    def stop(self) -> int:
        """Index after its last token."""
        return self.start + self.length


class SharedPrefixLayout:
    """A packed row of T tokens as a forest of segments, without padding.

    A token sees its own segment causally and all of every ancestor segment; its position id counts the tokens of its
    ancestors and the earlier tokens of its segment. A GRPO group is a root (the prompt) with one child per rollout.
    Segments are in depth-first order: each parent is directly followed by its descendants. Where no segment has
    grandchildren, parents only have to come before their children, so all prompts may come first.

    Args:
        lengths: Tokens of each segment, in row order.
        parents: Index of each segment's parent, or None for a root.
        group_ids: A name for each segment's group; defaults to the index of its root.
        num_prefilled: Number of leading tokens that ran in an earlier call, whose states are passed in: they are
            keys, but not queries. 0, or the length of the first segment, which must then be the only root.

    Attributes:
        num_tokens: T.
        depth_first: Whether each parent is directly followed by its descendants.

    Raises:
        ValueError: If the arguments differ in length, a length is negative, the order is another one, or
            `num_prefilled` is another number.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        parents: Sequence[int | None],
        group_ids: Sequence[Hashable] | None = None,
        *,
        num_prefilled: int = 0,
    ) -> None:
        segments: list[Segment] = []
        open_path: list[int] = []
        roots = {index for index, parent in enumerate(parents) if parent is None}
        is_flat = roots.issuperset(parent for parent in parents if parent is not None)
        self.depth_first = True
        start = 0
        names = [None] * len(lengths) if group_ids is None else group_ids
        for index, (length, parent, name) in enumerate(zip(lengths, parents, names, strict=True)):
            if length < 0:
                raise ValueError(f"lengths[{index}] is {length}; a segment has 0 tokens or more.")
            while open_path and open_path[-1] != parent:
                open_path.pop()
            if parent is not None and not open_path:
                if parent >= index or not is_flat:
                    raise ValueError(f"parents[{index}] is {parent}, no open segment there; list segments depth-first.")
                self.depth_first = False
            open_path.append(index)
            above = None if parent is None else segments[parent]
            if group_ids is None:
                name = index if above is None else above.group_id
            position = 0 if above is None else above.position + above.length
            segments.append(Segment(start, length, parent, position, name))
            start += length
        if num_prefilled and (num_prefilled != lengths[0] or list(parents).count(None) > 1):
            raise ValueError(f"num_prefilled is {num_prefilled}; pass 0 or the length of the only root, {lengths[0]}.")
        self.segments: tuple[Segment, ...] = tuple(segments)
        self.num_tokens: int = start
        self.num_prefilled = num_prefilled
        self._memo: dict[Hashable, Any] = {}

    @classmethod
    def from_groups(
        cls,
        groups: Sequence[tuple[int, Sequence[int]]],
        group_ids: Sequence[Hashable] | None = None,
        *,
        num_prefilled: int = 0,
    ) -> SharedPrefixLayout:
        """Lay out prompts, each followed by its rollouts.

        Args:
            groups: Prompt length and rollout lengths of each group.
            group_ids: A name for each group; defaults to the index of its root.
            num_prefilled: Length of the only group's prompt, if it ran in an earlier call.

        Raises:
            ValueError: If `group_ids` does not have one entry per group.
        """
        lengths: list[int] = []
        parents: list[int | None] = []
        names: list[Hashable] = []
        given = [None] * len(groups) if group_ids is None else group_ids
        for (prefix_len, suffix_lens), name in zip(groups, given, strict=True):
            root = len(lengths)
            lengths += [prefix_len, *suffix_lens]
            parents += [None, *[root] * len(suffix_lens)]
            names += [root if group_ids is None else name] * (1 + len(suffix_lens))
        return cls(lengths, parents, names, num_prefilled=num_prefilled)

    @property
    def num_queries(self) -> int:
        """Tokens that run: all but the prefilled ones."""
        return self.num_tokens - self.num_prefilled

    @cached_property
    def position_ids(self) -> Tensor:
        """Position of each token in its own sequence, shape [T], int64."""
        return torch.arange(self.num_tokens) + self.per_token([s.position - s.start for s in self.segments])

    def positions_on(self, device: torch.device) -> Tensor:
        """`position_ids` on a device."""
        return self.memo(("position_ids", device), lambda: self.position_ids.to(device))

    @cached_property
    def depth_first_order(self) -> tuple[int, ...]:
        """Indices of the segments, each directly followed by its descendants, shape [S]."""
        roots = [index if segment.parent is None else segment.parent for index, segment in enumerate(self.segments)]
        order = range(len(roots))
        return tuple(order if self.depth_first else sorted(order, key=roots.__getitem__))

    @cached_property
    def depth_first_places(self) -> Tensor:
        """Index of each token if the row were in depth-first order, shape [T], int64."""
        moves, place = [0] * len(self.segments), 0
        for index in self.depth_first_order:
            moves[index] = place - self.segments[index].start
            place += self.segments[index].length
        return torch.arange(self.num_tokens) + self.per_token(moves)

    @cached_property
    def subtree_stops(self) -> tuple[int, ...]:
        """Index after the last token of each segment and its descendants, in depth-first order, shape [S]."""
        stops, place = [0] * len(self.segments), 0
        for index in self.depth_first_order:
            place += self.segments[index].length
            stops[index] = place
        for index in reversed(range(len(self.segments))):
            parent = self.segments[index].parent
            if parent is not None:
                stops[parent] = max(stops[parent], stops[index])
        return tuple(stops)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Number of ancestors of each segment, shape [S]."""
        depths: list[int] = []
        for segment in self.segments:
            depths.append(0 if segment.parent is None else depths[segment.parent] + 1)
        return tuple(depths)

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        """Indices of the segments without children. Each ends one sequence of the repeated run."""
        parents = {segment.parent for segment in self.segments}
        return tuple(index for index in range(len(self.segments)) if index not in parents)

    @cached_property
    def repeated_lengths(self) -> tuple[int, ...]:
        """Length of each sequence that the repeated run would encode, one per leaf."""
        return tuple(self.segments[leaf].position + self.segments[leaf].length for leaf in self.leaves)

    @cached_property
    def multiplicity(self) -> Tensor:
        """Number of sequences that contain each token (leaves at or below its segment), shape [T], int64."""
        counts = [0] * len(self.segments)
        for leaf in self.leaves:
            counts[leaf] = 1
        for index in reversed(range(len(self.segments))):
            parent = self.segments[index].parent
            if parent is not None:
                counts[parent] += counts[index]
        return self.per_token(counts)

    @property
    def token_ratio(self) -> float:
        """Tokens with repeated prefixes over tokens that run; 1 if nothing is shared."""
        return sum(self.repeated_lengths) / self.num_queries if self.num_queries else 1.0

    @property
    def attention_pairs(self) -> int:
        """Number of pairs of a query and a visible key, over the tokens that run."""
        run = [segment for segment in self.segments if segment.start >= self.num_prefilled]
        return sum(s.length * s.position + s.length * (s.length + 1) // 2 for s in run)

    @property
    def repeated_attention_pairs(self) -> int:
        """The same with repeated prefixes."""
        return sum(length * (length + 1) // 2 for length in self.repeated_lengths)

    @property
    def num_groups(self) -> int:
        """Number of roots with descendants: prefixes that are shared."""
        shared = {segment.parent for segment in self.segments}
        return sum(segment.parent is None and index in shared for index, segment in enumerate(self.segments))

    def path(self, index: int) -> Tensor:
        """Row indices of the tokens from the root to the end of a segment, int64."""
        runs: list[Tensor] = []
        ancestor: int | None = index
        while ancestor is not None:
            segment = self.segments[ancestor]
            runs.append(torch.arange(segment.start, segment.stop))
            ancestor = segment.parent
        return torch.cat(runs[::-1])

    def memo(self, key: Hashable, make: Callable[[], _Value]) -> _Value:
        """Cache something derived from this layout (a mask, index tensor or plan) for later layers."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    def per_token(self, per_segment: Sequence[int]) -> Tensor:
        """Repeat per-segment numbers for each token, shape [T], int64."""
        lengths = torch.tensor([segment.length for segment in self.segments], dtype=torch.long)
        return torch.tensor(per_segment, dtype=torch.long).repeat_interleave(lengths)

    def visibility(self, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
        """Which token sees which, according to the forest alone.

        Returns:
            A function from query and key indices (int64, on the device, broadcastable) to bool: whether the key's
            segment is the query's or an ancestor's, and the key is not after the query. It closes over tensors only,
            so it can be compiled.
        """

        def bounds() -> tuple[Tensor, Tensor, Tensor | None]:
            places_T, stops_T = self.depth_first_places, self.per_token(self.subtree_stops)
            starts_T = places_T - torch.arange(self.num_tokens) + self.per_token([s.start for s in self.segments])
            return starts_T.to(device), stops_T.to(device), None if self.depth_first else places_T.to(device)

        starts_T, stops_T, places_T = self.memo(("subtree_bounds", device), bounds)

        def sees(query: Tensor, key: Tensor) -> Tensor:
            # In depth-first order, a segment's descendants lie between its start and its subtree's stop.
            place = query if places_T is None else places_T[query]
            return (place >= starts_T[key]) & (place < stops_T[key]) & (key <= query)

        return sees

    def __repr__(self) -> str:
        return (
            f"SharedPrefixLayout(tokens={self.num_tokens}, segments={len(self.segments)}, "
            f"token_ratio={self.token_ratio:.2f})"
        )


def draw_forest(layout: SharedPrefixLayout) -> str:
    """Draw a layout as a tree of its segments' lengths, one line per segment, depth-first."""
    last_child = {segment.parent: index for index, segment in enumerate(layout.segments)}
    lines: list[str] = []
    margins: dict[int, str] = {}  # of each segment's children
    for index in layout.depth_first_order:
        segment, branch, margin = layout.segments[index], "", ""
        if segment.parent is not None:
            is_last = last_child[segment.parent] == index
            branch = margins[segment.parent] + ("└─ " if is_last else "├─ ")
            margin = margins[segment.parent] + ("   " if is_last else "│  ")
        lines.append(f"{branch}{segment.length}")
        margins[index] = margin
    return "\n".join(lines)


def repeat_rows(layout: SharedPrefixLayout, input_ids: Tensor) -> dict[str, Tensor]:
    """Expand a packed row [1, T] into right-padded `input_ids` and `attention_mask`, shape [B, L], a row per leaf."""
    lengths_B = torch.tensor(layout.repeated_lengths, device=input_ids.device)
    rows_BL = repeat_values(layout, input_ids[0])
    mask_BL = torch.arange(rows_BL.shape[1], device=input_ids.device) < lengths_B[:, None]
    return {"input_ids": rows_BL, "attention_mask": mask_BL.to(input_ids.dtype)}


def repeat_values(layout: SharedPrefixLayout, packed_T: Tensor) -> Tensor:
    """Expand values of packed tokens [T] into right-padded rows [B, L], a row per leaf, with zeros at padding."""
    rows = [packed_T[layout.path(leaf).to(packed_T.device)] for leaf in layout.leaves]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
