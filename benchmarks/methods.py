"""One interface for the methods that the benchmarks compare for scoring a batch of groups.

Legend: N response tokens of all rollouts, concatenated.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case
from pl_grouprl.attention import shared_prefix
from pl_grouprl.models.score import score
from pl_grouprl.packing import ScoringBatch, SharedPrefixLayout, Sharing, pack
from pl_grouprl.types import RolloutGroup

BASELINE = "repeated, packed"
_DENSE_LIMIT = 2**26
"""Largest matrix of scores [heads, T, T] for which the dense oracle is run."""


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes:
        name: Displayed name.
        sharing: Whether each prompt is encoded once or once per rollout.
        backend: Attention backend; None is the model's own attention.
        make_batches: Packs the groups into one batch, or into several that run one after another.
        refusal: Why a pass (`scoring` or `update`) cannot run on a case, or None.
    """

    name: str
    sharing: Sharing
    backend: str | None
    make_batches: Callable[[list[RolloutGroup], str], list[ScoringBatch]]
    refusal: Callable[[Case, str], str | None] = lambda case, measured: None

    def prepare(self, case: Case, model: Any, optimizer: torch.optim.Optimizer | None = None) -> Run:
        """Prepare a case, outside of the timing. Updates need the optimizer."""
        return Run(self, model, self.make_batches(case.make_groups(), case.device), optimizer)


@dataclass
class Run:
    """A method with its model and batches, ready to be timed within `patched`."""

    method: Method
    model: Any
    batches: list[ScoringBatch]
    optimizer: torch.optim.Optimizer | None = None

    def score(self) -> Tensor:
        """Log-probabilities without gradient, shape [N]."""
        with torch.no_grad():
            return torch.cat([score(self.model, batch).logprobs_N for batch in self.batches])

    def update(self) -> None:
        """Log-probabilities, the gradient of their sum with respect to all weights, and an optimizer step."""
        assert self.optimizer is not None
        for batch in self.batches:
            score(self.model, batch).logprobs_N.sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def patched(self) -> AbstractContextManager[Any]:
        """The model with this method's attention."""
        backend = self.method.backend
        return nullcontext() if backend is None else shared_prefix(self.model, backend)


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    """Fused AdamW with allocated state and a learning rate of 0: it does all its work but changes no weight."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    place_gradients(model)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


def step_alone(model: Any, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """The optimizer's part of an update, on gradients of zeros."""
    place_gradients(model)
    return optimizer.step


def place_gradients(model: Any) -> None:
    """Give every weight a zero gradient, which a backward pass adds to."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


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
    batch = pack(_alone(groups), "shared", device=device)  # a prompt is followed by its only rollout
    layout = SharedPrefixLayout(lengths := batch.layout.repeated_lengths, [None] * len(lengths))
    return [replace(batch, model_inputs=batch.model_inputs | {"prefix_layout": layout}, layout=layout)]


def _shared(groups: list[RolloutGroup], device: str) -> list[ScoringBatch]:
    return [pack(groups, "shared", device=device)]


def missing(package: str, distribution: str = "") -> str | None:
    """How to install a missing package; None if it is installed.

    Args:
        package: Its import name.
        distribution: Its name for pip, if different.
    """
    if find_spec(package) is not None:
        return None
    name = distribution or package
    return f"{name} is not installed: pip install {name}"


def _no_backward_on_cpu(case: Case, measured: str) -> str | None:
    trains = measured == "update"
    return "FlexAttention has no backward pass on CPU" if trains and case.device == "cpu" else None


def _without_package(case: Case, measured: str) -> str | None:
    return missing("prefix_grouper")


def _too_large_for_dense(case: Case, measured: str) -> str | None:
    size = case.heads * case.layout.num_tokens**2
    return f"dense scores of {size / 2**20:,.0f} M elements" if size > _DENSE_LIMIT else None


METHODS = (
    Method("repeated, padded", "repeated", None, _padded),
    Method("repeated, one by one", "repeated", None, _one_by_one),
    Method(BASELINE, "repeated", "cascade", _repeated_packed),
    Method("prefix_grouper", "shared", "prefix_grouper", _shared, refusal=_without_package),
    Method("cascade", "shared", "cascade", _shared),
    Method("flex", "shared", "flex", _shared, refusal=_no_backward_on_cpu),
    Method("reference", "shared", "reference", _shared, refusal=_too_large_for_dense),
)


def find_method(name: str) -> Method:
    """The method with this name.

    Raises:
        ValueError: If there is none.
    """
    methods = {method.name: method for method in METHODS}
    if name not in methods:
        raise ValueError(f"method is {name!r}; choose among {', '.join(map(repr, methods))}.")
    return methods[name]
