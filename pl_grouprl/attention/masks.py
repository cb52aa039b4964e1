"""Masks of packed rows: markers and dense masks for transformers, and the rules read from its own.

transformers composes a mask from small functions (causal, window, chunk, blocks) and passes the composition to the mask
function registered for the attention implementation. We read windows and chunks from that composition, so they come
from the model itself, not from a list of models, and raise at unknown parts. In a packed row our mask function then
returns a *marker*: a small tensor that carries the layer's pattern and the call's layout to the attention function,
through any layer, whatever else the layer passes on. Activation checkpointing saves it with the layer's input, so a
layer that is recomputed in the backward pass finds the call that it belongs to.

Layers that compute with the mask themselves (they score keys and keep the best, for example) cannot read a marker. They
get the forest as a dense mask [1, 1, T, T], in the form of the wrapped attention implementation, which then runs them
as it runs an ordinary row, and so select only tokens of the query's own sequence.

Legend: T tokens of the packed row, S of them that run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from pl_grouprl.attention.backends.interface import AttentionRule, cannot_share, visibility_function
from pl_grouprl.attention.call import PACKED_ROW, LayoutCall
from pl_grouprl.packing import SharedPrefixLayout


@dataclass(frozen=True)
class MaskRule:
    """The pattern of a mask function; see `AttentionRule` for the attributes."""

    window: int | None = None
    chunk: int | None = None
    blocks: tuple[int, ...] | None = None
    window_bounds_blocks: bool = True


def read_mask_function(function: Callable[..., Any]) -> MaskRule:
    """Read a composition of transformers' mask functions.

    Raises:
        NotImplementedError: If a part is unknown, or no rule expresses the combination.
    """
    kind, parts = _parse(function)
    if kind == "causal":
        return MaskRule()
    if kind == "or":
        plain = [part for part in parts if _parse(part)[0] != "blocks"]
        blocks = [_parse(part)[1] for part in parts if _parse(part)[0] == "blocks"]
        if len(plain) == 1 and len(blocks) == 1:
            rule = read_mask_function(plain[0])
            if rule.blocks is None:
                return MaskRule(rule.window, rule.chunk, blocks[0], window_bounds_blocks=False)
    if kind != "and":
        raise _unknown(function)
    limits: dict[str, int] = {}
    base: MaskRule | None = None
    for part in parts:
        kind, content = _parse(part)
        if kind in ("window", "chunk") and kind not in limits:
            limits[kind] = content
        elif kind in ("causal", "or", "and") and base is None:
            base = read_mask_function(part)
        else:
            raise _unknown(part)
    if base is None or (base.blocks is not None and ("chunk" in limits or (base.window and "window" in limits))):
        raise _unknown(parts[0])
    window = min((w for w in (base.window, limits.get("window")) if w is not None), default=None)
    return MaskRule(window, limits.get("chunk", base.chunk), base.blocks, window_bounds_blocks=True)


def _parse(function: Callable[..., Any]) -> tuple[str, Any]:
    """Which of transformers' mask functions this is, and its closure."""
    name = getattr(function, "__qualname__", type(function).__name__)
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    closed: dict[str, Any] = {}
    if code is not None and cells is not None:
        closed = {variable: cell.cell_contents for variable, cell in zip(code.co_freevars, cells, strict=True)}
    if name == "causal_mask_function":
        return "causal", None
    if name == "and_masks.<locals>.and_mask":
        return "and", list(closed["mask_functions"])
    if name == "or_masks.<locals>.or_mask":
        return "or", list(closed["mask_functions"])
    if name == "sliding_window_overlay.<locals>.inner_mask":
        return "window", int(closed["sliding_window"])
    if name == "chunked_overlay.<locals>.inner_mask" and not bool(closed["left_padding"].any()):
        return "chunk", int(closed["chunk_size"])
    if name == "blockwise_overlay.<locals>.inner_mask" and len(closed["block_sequence_ids"]) == 1:
        return "blocks", tuple(closed["block_sequence_ids"][0].tolist())
    raise _unknown(function)


def _unknown(function: Callable[..., Any]) -> NotImplementedError:
    name = getattr(function, "__qualname__", type(function).__name__)
    return cannot_share(
        f"the model composes its attention mask with {name}, which shared-prefix attention does not support"
    )


def own_mask(layer: str) -> NotImplementedError:
    """Build the error of a layer with a mask other than ours."""
    return cannot_share(f"{layer} has its own mask or bias, which shared-prefix attention does not support")


_WITHOUT_EFFECT = {
    *("position_ids", "cache_position", "position_embeddings", "output_attentions", "output_hidden_states"),
    *("use_cache", "cache", "past_key_values", "return_dict", "is_causal", "output_router_logits", "logits_to_keep"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "deterministic", "num_items_in_batch"),
}
"""Keywords of attention functions that do not change the result for a whole row."""


class LayerOptions(NamedTuple):
    """Keywords of transformers' attention functions that change the result; see `AttentionRule`.

    Attributes:
        scale: `scaling`.
        softcap: `softcap`.
        sinks_H: `s_aux`.
        window: `sliding_window`, which repeats the mask's window.
    """

    scale: float
    softcap: float | None
    sinks_H: Tensor | None
    window: int | None

    def rule(self, mask: MaskRule, layout: SharedPrefixLayout) -> AttentionRule:
        """Combine mask and keywords.

        Raises:
            NotImplementedError: If their windows differ and a sequence is longer: then transformers' own attention
                implementations disagree.
        """
        longest = max(layout.repeated_lengths, default=0)
        if self.window is not None and self.window != mask.window and longest > self.window:
            raise cannot_share(f"a layer passes sliding_window={self.window} with a mask whose window is {mask.window}")
        return AttentionRule(
            self.scale, mask.window, mask.chunk, self.softcap, self.sinks_H, mask.blocks, mask.window_bounds_blocks
        )


def read_layer_options(module: nn.Module, query: Tensor, kwargs: dict[str, Any]) -> LayerOptions:
    """Read the keywords that a layer passes to its attention function.

    Raises:
        NotImplementedError: If the layer is not causal, or a keyword is unknown.
        ValueError: If it has attention dropout.
    """
    name, kwargs = type(module).__name__, {key: value for key, value in kwargs.items() if value is not None}
    if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
        raise cannot_share(f"{name} is not causal, so a prefix depends on what follows it")
    dropout = kwargs.pop("dropout", 0.0)
    if dropout:
        raise ValueError(
            f"{name} has attention dropout {dropout}, which cannot match between a shared and a repeated prefix; "
            "set the config's attention dropout (attention_dropout, in GPT-2 attn_pdrop) to 0 or call model.eval()."
        )
    options = LayerOptions(
        scale=kwargs.pop("scaling", query.shape[-1] ** -0.5),
        softcap=kwargs.pop("softcap", None),
        sinks_H=kwargs.pop("s_aux", None),
        window=kwargs.pop("sliding_window", None),
    )
    unknown = sorted(key for key in kwargs if key not in _WITHOUT_EFFECT)
    if unknown:
        raise cannot_share(f"{name} passes {', '.join(unknown)}, which shared-prefix attention does not support")
    return options


DENSE = "dense mask"
"""Reported as the kind of layers that compute with the mask themselves."""

_MAGIC = 0x5E95
"""First number of a marker; a model's own mask never has it."""

_HEADER = 4
"""Rows of a marker before its segments."""


@dataclass(frozen=True)
class MarkedLayer:
    """The call that a marker belongs to, and how its layer attends."""

    call: LayoutCall
    rule: MaskRule


_MARKED: WeakValueDictionary[int, MarkedLayer] = WeakValueDictionary()
"""By a marker's number, for as long as the marker lives."""

_NUMBERS = count(1)


def set_packed_row(call: LayoutCall | None) -> None:
    """From now on, make `mask_function` return the masks of a packed row; ordinary masks if None."""
    PACKED_ROW.set(call)


def mask_function(wrapped: Callable[..., Any] | None) -> Callable[..., Any]:
    """Make our mask function; outside packed rows it calls the wrapped implementation's, if any."""

    @torch.compiler.disable(reason="reads the model's mask function in Python")
    def make_mask(*args: Any, **kwargs: Any) -> Any:
        call = PACKED_ROW.get()
        if call is None:
            return None if wrapped is None else wrapped(*args, **kwargs)
        rule = read_mask_function(kwargs["mask_function"])
        if call.dense:  # the forest in the form of the wrapped implementation: bool, or added to the scores
            if wrapped is None or call.shards is not None or call.states is not None:
                raise NotImplementedError(
                    "layers that compute with the attention mask themselves need a dense mask of the whole row; use "
                    "attn_implementation='sdpa' or 'eager', sequence_parallel_size=1 and a larger token budget."
                )
            plain = LayerOptions(1.0, None, None, None).rule(rule, call.layout).simplified(call.layout)
            visible = visibility_function(call.layout, plain, torch.device(kwargs["device"]))
            ours: dict[str, Any] = {"attention_mask": None, "allow_is_causal_skip": False, "use_vmap": False}
            ours["mask_function"] = lambda batch, head, query, key: visible(query, key)
            return wrapped(**kwargs | ours)
        number = next(_NUMBERS)
        marker = to_marker(rule, call.layout, number)
        marker.marked = _MARKED[number] = MarkedLayer(call, rule)  # type: ignore[attr-defined]  # lives as long
        return marker

    return make_mask


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
