"""What a layer's attention is beyond plain causal softmax: window, chunk, soft cap, sinks, blocks that see both ways.

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
"""(indices of queries, indices of keys) -> whether they see them."""


@dataclass(frozen=True)
class AttentionRule:
    """How one layer attends, as the model itself said it in this call.

    Attributes:
        scale: Factor of the scores.
        window: A token sees this many tokens of its sequence, itself the last of them; None sees all.
        chunk: A token sees those of its sequence that stand in the same chunk of so many positions; None sees all.
        softcap: Scores are softcap * tanh(score / softcap) (Gemma 2, arXiv:2408.00118, section 2).
        sinks_H: One score per query head that takes its share of the softmax and adds nothing, shape [H] (gpt-oss).
        blocks: Of each of the T tokens the number of its block, -1 for none: tokens of one block see each other in both
            directions (those of an image).
        window_bounds_blocks: Whether the window holds inside a block too.
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
        """What departs from plain causal softmax, in words."""
        named = {
            f"window {self.window}": self.window,
            f"chunks of {self.chunk}": self.chunk,
            f"soft cap {self.softcap:g}" if self.softcap else "": self.softcap,
            "sinks": self.sinks_H,
            "blocks that see both ways": self.blocks,
        }
        return tuple(name for name, value in named.items() if value is not None)

    def narrowed(self, layout: SharedPrefixLayout) -> AttentionRule:
        """Leave out what has no effect on a row: a window or chunk that no sequence is longer than, empty blocks.

        Raises:
            NotImplementedError: If a block reaches from one segment into another: what a prefix becomes would depend on
                what follows it. Or if tokens of one block do not stand side by side, or stand behind given tokens.
        """
        longest = max(layout.repeated_lengths, default=0)
        has_blocks = self.blocks is not None and _has_blocks(self.blocks, layout)
        if has_blocks and layout.given:
            raise NotImplementedError("tokens that see both ways stand behind the prompt of a group that is split.")
        return replace(
            self,
            window=None if self.window is not None and longest <= self.window else self.window,
            chunk=None if self.chunk is not None and longest <= self.chunk else self.chunk,
            blocks=self.blocks if has_blocks else None,
        )

    @property
    def visibility(self) -> tuple[object, ...]:
        """All that decides which token sees which; the key of masks and plans."""
        return (self.window, self.chunk, self.blocks, self.window_bounds_blocks)


def visibility_function(layout: SharedPrefixLayout, rule: AttentionRule, device: torch.device) -> Visible:
    """Which token sees which: the definition that every backend is measured by.

    Returns:
        A function of indices of queries and of keys (int64, on the device, shapes that broadcast) to bool; it closes
        over tensors only, so that FlexAttention can compile it.
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

    def near_or_together(query: Tensor, key: Tensor) -> Tensor:
        together = (blocks[query] == blocks[key]) & (blocks[query] >= 0)
        ahead = on_path(key, query) & (key > query)
        return near(query, key) | (together & (ahead if bounded else ahead | on_path(query, key)))

    return near_or_together


def _has_blocks(blocks: tuple[int, ...], layout: SharedPrefixLayout) -> bool:
    """Whether any token that is run is in a block; none may reach over the end of a segment that has children."""
    if layout.given:
        return max(blocks, default=-1) >= 0
    for segment in layout.segments:
        if segment.parent is None or not segment.length:
            continue
        above = layout.path(segment.parent)
        if len(above) and blocks[segment.start] >= 0 and blocks[int(above[-1])] >= 0:
            raise NotImplementedError(
                f"token {segment.start} of the packed row sees both ways with the last token of its prefix (an image "
                "that is cut in two), so what the prefix becomes depends on what follows it; end the prefix before or "
                "behind the image."
            )
    runs = [number for number, _ in groupby(blocks) if number >= 0]
    if len(runs) > len(set(runs)):
        raise NotImplementedError(
            "tokens that see both ways stand apart with others between them, which shared-prefix attention does not "
            "apply; train this model with sharing='repeated'."
        )
    return bool(runs)
