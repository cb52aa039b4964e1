"""The ways to score a batch of groups that are compared, behind one interface.

Legend: N response tokens of all rollouts one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case
from pl_grouprl.attention import shared_prefix
from pl_grouprl.models.score import score
from pl_grouprl.packing import ScoringBatch, SharedPrefixLayout, pack
from pl_grouprl.types import RolloutGroup

BASELINE = "repeated, packed"
_DENSE_LIMIT = 2**26
"""Largest matrix of scores [heads, T, T] for which the dense oracle takes part."""


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes:
        name: As shown.
        backend: Attention backend; None is the model's own attention.
        make_batches: Lays the groups out, in one batch or in several that run one after another.
        refusal: Why a pass (`forward` or `forward+backward`) over a case is left out, or None.
    """

    name: str
    backend: str | None
    make_batches: Callable[[list[RolloutGroup], str], list[ScoringBatch]]
    refusal: Callable[[Case, str], str | None] = lambda case, measured: None

    def prepare(self, case: Case, model: Any) -> Run:
        """Lay a case out once; what is timed starts from there."""
        return Run(self, model, self.make_batches(case.make_groups(), case.device))


@dataclass
class Run:
    """A method with its model and batches, ready to be timed."""

    method: Method
    model: Any
    batches: list[ScoringBatch]

    def forward(self) -> Tensor:
        """Log-probabilities without gradient, shape [N]."""
        with self._patch(), torch.no_grad():
            return torch.cat([score(self.model, batch).logprobs_N for batch in self.batches])

    def forward_backward(self) -> None:
        """Log-probabilities, and the gradient of their sum by every weight, which is then dropped."""
        with self._patch():
            for batch in self.batches:
                score(self.model, batch).logprobs_N.sum().backward()
        self.model.zero_grad(set_to_none=True)

    def _patch(self) -> AbstractContextManager[Any]:
        backend = self.method.backend
        return nullcontext() if backend is None else shared_prefix(self.model, backend)


def _padded(groups: list[RolloutGroup], device: str) -> list[ScoringBatch]:
    batch = pack(groups, "repeated", device=device)
    if bool(batch.model_inputs["attention_mask"].all()):
        del batch.model_inputs["attention_mask"]  # nothing is masked: let SDPA take its causal path
    return [batch]


def _alone(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    return [RolloutGroup(group.prompt_ids, [rollout]) for group in groups for rollout in group.rollouts]


def _one_by_one(groups: list[RolloutGroup], device: str) -> list[ScoringBatch]:
    return [batch for group in _alone(groups) for batch in _padded([group], device)]


def _repeated_packed(groups: list[RolloutGroup], device: str) -> list[ScoringBatch]:
    """One row without padding: every sequence is a root without children, so attention is one causal varlen call."""
    batch = pack(_alone(groups), "shared", device=device)  # a prompt and its only rollout stand one after another
    layout = SharedPrefixLayout(lengths := batch.layout.repeated_lengths, [None] * len(lengths))
    return [replace(batch, model_inputs=batch.model_inputs | {"prefix_layout": layout}, layout=layout)]


def _shared(groups: list[RolloutGroup], device: str) -> list[ScoringBatch]:
    return [pack(groups, "shared", device=device)]


def _no_backward_on_cpu(case: Case, measured: str) -> str | None:
    trains = measured != "forward"
    return "FlexAttention has no backward pass on CPU" if trains and case.device == "cpu" else None


def _too_large_for_dense(case: Case, measured: str) -> str | None:
    size = case.heads * case.layout.num_tokens**2
    return f"dense scores of {size / 2**20:,.0f} M elements" if size > _DENSE_LIMIT else None


METHODS = (
    Method("repeated, padded", None, _padded),
    Method("repeated, one by one", None, _one_by_one),
    Method(BASELINE, "cascade", _repeated_packed),
    Method("prefix_grouper", "prefix_grouper", _shared),
    Method("cascade", "cascade", _shared),
    Method("flex", "flex", _shared, refusal=_no_backward_on_cpu),
    Method("reference", "reference", _shared, refusal=_too_large_for_dense),
)


def find_method(name: str) -> Method:
    """The method of that name.

    Raises:
        ValueError: If there is none.
    """
    methods = {method.name: method for method in METHODS}
    if name not in methods:
        raise ValueError(f"method is {name!r}; choose among {', '.join(map(repr, methods))}.")
    return methods[name]
