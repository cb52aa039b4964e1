"""The way back from a packed row: the padded rows that it stands for.

Legend: B sequences, L the longest of them, T packed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pl_grouprl.packing.layout import SharedPrefixLayout


def repeat_rows(layout: SharedPrefixLayout, input_ids: Tensor) -> dict[str, Tensor]:
    """Undo a packed row [1, T]: right-padded `input_ids` and `attention_mask`, shape [B, L], a row per leaf."""
    rows = [input_ids[0, layout.path(leaf).to(input_ids.device)] for leaf in layout.leaves]
    mask_BL = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), "attention_mask": mask_BL}
