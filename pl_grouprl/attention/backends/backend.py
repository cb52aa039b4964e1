"""The interface of attention backends.

Legend: T packed tokens, S of them that run (all but the prefilled tokens), H query heads, K key/value heads (H is a
multiple of K), D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pl_grouprl.attention.backends.rule import AttentionRule
from pl_grouprl.packing import SharedPrefixLayout
from pl_grouprl.packing.trie import MIN_SAVED_TOKENS

Attend = Callable[[Tensor, Tensor, Tensor, SharedPrefixLayout, AttentionRule], Tensor]
"""(query [1, H, S, D], key [1, K, T, D], value [1, K, T, V], layout, rule) -> output [1, S, H, V], differentiable."""

Refusal = Callable[[Tensor, Tensor, Tensor, AttentionRule], str | None]
"""Why a backend cannot serve these tensors under this rule, with the remedy, or None if it can."""

Preference = Callable[[Tensor, Tensor, Tensor, AttentionRule], "int | None"]
"""Priority of a backend under `auto` for these tensors; the highest that does not refuse runs. None: never."""

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
        max_depth: Maximum depth of a forest: 1 for prompts with rollouts; None for no limit.
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
        """Refuse what the backend cannot run.

        Raises:
            ValueError: If the row and the layout differ in tokens, or the forest is deeper than the backend can run.
            RuntimeError: If the backend cannot serve the device, dtype, rule, prefilled tokens or need of a gradient.
        """
        if query.shape[0] != 1 or query.shape[2] != layout.num_queries or key.shape[2] != layout.num_tokens:
            raise ValueError(
                f"prefix_layout has {layout.num_tokens} tokens, of which {layout.num_queries} are run, but attention "
                f"got queries of shape [{query.shape[0]}, {query.shape[2]}] and {key.shape[2]} keys; pass one "
                f"packed row, of shape [1, {layout.num_queries}]."
            )
        if layout.num_prefilled and not self.takes_prefilled:
            raise RuntimeError(
                f"attention backend {self.name!r} refuses: it cannot run rollouts whose prompt ran in an earlier call "
                "(a group split into slices); use backend 'auto', or a larger token budget."
            )
        if self.max_depth is not None and max(layout.depths, default=0) > self.max_depth:
            raise ValueError(
                f"attention backend {self.name!r} runs forests of depth {self.max_depth}, this layout has depth "
                f"{max(layout.depths)}; use backend 'cascade' or 'flex'."
            )
        reason = self.refusal(query, key, value, rule)
        if reason is not None:
            raise RuntimeError(f"attention backend {self.name!r} refuses: {reason}")


def needs_gradient(*tensors: Tensor) -> bool:
    """Whether a backward pass through a call with these tensors will follow."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
