"""Reads a layer's attention pattern from transformers' mask function, without a dense mask.

transformers composes a mask from small functions (causal, window, chunk, blocks) and passes the composition to the
mask function registered for the attention implementation. We read windows and chunks from that composition, so they
come from the model itself, not from a list of models. Compositions with unknown parts are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pl_grouprl.attention.backends.rule import AttentionRule


@dataclass(frozen=True)
class MaskRule:
    """The pattern of a mask function; see `AttentionRule` for the attributes."""

    window: int | None = None
    chunk: int | None = None
    blocks: tuple[int, ...] | None = None
    window_bounds_blocks: bool = True

    def without_options(self) -> AttentionRule:
        """The pattern alone, without the options of a layer's attention."""
        bounded = self.window_bounds_blocks
        return AttentionRule(1.0, self.window, self.chunk, blocks=self.blocks, window_bounds_blocks=bounded)


def read_mask_function(function: Callable[..., Any]) -> MaskRule:
    """Read a composition of transformers' mask functions.

    Raises:
        NotImplementedError: If a part is unknown, or no rule expresses the combination.
    """
    kind, parts = _parse(function)
    if kind == "causal":
        return MaskRule()
    if kind == "and":
        return _all_of(parts)
    if kind == "or":
        plain = [part for part in parts if _parse(part)[0] != "blocks"]
        blocks = [_parse(part)[1] for part in parts if _parse(part)[0] == "blocks"]
        if len(plain) == 1 and len(blocks) == 1:
            rule = read_mask_function(plain[0])
            if rule.blocks is None:
                return MaskRule(rule.window, rule.chunk, blocks[0], window_bounds_blocks=False)
    raise _unknown(function)


def _all_of(parts: list[Callable[..., Any]]) -> MaskRule:
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
    if base is None or (base.blocks is not None and "chunk" in limits):
        raise _unknown(parts[0])
    window = min((w for w in (base.window, limits.get("window")) if w is not None), default=None)
    if base.window is not None and base.blocks is not None and "window" in limits:
        raise _unknown(parts[0])
    return MaskRule(window, limits.get("chunk", base.chunk), base.blocks, window_bounds_blocks=True)


def _parse(function: Callable[..., Any]) -> tuple[str, Any]:
    """Which of transformers' mask functions this is, and its closure."""
    name = getattr(function, "__qualname__", type(function).__name__)
    closed = _closure(function)
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


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or cells is None:
        return {}
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}


def _unknown(function: Callable[..., Any]) -> NotImplementedError:
    name = getattr(function, "__qualname__", type(function).__name__)
    return NotImplementedError(
        f"the model composes its attention mask with {name}, which shared-prefix attention does not support; train "
        "this model with sharing='repeated'."
    )
