"""Ordinary padded batches as packed forests: which calls share prefixes, and the way there and back.

Legend: B rows, L their padded length, T packed tokens, D hidden size, E experts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pl_grouprl.attention.function import scales_by_row
from pl_grouprl.attention.layer_check import Padding
from pl_grouprl.attention.masks import DENSE
from pl_grouprl.attention.stateful import STATEFUL, has_bias, stateful_mixers
from pl_grouprl.attention.support import has_dynamic_rope, positions_are_relative, why_no_standard_loss
from pl_grouprl.packing import SharedPrefixLayout, build_trie
from pl_grouprl.packing.trie import MIN_SAVED_TOKENS
from pl_grouprl.utilities import internals


@dataclass(frozen=True)
class SharedRows:
    """Rows of a padded batch as one packed row.

    Attributes:
        layout: The forest of the rows.
        input_ids: The packed tokens, shape [1, T].
        position_ids: Their positions, shape [1, T].
        packed_index: Index in the packed row of each token of each row, shape [B, L]; 0 at padding.
        kept: Where the rows have tokens, shape [B, L]; None without padding.
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
            raise NotImplementedError(f"hidden states have shape {list(packed.shape)}; omit output_hidden_states.")
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

    The model's load-balancing loss then equals the repeated run's, as it ignores padding.

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
            shape = tuple(logits_TE.shape)
            raise RuntimeError(f"router logits have shape {shape} for {tokens} tokens; omit output_router_logits.")
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
        max_depth: Maximum depth of the forest; no limit if None.

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
    names: Sequence[Hashable] = [0] * batch
    if group_ids is not None:
        names = group_ids.tolist() if isinstance(group_ids, Tensor) else group_ids
    lengths: list[int] = []
    parents: list[int | None] = []
    segment_names: list[Hashable] = []
    taken_runs: list[Tensor] = []
    leaves: dict[int, int] = {}  # by row
    for name in dict.fromkeys(names):
        members = [row for row, own in enumerate(names) if own == name]
        trie, above = build_trie([rows[row] for row in members], min_saved_tokens, max_depth=max_depth), len(lengths)
        leaves |= {row: above + leaf for row, leaf in zip(members, trie.leaves, strict=True)}
        for node in trie.nodes:
            lengths.append(node.length)
            parents.append(None if node.parent is None else above + node.parent)
            segment_names.append(name)
            taken_runs.append(source[members[node.sequence]][node.start : node.stop])
    layout, taken = SharedPrefixLayout(lengths, parents, segment_names), torch.cat(taken_runs)
    if layout.num_tokens == sum(map(len, rows)):
        return None
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


CACHE_IN_USE = "a cache is in use"
"""Why calls during generation go through untouched."""

_KNOWN_ARGUMENTS = {"input_ids", "attention_mask", "position_ids"}


class RowSharing:
    """Packs the rows of a decoder's ordinary calls if the result is the same.

    Args:
        decoder: The decoder.
        min_saved_tokens: Minimum number of tokens that sharing a prefix must save.
        max_depth: Maximum depth of the forest; no limit if None.

    Attributes:
        positions_are_relative: Whether rows whose positions differ by a constant may share a prefix.
        scales_by_row: Whether layers scale queries by their index in the row.
        differing_padding: Padding with which rows are not shared; None shares with any padding.
    """

    def __init__(self, decoder: Any, min_saved_tokens: int, max_depth: int | None) -> None:
        self.min_saved_tokens = min_saved_tokens
        self.positions_are_relative = positions_are_relative(decoder)
        self.differing_padding: Padding | None = None
        self._decoder, self._max_depth = decoder, max_depth
        # OPT's default positions count the tokens of the attention mask, not the columns.
        names = {type(module).__name__ for module in decoder.modules()}
        self._positions_count_mask = "OPTLearnedPositionalEmbedding" in names
        self.scales_by_row = any(scales_by_row(module) for module in decoder.modules())
        self._has_dynamic_rope = has_dynamic_rope(decoder)
        self._padding_reaches_states = any(has_bias(mixer) for mixer in stateful_mixers(decoder))
        self._labels_need_padding = False

    def note_labels(self, labels: Any, mask: Any) -> None:
        """Note whether the next call's labels are predicted at padding, which packed rows do not have."""
        self._labels_need_padding = (
            isinstance(labels, Tensor)
            and isinstance(mask, Tensor)
            and mask.shape == labels.shape
            and bool(((labels[:, 1:] != -100) & (mask[:, :-1] == 0)).any())
        )

    def pack(self, kwargs: dict[str, Any], group_ids: Any, layers: dict[str, tuple[str, int]]) -> SharedRows | str:
        """Pack the rows of a call, or return the reason to leave it untouched.

        Args:
            kwargs: Arguments of the call.
            group_ids: One per row; only rows of the same group share. None compares all rows.
            layers: The backend of each kind of layer, as in `SharedPrefix.layers`.
        """
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        reason = unsharable(kwargs, self._decoder.config, self._decoder) or self._why_padding_differs(mask, layers)
        if reason is not None:
            return reason
        if positions is None and mask is not None and self._positions_count_mask:
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        shared = share_rows(
            kwargs["input_ids"], mask, positions, group_ids,
            positions_are_relative=self.positions_are_relative, by_column=self.scales_by_row,
            min_saved_tokens=self.min_saved_tokens, max_depth=self._max_depth,
        )  # fmt: skip
        if shared is None:
            return "no rows of the batch share a prefix"
        if self._has_dynamic_rope:
            given = kwargs.get("position_ids")
            largest = kwargs["input_ids"].shape[1] - 1 if given is None else int(given.max())
            if int(shared.position_ids.max()) != largest:
                return "its rotary frequencies depend on the largest position, which is that of padding"
        return shared

    def _why_padding_differs(self, mask: Tensor | None, layers: dict[str, tuple[str, int]]) -> str | None:
        if self._labels_need_padding:
            return "its labels train tokens that padding predicts"
        if mask is None:
            return None
        kept = mask.bool()
        starts = kept & ~torch.nn.functional.pad(kept, (1, 0))[:, :-1]
        # Layers that count padding between tokens; those of an unknown model may.
        counts_columns = not layers or any(
            "window" in kind or "chunks" in kind or kind == DENSE or ran == STATEFUL
            for kind, (ran, _) in layers.items()
        )
        if counts_columns and bool((starts.sum(dim=1) > 1).any()):
            return "its padding lies between tokens, which windows, chunks and states count"
        left = ~kept[:, 0]
        if self._padding_reaches_states and bool(left.any()):
            return "its padding on the left reaches the states of its layers through a bias"
        hidden = ~kept if self.differing_padding == "padding" else left
        if self.differing_padding is not None and bool(hidden.any()):
            return f"a trial on a few tokens with {self.differing_padding} differed from the unshared run"
        return None


def unsharable(arguments: dict[str, Any], config: Any, decoder: nn.Module | None = None) -> str | None:
    """Why a decoder call must go through untouched, or None if its rows can be packed.

    Args:
        arguments: Arguments of the call, by name.
        config: Config of the decoder.
        decoder: The decoder, if `unpack_router_logits` will process requested router logits.
    """
    input_ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
    tensors = {name for name, value in arguments.items() if isinstance(value, Tensor) and value.dim()}
    tensors -= _KNOWN_ARGUMENTS

    def asked_for(option: str) -> bool:
        return bool(arguments[option] if arguments.get(option) is not None else getattr(config, option, False))

    by_name = arguments.get("return_dict", getattr(config, "return_dict", True)) is not False
    findings = {
        CACHE_IN_USE: internals.holds_cache(arguments) or bool(arguments.get("use_cache")),
        "embeddings cannot be compared": input_ids is None,
        "input_ids are not of shape [rows, tokens]": input_ids is not None and input_ids.dim() != 2,
        "it has one row": input_ids is not None and len(input_ids) < 2,
        "attention_mask is not of the shape of input_ids":
            mask is not None and getattr(mask, "shape", None) != getattr(input_ids, "shape", None),
        "attention weights are requested": asked_for("output_attentions"),
        "router logits are requested":
            asked_for("output_router_logits")  # returned row by row only if the loss ignores padding
            and not (decoder is not None and by_name and why_no_standard_loss(decoder) is None),
        "position_ids are not of shape [rows, tokens]": getattr(arguments.get("position_ids"), "ndim", 2) != 2,
        f"{', '.join(sorted(tensors))} would have to be packed too": bool(tensors),
    }  # fmt: skip
    return next((reason for reason, found in findings.items() if found), None)
