"""Expands a packed row into the padded rows that it represents.

Legend: B sequences, L the longest of them, T packed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pl_grouprl.packing.layout import SharedPrefixLayout


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
