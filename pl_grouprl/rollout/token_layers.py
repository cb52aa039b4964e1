"""Rows of cache layers that keep further tensors for each token, such as an indexer's keys, beside keys and values.

Their names and shapes differ between models. Which dimension counts rows and which tokens is observed: a copy of the
layer without data runs its own `reorder_cache` and `crop`. The layers keep transformers' class.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

_AXES: WeakKeyDictionary[type, dict[tuple[tuple[str, int], ...], dict[str, Axes]]] = WeakKeyDictionary()
"""What was found, by class, and by names and numbers of dimensions of the tensors."""

_ALWAYS_EMPTY = {"keys", "values", "device", "dtype"}


class Axes(NamedTuple):
    """Dimensions of a tensor that a layer keeps for each token.

    Attributes:
        rows: The dimension of rows.
        tokens: The dimension of cached tokens.
    """

    rows: int
    tokens: int


def keeps_more(layer: Any) -> bool:
    """Whether an empty layer has room for more than keys, values and states."""
    return any(value is None and name not in _ALWAYS_EMPTY for name, value in vars(layer).items())


def token_axes(layer: Any) -> dict[str, Axes] | None:
    """Dimensions of each tensor that a layer keeps; None unless each has an entry for every row and every token."""
    kept = {name: value for name, value in vars(layer).items() if isinstance(value, Tensor)}
    in_containers = any(isinstance(value, dict | list | tuple) for value in vars(layer).values())
    if not kept or in_containers or layer.is_sliding:
        return None
    known, shape = _AXES.setdefault(type(layer), {}), tuple((name, tensor.dim()) for name, tensor in kept.items())
    axes = known.get(shape) or _find_axes(layer, kept)
    if axes is None or any(kept[name].shape[axes[name].tokens] != layer.get_seq_length() for name in kept):
        return None
    known[shape] = axes
    return axes


def gather_rows_of_tokens(parts: Sequence[tuple[Any, Tensor]], axes: dict[str, Axes], width: int) -> Any:
    """A layer with copies of the rows of all parts, right-aligned and padded with zeros.

    Args:
        parts: Layers of one kind, and the rows to take from each.
        axes: From `token_axes`.
        width: Tokens of the longest.
    """
    layer = copy.copy(parts[0][0])
    for name, (rows_axis, tokens_axis) in axes.items():
        pieces = [
            _padded(getattr(part, name).index_select(rows_axis, rows), tokens_axis, width) for part, rows in parts
        ]
        setattr(layer, name, pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=rows_axis))
    return layer


def take_row_of_tokens(layer: Any, axes: dict[str, Axes], row: int, num_tokens: int) -> Any:
    """A layer with a copy of one row's last tokens."""
    taken = copy.copy(layer)
    for name, (rows_axis, tokens_axis) in axes.items():
        tensor = getattr(layer, name).narrow(rows_axis, row, 1)
        setattr(taken, name, tensor.narrow(tokens_axis, tensor.shape[tokens_axis] - num_tokens, num_tokens).clone())
    return taken


def without_last_tokens(layer: Any, count: int) -> Any:
    """The layer without its last tokens, as a view."""
    shorter = copy.copy(layer)
    shorter.crop(-count)
    return shorter


def _find_axes(layer: Any, kept: dict[str, Tensor]) -> dict[str, Axes] | None:
    unused = 1 + max(max(tensor.shape, default=0) for tensor in kept.values())  # a size that no dimension has
    rows = _changed(layer, kept, lambda probe: probe.reorder_cache(torch.zeros(unused, dtype=torch.int64)))
    tokens = _changed(layer, kept, lambda probe: probe.crop(-1))
    return None if rows is None or tokens is None else {name: Axes(rows[name], tokens[name]) for name in kept}


def _changed(layer: Any, kept: dict[str, Tensor], run: Callable[[Any], None]) -> dict[str, int] | None:
    """The dimension of each tensor whose size an operation of the layer changes; None if that is not one of each."""
    probe = copy.copy(layer)
    for name, tensor in kept.items():
        setattr(probe, name, torch.empty_like(tensor, device="meta"))
    try:
        run(probe)
    except Exception:  # the layer lacks the operation, or refuses it
        return None
    found = {}
    for name, tensor in kept.items():
        after = getattr(probe, name)
        dims = [dim for dim, size in enumerate(after.shape) if size != tensor.shape[dim]]
        if after.dim() != tensor.dim() or len(dims) != 1:
            return None
        found[name] = dims[0]
    return found


def _padded(tensor: Tensor, axis: int, width: int) -> Tensor:
    missing = width - tensor.shape[axis]
    if missing == 0:
        return tensor
    return torch.cat([tensor.new_zeros([*tensor.shape[:axis], missing, *tensor.shape[axis + 1 :]]), tensor], dim=axis)
