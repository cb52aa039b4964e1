"""How a layer's attention differs from plain causal softmax: window, chunk, soft cap, sinks, bidirectional blocks.

Legend: T packed tokens, H query heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from pl_grouprl.packing import SharedPrefixLayout

Visible = Callable[[Tensor, Tensor], Tensor]
"""(query indices, key indices) -> whether the query sees the key."""


@dataclass(frozen=True)
class AttentionRule:
    """How one layer attends, as stated by the model in this call.

    Attributes:
        scale: Multiplies the scores.
        window: A token sees at most this many tokens of its sequence, including itself; None for no limit.
        chunk: A token sees only tokens of its sequence in the same chunk of this many positions; None for no limit.
        softcap: Scores are softcap * tanh(score / softcap) (Gemma 2, arXiv:2408.00118, section 2).
        sinks_H: One score per query head that takes part in the softmax but adds no value, shape [H] (gpt-oss).
        blocks: Block number of each of the T tokens, -1 for none. Tokens of a block (an image) see each other in both
            directions.
        window_bounds_blocks: Whether the window also applies inside a block.
    """

    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None
    blocks: tuple[int, ...] | None = None
    window_bounds_blocks: bool = True

    @property
    def kind(self) -> str:
        """The kind of layer in words: `full`, `window 512, sinks` and the like."""
        return ", ".join(self.features) or "full"

    @property
    def features(self) -> tuple[str, ...]:
        """How it differs from plain causal softmax, in words."""
        named = {
            f"window {self.window}": self.window,
            f"chunks of {self.chunk}": self.chunk,
            f"soft cap {self.softcap:g}" if self.softcap else "": self.softcap,
            "sinks": self.sinks_H,
            "bidirectional blocks": self.blocks,
        }
        return tuple(name for name, value in named.items() if value is not None)

    def simplified(self, layout: SharedPrefixLayout) -> AttentionRule:
        """Drop what has no effect on a row: a window or chunk at least as long as every sequence, empty blocks.

        Raises:
            NotImplementedError: If a block spans two segments (so the prefix would depend on what follows it), is not
                contiguous, or follows prefilled tokens.
        """
        longest = max(layout.repeated_lengths, default=0)
        has_blocks = self.blocks is not None and _has_blocks(self.blocks, layout)
        if has_blocks and layout.num_prefilled:
            raise NotImplementedError(
                "the rollouts of a group that is run in slices have tokens with bidirectional attention; use a larger "
                "token budget."
            )
        return replace(
            self,
            window=None if self.window is not None and longest <= self.window else self.window,
            chunk=None if self.chunk is not None and longest <= self.chunk else self.chunk,
            blocks=self.blocks if has_blocks else None,
        )

    @property
    def visibility(self) -> tuple[object, ...]:
        """All that determines which token sees which; the cache key of masks and plans."""
        return (self.window, self.chunk, self.blocks, self.window_bounds_blocks)


def visibility_function(layout: SharedPrefixLayout, rule: AttentionRule, device: torch.device) -> Visible:
    """Which token sees which: the definition for all backends.

    Returns:
        A function from query and key indices (int64, on the device, broadcastable) to bool; it closes over tensors
        only, so FlexAttention can compile it.
    """
    on_path, positions = layout.visibility(device), layout.positions_on(device)
    window, chunk = rule.window, rule.chunk

    def near(query: Tensor, key: Tensor) -> Tensor:
        seen = on_path(query, key)
        if window is not None:
            seen = seen & (positions[key] > positions[query] - window)
        if chunk is not None:
            seen = seen & (positions[key] // chunk == positions[query] // chunk)
        return seen

    if rule.blocks is None:
        return near
    blocks, bounded = torch.tensor(rule.blocks, device=device), rule.window_bounds_blocks

    def visible(query: Tensor, key: Tensor) -> Tensor:
        same_block = (blocks[query] == blocks[key]) & (blocks[query] >= 0)
        ahead = on_path(key, query) & (key > query)
        return near(query, key) | (same_block & (ahead if bounded else ahead | on_path(query, key)))

    return visible


def _has_blocks(blocks: tuple[int, ...], layout: SharedPrefixLayout) -> bool:
    """Whether any token that runs is in a block; refuses blocks that extend past a segment with children."""
    if layout.num_prefilled:
        return max(blocks, default=-1) >= 0
    for segment in layout.segments:
        if segment.parent is None or not segment.length:
            continue
        above = layout.path(segment.parent)
        if len(above) and blocks[segment.start] >= 0 and blocks[int(above[-1])] >= 0:
            raise NotImplementedError(
                f"token {segment.start} of the packed row is in the same block as the last token of its prefix (an "
                "image that is cut in two), so the prefix would depend on what follows it; end the prefix before or "
                "after the image."
            )
    runs = [number for number, _ in groupby(blocks) if number >= 0]
    if len(runs) > len(set(runs)):
        raise NotImplementedError(
            "tokens with bidirectional attention have others between them, which shared-prefix attention does not "
            "support; train this model with sharing='repeated'."
        )
    return bool(runs)
