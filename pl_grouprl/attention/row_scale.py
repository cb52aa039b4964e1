"""Llama 4 scales the queries of its layers without rotary embedding by their place in the row; here, by their position.

The factor is 1 + attn_scale * log(1 + floor((place + 1) / floor_scale)) (arXiv:2501.19399, as transformers computes it
from the index of the token in the row). In a packed row the index is not the position, so the factor is exchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pl_grouprl.packing import SharedPrefixLayout


def scales_by_row(module: nn.Module) -> bool:
    """Whether an attention layer multiplies its queries by a factor of their index in the row."""
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)


def rescale_by_position(module: nn.Module, query: Tensor, layout: SharedPrefixLayout) -> Tensor:
    """Replace the factor of each query's index in the row by that of its position; [1, H, S, D] to the same."""
    positions = layout.positions_on(query.device)[layout.given :]
    rows = torch.arange(len(positions), device=query.device)
    ratio_T = _factor(module, positions) / _factor(module, rows)
    return query * ratio_T[:, None].to(query.dtype)


def _factor(module: nn.Module, places: Tensor) -> Tensor:
    steps = torch.floor((places.float() + 1) / module.floor_scale)  # type: ignore[operator]
    return 1 + module.attn_scale * torch.log1p(steps)  # type: ignore[operator]
