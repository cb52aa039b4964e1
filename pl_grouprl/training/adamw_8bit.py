"""bitsandbytes' AdamW, with 8- or 32-bit moments per parameter group."""

from __future__ import annotations

from typing import Any

from bitsandbytes.optim import AdamW


class AdamW8bit(AdamW):
    """AdamW with moments quantized in blocks (arXiv:2110.02861) in the groups whose `state_bits` is 8.

    bitsandbytes takes one number of bits for the whole optimizer; its overrides for single weights are process-wide, so
    they would outlive the run.

    Args:
        groups: Parameter groups, each with `state_bits` (8 or 32) and all options of AdamW.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, optim_bits=8)

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        """Options of one parameter, as bitsandbytes names them."""
        return super().get_config(gindex, pindex, group) | {"optim_bits": group["state_bits"]}
