"""Compares an ordinary padded batch inside and outside `shared_prefix`: log-probabilities and gradients of a few rows.

Legend: R rows, C tokens of the longest completion, N response tokens of all rows, concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from pl_grouprl.attention.patch import SharedPrefix, in_force, sharing_paused
from pl_grouprl.checks.parity_report import PaddedParity
from pl_grouprl.checks.probes import token_logprobs, weighted_sum
from pl_grouprl.utilities.tolerances import compare, gradient_difference

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pl_grouprl.types import RolloutGroup

_MARGIN = 8
"""Columns of padding in front of the longest prompt."""


class _Rows(NamedTuple):
    """Prompts padded on the left, completions on the right; prompts are in the columns before `start`."""

    input_ids: Tensor
    attention_mask: Tensor
    start: int

    def logprobs(self, model: PreTrainedModel) -> Tensor:
        """Log-probabilities of the completions' tokens, shape [N]."""
        logits = model(
            input_ids=self.input_ids, attention_mask=self.attention_mask, use_cache=False, return_dict=True
        ).logits[:, self.start - 1 : -1]
        kept_RC = self.attention_mask[:, self.start :].bool()
        return token_logprobs(logits, self.input_ids[:, self.start :])[kept_RC]


def padded_parity(
    model: PreTrainedModel,
    patch: SharedPrefix,
    groups: Sequence[RolloutGroup],
    weights: Sequence[nn.Parameter],
    longest: int | None = None,
) -> PaddedParity:
    """Run one padded batch of all rollouts with and without a `shared_prefix` context, and compare.

    Args:
        model: A causal language model.
        patch: A context that is not active.
        groups: A few short prompts with their rollouts.
        weights: The parameters whose gradients are compared.
        longest: Maximum length of a row in tokens; None for no limit.
    """
    rows = _pad(groups, longest, model.device)

    def run(context: AbstractContextManager[Any]) -> tuple[Tensor, Sequence[Tensor | None]]:
        with context:
            logprobs_N = rows.logprobs(model)
            gradients = torch.autograd.grad(weighted_sum(logprobs_N), weights, allow_unused=True)
            return logprobs_N.detach(), gradients

    expected_N, expected = run(sharing_paused(model))
    found_N, found = run(patch)
    difference = compare(found_N, expected_N)
    call = (in_force(model) or patch).last_call  # an outer context, if any, runs the calls
    return PaddedParity(
        difference.largest,
        difference.mean,
        gradient_difference(found, expected),
        reason=None if call is None else call.reason,
    )


def _pad(groups: Sequence[RolloutGroup], longest: int | None, device: torch.device) -> _Rows:
    sequences = [(group.prompt_ids, rollout.token_ids) for group in groups for rollout in group.rollouts]
    start = max(len(prompt) for prompt, _ in sequences)
    width = max(len(completion) for _, completion in sequences)
    start += _MARGIN if longest is None else max(min(_MARGIN, longest - start - width), 0)

    def laid_out(prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
        return pad(torch.tensor([*prompt, *completion]), (start - len(prompt), width - len(completion)))

    tokens = torch.stack([laid_out(prompt, completion) for prompt, completion in sequences])
    mask = torch.stack([laid_out([1] * len(prompt), [1] * len(completion)) for prompt, completion in sequences])
    return _Rows(tokens.to(device), mask.to(device), start)
