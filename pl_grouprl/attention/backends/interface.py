"""The rule of a layer, the interface of backends that compute it, and the reference that all are compared with.

Legend: T packed tokens, S of them that run (all but the prefilled tokens), H query heads, K key/value heads (H is a
multiple of K), D head size of keys, V of values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from pl_grouprl.packing import SharedPrefixLayout
from pl_grouprl.packing.trie import MIN_SAVED_TOKENS

REMEDY = "; train this model with sharing.mode='repeated'."


def cannot_share(reason: str) -> NotImplementedError:
    """Build the error of a layer whose result on a packed row would be wrong."""
    return NotImplementedError(f"{reason}{REMEDY}")


Visible = Callable[[Tensor, Tensor], Tensor]
"""(query indices, key indices) -> whether the query sees the key."""


@dataclass(frozen=True)
class AttentionRule:
    """How one layer attends, as stated by the model in this call.

    Attributes:
        scale: Multiplies the scores.
        window: A token sees at most this many tokens of its sequence, including itself; no limit if None.
        chunk: A token sees only tokens of its sequence in the same chunk of this many positions; no limit if None.
        softcap: Scores are softcap * tanh(score / softcap) (Gemma 2, arXiv:2408.00118, section 2).
        sinks_H: One score per query head that takes part in the softmax but adds no value, shape [H] (gpt-oss).
        blocks: Block number of each of the T tokens, -1 for none. Tokens of a block (an image) see each other in both
            directions.
        window_bounds_blocks: Whether the window also applies inside a block.
    """

    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None
    blocks: tuple[int, ...] | None = None
    window_bounds_blocks: bool = True

    @property
    def kind(self) -> str:
        """The kind of layer in words: `full`, `window 512, sinks` and the like."""
        return ", ".join(self.features) or "full"

    @property
    def features(self) -> tuple[str, ...]:
        """How it differs from plain causal softmax, in words."""
        named = {
            f"window {self.window}": self.window,
            f"chunks of {self.chunk}": self.chunk,
            f"soft cap {self.softcap:g}" if self.softcap else "": self.softcap,
            "sinks": self.sinks_H,
            "bidirectional blocks": self.blocks,
        }
        return tuple(name for name, value in named.items() if value is not None)

    def simplified(self, layout: SharedPrefixLayout) -> AttentionRule:
        """Drop what has no effect on a row: a window or chunk at least as long as every sequence, empty blocks.

        Raises:
            NotImplementedError: If a block spans two segments (so the prefix would depend on what follows it), is not
                contiguous, or follows prefilled tokens.
        """
        blocks = self.blocks if self.blocks and max(self.blocks) >= 0 else ()
        if blocks and layout.num_prefilled:
            raise NotImplementedError("slices have no bidirectional attention; use a larger token budget.")
        for segment in layout.segments if blocks else ():
            if segment.parent is None or not segment.length or blocks[segment.start] < 0:
                continue
            above = layout.path(segment.parent)
            if len(above) and blocks[int(above[-1])] >= 0:
                raise NotImplementedError(
                    f"token {segment.start} of the packed row is in the same block as the last token of its prefix (an "
                    "image that is cut in two); end the prefix before or after the image."
                )
        runs = [number for number, _ in groupby(blocks) if number >= 0]
        if len(runs) > len(set(runs)):
            raise cannot_share("tokens with bidirectional attention have others between them")
        longest = max(layout.repeated_lengths, default=0)
        window = None if self.window is not None and longest <= self.window else self.window
        chunk = None if self.chunk is not None and longest <= self.chunk else self.chunk
        return replace(self, window=window, chunk=chunk, blocks=blocks or None)

    @property
    def visibility(self) -> tuple[object, ...]:
        """All that determines which token sees which; the cache key of masks and plans."""
        return (self.window, self.chunk, self.blocks, self.window_bounds_blocks)


def visibility_function(layout: SharedPrefixLayout, rule: AttentionRule, device: torch.device) -> Visible:
    """Which token sees which: the definition for all backends.

    Returns:
        A function from query and key indices (int64, on the device, broadcastable) to bool; it closes over tensors
        only, so FlexAttention can compile it.
    """
    on_path, positions = layout.visibility(device), layout.positions_on(device)
    window, chunk = rule.window, rule.chunk

    def near(query: Tensor, key: Tensor) -> Tensor:
        seen = on_path(query, key)
        if window is not None:
            seen = seen & (positions[key] > positions[query] - window)
        if chunk is not None:
            seen = seen & (positions[key] // chunk == positions[query] // chunk)
        return seen

    if rule.blocks is None:
        return near
    blocks, bounded = torch.tensor(rule.blocks, device=device), rule.window_bounds_blocks

    def visible(query: Tensor, key: Tensor) -> Tensor:
        same_block = (blocks[query] == blocks[key]) & (blocks[query] >= 0)
        ahead = on_path(key, query) & (key > query)
        return near(query, key) | (same_block & (ahead if bounded else ahead | on_path(query, key)))

    return visible


Attend = Callable[[Tensor, Tensor, Tensor, SharedPrefixLayout, AttentionRule], Tensor]
"""(query [1, H, S, D], key [1, K, T, D], value [1, K, T, V], layout, rule) -> output [1, S, H, V], differentiable."""

Refusal = Callable[[Tensor, Tensor, Tensor, AttentionRule], str | None]
"""Why a backend cannot serve these tensors under this rule, with the remedy; None if it can."""

Preference = Callable[[Tensor, Tensor, Tensor, AttentionRule], "int | None"]
"""Priority of a backend under `auto` for these tensors, or None for never; the highest that can serve them runs."""

Choice = Callable[[Tensor, Tensor, Tensor, AttentionRule, bool, SharedPrefixLayout], "Backend"]
"""(query, key, value, rule, inside a compiled layer, layout) -> the backend to run."""


class ExplicitGradient(NamedTuple):
    """Forward and backward as plain functions, for compiled layers, where autograd does not record operations.

    Attributes:
        forward: As `Attend`, with the log-sum-exp of all scores, shape [H, S].
        backward: (gradient of the output, output, log-sum-exp, query, key, value, layout, rule) -> gradients of query,
            key, value and of the rule's sinks, None where it has none.
    """

    forward: Callable[[Tensor, Tensor, Tensor, SharedPrefixLayout, AttentionRule], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]


@dataclass(frozen=True)
class Backend:
    """One way to compute attention over a packed row, and its capabilities. Callers check these, never the name.

    Attributes:
        name: As passed to `shared_prefix(model, backend=...)`.
        attend: The computation.
        refusal: Says why it cannot serve given tensors.
        max_depth: Maximum depth of a forest: 1 for prompts with rollouts; no limit if None.
        takes_prefilled: Whether it runs rows with prefilled tokens (`SharedPrefixLayout.num_prefilled`).
        in_compiled_layers: Whether it runs inside layers compiled by torch.compile.
        preference: Its priority under `auto`; by default never chosen.
        explicit: Its gradient as functions; without it, the backward pass of compiled layers runs `attend` again.
        choice: Set for a backend that delegates to another one.
    """

    name: str
    attend: Attend
    refusal: Refusal = lambda query, key, value, rule: None
    max_depth: int | None = None
    takes_prefilled: bool = True
    in_compiled_layers: bool = True
    preference: Preference = lambda query, key, value, rule: None
    explicit: ExplicitGradient | None = None
    choice: Choice | None = None

    @property
    def min_saved_tokens(self) -> int | None:
        """For `packing.pack`; None, which shares prompts alone, if the depth of forests is limited."""
        return MIN_SAVED_TOKENS if self.max_depth is None else None

    def runs(self, layout: SharedPrefixLayout | None) -> bool:
        """Whether the backend can run a layout, by `max_depth` and `takes_prefilled`; None means every layout."""
        if layout is None:
            return self.takes_prefilled and self.max_depth is None
        deep = self.max_depth is not None and max(layout.depths, default=0) > self.max_depth
        return not deep and (self.takes_prefilled or not layout.num_prefilled)

    def resolve(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: SharedPrefixLayout,
        rule: AttentionRule,
        *,
        compiled: bool = False,
    ) -> Backend:
        """The backend that runs these tensors: this one, or its choice."""
        return self if self.choice is None else self.choice(query, key, value, rule, compiled, layout)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, layout: SharedPrefixLayout, rule: AttentionRule
    ) -> Tensor:
        """Compute attention, or raise what `check` does."""
        self.check(query, key, value, layout, rule)
        return self.attend(query, key, value, layout, rule)

    def check(self, query: Tensor, key: Tensor, value: Tensor, layout: SharedPrefixLayout, rule: AttentionRule) -> None:
        """Check that the backend can run these tensors.

        Raises:
            ValueError: If the row and the layout differ in tokens, or the forest is deeper than the backend can run.
            RuntimeError: If the backend cannot serve the device, dtype, rule, prefilled tokens or need of a gradient.
        """
        if query.shape[0] != 1 or query.shape[2] != layout.num_queries or key.shape[2] != layout.num_tokens:
            raise ValueError(
                f"prefix_layout has {layout.num_tokens} tokens, of which {layout.num_queries} are run, but there are "
                f"queries of shape [{query.shape[0]}, {query.shape[2]}] and {key.shape[2]} keys; pass one packed row."
            )
        if layout.num_prefilled and not self.takes_prefilled:
            remedy = "use backend 'auto', or a larger token budget."
            raise RuntimeError(f"attention backend {self.name!r} refuses: it cannot run slices of a group; {remedy}")
        if self.max_depth is not None and max(layout.depths, default=0) > self.max_depth:
            depths = f"depth {self.max_depth}, this layout has depth {max(layout.depths)}"
            raise ValueError(f"attention backend {self.name!r} runs forests of {depths}; use backend 'cascade'.")
        reason = self.refusal(query, key, value, rule)
        if reason is not None:
            raise RuntimeError(f"attention backend {self.name!r} refuses: {reason}")


def needs_gradient(*tensors: Tensor) -> bool:
    """Whether a backward pass through a call with these tensors will follow."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def dense_mask(layout: SharedPrefixLayout, rule: AttentionRule, device: torch.device) -> Tensor:
    """Which token (row) sees which (column), shape [S, T], bool."""
    tokens = torch.arange(layout.num_tokens, device=device)
    return visibility_function(layout, rule, device)(tokens[layout.num_prefilled :, None], tokens[None, :])


def attend(query: Tensor, key: Tensor, value: Tensor, layout: SharedPrefixLayout, rule: AttentionRule) -> Tensor:
    """Softmax attention under the layout's dense mask, in float32 or wider: simple and slow, the reference.

    Args:
        query: Shape [1, H, S, D].
        key: Shape [1, K, T, D].
        value: Shape [1, K, T, V].
        layout: The forest of the row.
        rule: How the layer attends.

    Returns:
        Shape [1, S, H, V], in the dtype of `query`.
    """
    mask = layout.memo(("dense_mask", query.device, rule.visibility), lambda: dense_mask(layout, rule, query.device))
    wide = torch.promote_types(query.dtype, torch.float32)
    heads_per_key = query.shape[1] // key.shape[1]
    key = key.to(wide).repeat_interleave(heads_per_key, dim=1)
    value = value.to(wide).repeat_interleave(heads_per_key, dim=1)
    scores_HST = (query.to(wide) @ key.transpose(2, 3)) * rule.scale
    if rule.softcap is not None:
        scores_HST = rule.softcap * (scores_HST / rule.softcap).tanh()
    scores_HST = scores_HST.masked_fill(~mask, float("-inf"))
    if rule.sinks_H is not None:
        sinks = rule.sinks_H.to(wide)[None, :, None, None].expand(*scores_HST.shape[:3], 1)
        scores_HST = torch.cat([scores_HST, sinks], dim=-1)
    weights_HST = scores_HST.softmax(dim=-1)[..., : key.shape[2]]
    return (weights_HST @ value).transpose(1, 2).to(query.dtype)


REFERENCE = Backend("reference", attend, preference=lambda query, key, value, rule: 0)
