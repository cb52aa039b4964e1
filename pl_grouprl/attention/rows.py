"""Converts an ordinary padded batch to a packed forest and back; compares tokens to find shared prefixes.

Legend: B rows, L their padded length, T packed tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_grouprl.packing import SharedPrefixLayout, build_trie
from pl_grouprl.packing.trie import MIN_SAVED_TOKENS


@dataclass(frozen=True)
class SharedRows:
    """Rows of a padded batch as one packed row.

    Attributes:
        layout: The forest of the rows.
        input_ids: The packed tokens, shape [1, T].
        position_ids: Their positions, shape [1, T].
        packed_index: Index in the packed row of each token of each row, shape [B, L]; 0 at padding.
        kept: Where the rows have tokens, shape [B, L]; None if there is no padding.
        columns_T: Columns of the packed tokens in their rows, shape [T], if rows were compared by column.
    """

    layout: SharedPrefixLayout
    input_ids: Tensor
    position_ids: Tensor
    packed_index: Tensor
    kept: Tensor | None
    columns_T: Tensor | None = None

    @property
    def padding_fraction(self) -> float:
        """Fraction of the rows that is padding."""
        return 0.0 if self.kept is None else 1 - self.kept.float().mean().item()

    def unpack(self, packed: Tensor) -> Tensor:
        """[1, T, D] -> [B, L, D], zero at padding.

        Raises:
            NotImplementedError: If the states have more dimensions (as Gemma 3n's do).
        """
        if packed.dim() != 3 or packed.shape[0] != 1:
            raise NotImplementedError(
                f"hidden states of shape {list(packed.shape)} cannot be returned row by row; leave out "
                "output_hidden_states, or call the model outside of shared_prefix."
            )
        rows = packed[0].index_select(0, self.packed_index.flatten()).unflatten(0, self.packed_index.shape)
        return rows if self.kept is None else rows * self.kept[..., None]


def unpack_output(output: Any, rows: SharedRows) -> Any:
    """Replace the packed hidden states and router logits of a decoder's output by those of the caller's rows."""
    if isinstance(output, Tensor):
        return rows.unpack(output)
    if isinstance(output, tuple):
        return tuple(unpack_output(item, rows) if item is not None else None for item in output)
    for name in ("last_hidden_state", "hidden_states"):
        if output.get(name) is not None:
            output[name] = unpack_output(output[name], rows)
    return unpack_router_logits(output, rows)


def unpack_router_logits(output: Any, rows: SharedRows) -> None:
    """Replace a decoder's router logits [T, E] of each layer with those of the caller's rows, [B * L, E]; 0 at padding.

    The model's load-balancing loss then equals that of the repeated run, as it ignores padding.

    Args:
        output: The decoder's output with named fields; changed in place if it has router logits.
        rows: The caller's rows.

    Raises:
        RuntimeError: If router logits are not of shape [T, E].
    """
    packed = output.get("router_logits")
    if packed is None:
        return
    tokens = rows.layout.num_tokens
    for logits_TE in packed:
        if logits_TE.dim() != 2 or len(logits_TE) != tokens:
            raise RuntimeError(
                f"router logits have shape {tuple(logits_TE.shape)} for {tokens} packed tokens, so they cannot be "
                "returned row by row; leave out output_router_logits."
            )
    output["router_logits"] = tuple(rows.unpack(logits_TE[None]).flatten(0, 1) for logits_TE in packed)


def share_rows(
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    group_ids: Sequence[Hashable] | Tensor | None = None,
    *,
    positions_are_relative: bool = True,
    by_column: bool = False,
    min_saved_tokens: int = MIN_SAVED_TOKENS,
    max_depth: int | None = None,
) -> SharedRows | None:
    """Pack the rows of a padded batch, each common prefix once.

    Args:
        input_ids: Shape [B, L].
        attention_mask: 1 where a row has a token, shape [B, L]; by default everywhere.
        position_ids: Shape [B, L] or [1, L]; by default the column, as in transformers.
        group_ids: One per row; only rows of the same group are compared.
        positions_are_relative: Whether only distances matter to the model (rotary embeddings), so rows can share even
            if their positions differ by a constant.
        by_column: Whether the model counts columns, including padding, instead of positions, so only tokens in the
            same column can be shared.
        min_saved_tokens: A prefix is shared only if that saves at least this many tokens.
        max_depth: Maximum depth of the forest; None for no limit.

    Returns:
        The packed rows, or None if nothing is saved.

    Raises:
        ValueError: If `group_ids` does not have one entry per row.
    """
    batch, width = input_ids.shape
    if group_ids is not None and len(group_ids) != batch:
        raise ValueError(f"group_ids has {len(group_ids)} entries for {batch} rows of input_ids; pass one per row.")
    columns = torch.arange(width).expand(batch, width)
    kept = torch.ones(batch, width, dtype=torch.bool) if attention_mask is None else attention_mask.bool().cpu()
    positions = columns if position_ids is None else position_ids.cpu().expand(batch, width)
    if attention_mask is None and bool((positions.diff(dim=1) != 1).any()):
        return None  # positions restart: the caller already packed sequences
    if positions_are_relative:
        first = positions.gather(1, kept.int().argmax(dim=1, keepdim=True))
        positions = positions - first
    source = [columns[row][kept[row]] + row * width for row in range(batch)]
    tokens, flat_positions = input_ids.cpu().flatten(), positions.flatten()
    compared = [tokens, flat_positions, *([columns.flatten()] if by_column else [])]
    values = torch.stack(compared, dim=1).numpy()
    rows = [values[index.numpy()] for index in source]
    names: list[Hashable] = [0] * batch if group_ids is None else _names(group_ids)
    layout, spans, leaves = _forest(rows, names, min_saved_tokens, max_depth)
    if layout.num_tokens == sum(map(len, rows)):
        return None
    taken = torch.cat([source[row][start:stop] for row, start, stop in spans])
    packed_index = torch.zeros(batch, width, dtype=torch.long)
    for row, leaf in leaves.items():
        packed_index[row][kept[row]] = layout.path(leaf)
    device = input_ids.device
    return SharedRows(
        layout=layout,
        input_ids=tokens[taken][None].to(device),
        position_ids=flat_positions[taken][None].to(device),
        packed_index=packed_index.to(device),
        kept=None if bool(kept.all()) else kept.to(device),
        columns_T=(taken % width).to(device) if by_column else None,
    )


def _forest(
    rows: Sequence[np.ndarray], names: Sequence[Hashable], min_saved_tokens: int, max_depth: int | None
) -> tuple[SharedPrefixLayout, list[tuple[int, int, int]], dict[int, int]]:
    """The tries of each group's rows: their layout, the row and tokens of each segment, and the leaf of each row."""
    lengths: list[int] = []
    parents: list[int | None] = []
    group_ids: list[Hashable] = []
    spans: list[tuple[int, int, int]] = []
    leaves: dict[int, int] = {}
    for name in dict.fromkeys(names):
        members = [row for row, own in enumerate(names) if own == name]
        trie, first = build_trie([rows[row] for row in members], min_saved_tokens, max_depth=max_depth), len(lengths)
        leaves |= {row: first + leaf for row, leaf in zip(members, trie.leaves, strict=True)}
        for node in trie.nodes:
            lengths.append(node.length)
            parents.append(None if node.parent is None else first + node.parent)
            group_ids.append(name)
            spans.append((members[node.sequence], node.start, node.stop))
    return SharedPrefixLayout(lengths, parents, group_ids), spans, leaves


def _names(group_ids: Sequence[Hashable] | Tensor) -> list[Hashable]:
    return group_ids.tolist() if isinstance(group_ids, Tensor) else list(group_ids)
