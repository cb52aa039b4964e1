"""Our mask function for transformers: in a packed row it returns a marker, or a dense mask, not an ordinary mask.

A *marker* is a small tensor that carries a layer's attention pattern (see `mask_rule`) and the call's layout to the
attention function, through any layer, whatever else the layer passes on. Activation checkpointing saves it with the
layer's input, so a layer that is recomputed in the backward pass finds the call that it belongs to.

Layers that compute with the mask themselves (they score keys and keep the best, for example) cannot read a marker. They
get the forest as a dense mask, in the form of the wrapped attention implementation, which then runs them.

Legend: S tokens of the packed row that run (all but the given ones).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from pl_grouprl.attention.dense_masks import forest_mask
from pl_grouprl.attention.layout_call import LayoutCall
from pl_grouprl.attention.mask_rule import MaskRule, read_mask_function
from pl_grouprl.packing import SharedPrefixLayout

_MAGIC = 0x5E95
"""First number of a marker; a model's own mask never has it."""

_HEADER = 4
"""Rows of a marker before its segments."""


@dataclass(frozen=True)
class MarkedLayer:
    """The call that a marker belongs to, and how its layer attends."""

    call: LayoutCall
    rule: MaskRule


_PACKED_ROW: ContextVar[LayoutCall | None] = ContextVar("packed_row", default=None)
"""The call on a packed row whose masks are being created; None in an ordinary call.

A global suffices: masks are created once, before the layers, never when a layer is recomputed.
"""

_MARKED: WeakValueDictionary[int, MarkedLayer] = WeakValueDictionary()
"""By a marker's number, for as long as the marker lives."""

_NUMBERS = count(1)


def start_packed_masks(call: LayoutCall) -> None:
    """Make `mask_function` return markers, or dense masks, of a packed row from now on."""
    _PACKED_ROW.set(call)


def end_packed_masks() -> None:
    """Make `mask_function` return ordinary masks again."""
    _PACKED_ROW.set(None)


def mask_function(wrapped: Callable[..., Any] | None) -> Callable[..., Any]:
    """Make our mask function; outside packed rows it calls that of the wrapped implementation, if any."""

    @torch.compiler.disable(reason="reads the model's mask function in Python")
    def make_mask(*args: Any, **kwargs: Any) -> Any:
        call = _PACKED_ROW.get()
        if call is None:
            return None if wrapped is None else wrapped(*args, **kwargs)
        rule = read_mask_function(kwargs["mask_function"])
        if call.dense:
            return forest_mask(rule.without_options().simplified(call.layout), call, wrapped, kwargs)
        return mark(rule, call)

    return make_mask


def mark(rule: MaskRule, call: LayoutCall) -> Tensor:
    """Make the marker that a layer gets in place of its mask in a packed call; see `to_marker`."""
    number = next(_NUMBERS)
    marker = to_marker(rule, call.layout, number)
    marker.marked = _MARKED[number] = MarkedLayer(call, rule)  # type: ignore[attr-defined]  # lives as long
    return marker


def marked_layer(mask: Any) -> MarkedLayer | None:
    """The call and the rule of a layer's marker; None if its mask is an ordinary one."""
    return _MARKED.get(int(mask[0, 0, 3, 0])) if is_marker(mask) else None


def to_marker(rule: MaskRule, layout: SharedPrefixLayout, number: int = 0) -> Tensor:
    """Encode a rule and the forest as pairs of int64 on the CPU, so reading them does not synchronize.

    The shape is [1, 1, rows, 2] with rows != S, which is no valid mask for S tokens: a layer that is recomputed after
    the context exits fails instead of computing something wrong.
    """
    rows = [
        (_MAGIC, rule.window or 0),
        (rule.chunk or 0, int(rule.window_bounds_blocks) + 2 * (rule.blocks is not None)),
        (layout.num_queries, len(layout.segments)),
        (number, 0),
        *((segment.length, -1 if segment.parent is None else segment.parent) for segment in layout.segments),
        *((block, 0) for block in rule.blocks or ()),
    ]
    if len(rows) == layout.num_queries:
        rows.append((0, 0))
    return torch.tensor(rows)[None, None]


def has_shape_of_marker(mask: Any) -> bool:
    """Whether a layer's mask may be a marker, judged by dtype and shape alone, as compiled graphs must."""
    return (
        isinstance(mask, Tensor)
        and mask.dtype == torch.int64
        and mask.dim() == 4
        and mask.shape[-1] == 2
        and mask.shape[2] >= _HEADER
    )


def is_marker(mask: Any) -> bool:
    """Whether a layer's mask is a marker, of any call."""
    return has_shape_of_marker(mask) and int(mask[0, 0, 0, 0]) == _MAGIC


def from_marker(marker: Any) -> MaskRule | None:
    """Decode the rule from a layer's mask, or None if it is not a marker."""
    if not is_marker(marker):
        return None
    (_, window), (chunk, flags), (tokens, segments), _ = marker[0, 0, :_HEADER].tolist()
    start = _HEADER + segments
    blocks = tuple(marker[0, 0, start : start + tokens, 0].tolist()) if flags & 2 else None
    return MaskRule(window or None, chunk or None, blocks, bool(flags & 1))


def forest_of_marker(marker: Tensor) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
    """Lengths and parents of the segments in a marker."""
    segments = int(marker[0, 0, 2, 1])
    lengths, parents = marker[0, 0, _HEADER : _HEADER + segments].t().tolist()
    return tuple(lengths), tuple(None if parent < 0 else parent for parent in parents)
