"""Corrects Llama 4's query scale: layers without rotary embedding scale by the column in the row, padding included.

The factor is 1 + attn_scale * log(1 + floor((column + 1) / floor_scale)) (arXiv:2501.19399, as transformers computes it
from the token's index in the row). In a packed row the index is not the column that the token would have in a separate
row, so the factor is replaced.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pl_grouprl.packing import SharedPrefixLayout


def scales_by_row(module: nn.Module) -> bool:
    """Whether an attention layer scales its queries by their index in the row."""
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)


def rescale_by_column(
    module: nn.Module, query: Tensor, layout: SharedPrefixLayout, columns_T: Tensor | None = None
) -> Tensor:
    """Replace each query's factor for its index in the packed row with the one for its column.

    Args:
        module: The attention layer.
        query: Queries scaled by index, shape [1, H, S, D]; the result has the same shape.
        layout: Layout of the packed row.
        columns_T: Columns of the tokens in the caller's rows; by default each sequence begins in column 0.
    """
    columns = layout.positions_on(query.device)[layout.num_prefilled :] if columns_T is None else columns_T
    rows = torch.arange(len(columns), device=query.device)
    ratio_T = _factor(module, columns) / _factor(module, rows)
    return query * ratio_T[:, None].to(query.dtype)


def _factor(module: nn.Module, columns: Tensor) -> Tensor:
    steps = torch.floor((columns.float() + 1) / module.floor_scale)  # type: ignore[operator]
    return 1 + module.attn_scale * torch.log1p(steps)  # type: ignore[operator]
