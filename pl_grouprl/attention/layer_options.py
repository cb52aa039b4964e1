"""What a layer tells its attention function beside the mask, and the rule that both make."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from pl_grouprl.attention.backends.rule import AttentionRule
from pl_grouprl.attention.mask import MaskRule
from pl_grouprl.packing import SharedPrefixLayout

OWN_MASK = (
    "has a mask or bias of its own, which shared-prefix attention does not apply; train this model with "
    "sharing='repeated'."
)
"""Why a layer is refused that was given another mask than ours."""


class LayerOptions(NamedTuple):
    """Keywords of transformers' attention functions that change the result; see `AttentionRule`.

    Attributes:
        scale: `scaling`.
        softcap: `softcap`.
        sinks_H: `s_aux`.
        window: `sliding_window`, which says again what the mask says.
    """

    scale: float
    softcap: float | None
    sinks_H: Tensor | None
    window: int | None

    def rule(self, mask: MaskRule, layout: SharedPrefixLayout) -> AttentionRule:
        """Put mask and keywords together.

        Raises:
            NotImplementedError: If their windows differ and a sequence is longer: then transformers' attention
                implementations differ among themselves.
        """
        longest = max(layout.repeated_lengths, default=0)
        if self.window is not None and self.window != mask.window and longest > self.window:
            raise NotImplementedError(
                f"a layer passes sliding_window={self.window} with a mask whose window is {mask.window}, so that its "
                "attention implementations differ among themselves; train this model with sharing='repeated'."
            )
        return AttentionRule(
            self.scale, mask.window, mask.chunk, self.softcap, self.sinks_H, mask.blocks, mask.window_bounds_blocks
        )
