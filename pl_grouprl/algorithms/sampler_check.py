"""A look at the first rollouts of a sampler that is a program of its own: does it compute what the policy computes?

Equal weights do not say that. Another program may read the config in its own way (a window of one token more, rotary
positions on a part of each head), and what it samples would be scored as if it were the policy's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from pl_grouprl.models.score import rollout_logprobs
from pl_grouprl.rollout.engine import SyncedRolloutEngine
from pl_grouprl.sync.sampler import WeightsMismatchError
from pl_grouprl.types import RolloutGroup, SamplingConfig
from pl_grouprl.utilities.distributed import raise_on_all_ranks

if TYPE_CHECKING:
    from pl_grouprl.algorithms.policy_module import PolicyModule

ALLOWED = 0.2
"""Mean difference of log-probabilities, in nats, that rounding may explain: bfloat16 gives some hundredths."""

_ROLLOUTS = 8


class SamplerCheck:
    """Compares a sampler's log-probabilities with the policy's, once in a run.

    The longest of the first rollouts of rank 0 are looked at. Under top-k and min-p nothing can be said of single
    tokens, and the next rollouts without are waited for.
    """

    def __init__(self) -> None:
        self._done = False

    def forget(self) -> None:
        """Look again: another run may have another sampler."""
        self._done = False

    def look(
        self,
        module: PolicyModule,
        engine: SyncedRolloutEngine,
        groups: Sequence[RolloutGroup],
        sampling: SamplingConfig,
    ) -> None:
        """Compare, unless that has been done. All ranks call it.

        Args:
            module: Has the policy.
            engine: Has sampled.
            groups: What was just sampled from its present weights on this rank.
            sampling: How.

        Raises:
            WeightsMismatchError: On rank 0, if the log-probabilities are not those of the policy.
            RuntimeError: On the others then.
        """
        if self._done or sampling.top_k or sampling.min_p:
            return
        with module.support.whole_weights(module.policy):
            self._done = raise_on_all_ranks(lambda: self._compare(module, engine, groups, sampling), module.device)

    def _compare(
        self,
        module: PolicyModule,
        engine: SyncedRolloutEngine,
        groups: Sequence[RolloutGroup],
        sampling: SamplingConfig,
    ) -> bool:
        if module.global_rank:
            return True
        chosen = _longest(groups)
        if chosen is None:
            return True
        with torch.inference_mode(False), torch.no_grad(), module.trainer.precision_plugin.forward_context():
            expected = rollout_logprobs(
                module.policy, [chosen], sharing="repeated", temperature=sampling.temperature or 1.0
            )
        difference = mean_difference(expected, chosen, sampling)
        name = type(engine).__name__
        if not difference <= ALLOWED:
            raise WeightsMismatchError(
                f"{name} has the weights of {type(module.policy).__name__}, but its log-probabilities differ from the "
                f"policy's by {difference:.3g} nats on average (at most {ALLOWED} is rounding): it computes another "
                "model with them, or in too narrow a dtype. Sample with HFRolloutEngine, or set the engine's dtype."
            )
        rank_zero_info(f"{name} and the policy agree: log-probabilities differ by {difference:.1e} nats on average.")
        return True


def mean_difference(expected: Sequence[Tensor], group: RolloutGroup, sampling: SamplingConfig) -> float:
    """Mean absolute difference over the tokens of a group; what top-p explains is none.

    Args:
        expected: The policy's log-probabilities, one tensor per rollout.
        group: With the sampler's.
        sampling: Its `top_p` makes the tokens that it keeps likelier, by 1 / top_p at most.
    """
    ours = torch.cat([own.cpu().double() for own in expected])
    theirs = torch.cat([torch.tensor(rollout.logprobs, dtype=torch.float64) for rollout in group.rollouts])
    explained = -math.log(sampling.top_p) if sampling.temperature else 0.0
    difference = theirs - ours
    return float((difference - difference.clamp(0, explained)).abs().mean())


def _longest(groups: Sequence[RolloutGroup]) -> RolloutGroup | None:
    """The group with the longest sequence, and a few of its rollouts; None where there is nothing to compare."""
    candidates = [
        RolloutGroup(group.prompt_ids, reported[:_ROLLOUTS], media=group.media)
        for group in groups
        if (reported := [rollout for rollout in group.rollouts if rollout.token_ids and rollout.logprobs is not None])
    ]
    return max(candidates, key=lambda group: len(group.prompt_ids) + len(group.rollouts[0].token_ids), default=None)
