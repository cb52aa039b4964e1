"""Verify, once per run, that a separate sampler computes the policy's log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from pl_grouprl.checks.sampler_parity import can_compare, sampler_difference
from pl_grouprl.models.score import rollout_logprobs
from pl_grouprl.rollout.engine import SyncedRolloutEngine
from pl_grouprl.sync.sampler import WeightsMismatchError
from pl_grouprl.types import RolloutGroup, SamplingConfig
from pl_grouprl.utilities.distributed import gather_plain, raise_on_all_ranks
from pl_grouprl.utilities.tolerances import tolerance_of

if TYPE_CHECKING:
    from pl_grouprl.training.run import Run


class SamplerParityCheck:
    """Compares a sampler's log-probabilities with the policy's, once per run, on rank 0's longest first rollouts.

    With top-k or min-p, log-probabilities of single tokens are not comparable, so it waits for rollouts without.

    Attributes:
        is_done: Whether they were compared.
    """

    def __init__(self) -> None:
        self.is_done = False

    def forget(self) -> None:
        """Compare again: another run may have another sampler."""
        self.is_done = False

    def run(
        self,
        module: Run,
        engine: SyncedRolloutEngine,
        groups: Sequence[RolloutGroup],
        sampling: SamplingConfig,
    ) -> None:
        """Compare, unless already done. Collective.

        Args:
            module: The run, with the policy.
            engine: The engine that sampled.
            groups: The groups that this rank just sampled from the current weights.
            sampling: The sampling options.

        Raises:
            WeightsMismatchError: On rank 0, if the log-probabilities differ from the policy's.
            RuntimeError: On the other ranks, if rank 0 raises.
        """
        if self.is_done or not can_compare(sampling):
            return
        if not gather_plain(any(map(has_tokens, groups)), module.device)[0]:  # all are empty: next time
            return
        with module.support.whole_weights(module.policy):
            raise_on_all_ranks(
                lambda: None if module.global_rank else _compare(module, engine, groups, sampling), module.device
            )
        self.is_done = True


def has_tokens(group: RolloutGroup) -> bool:
    """Whether a rollout has a sampled token, by which samplers are compared."""
    return any(rollout.num_sampled_tokens for rollout in group.rollouts)


def _compare(
    module: Run, engine: SyncedRolloutEngine, groups: Sequence[RolloutGroup], sampling: SamplingConfig
) -> None:
    def score(group: RolloutGroup) -> list[Tensor]:
        with torch.inference_mode(False), torch.no_grad(), module.support.forward_context():
            return rollout_logprobs(module.policy, [group], sharing="repeated", temperature=sampling.temperature or 1.0)

    difference = sampler_difference(score, groups, sampling)
    if difference is None:
        return
    name, allowed = type(engine).__name__, tolerance_of(module.policy.dtype).sampler_logprob
    if not difference <= allowed:
        raise WeightsMismatchError(
            f"{name} has the weights of {type(module.policy).__name__}, but its log-probabilities differ from the "
            f"policy's by {difference:.3g} nats on average (rounding explains at most {allowed}): it runs a "
            "different model, or too narrow a dtype. Sample with HFRolloutEngine, or set the engine's dtype."
        )
    rank_zero_info(f"{name} and the policy agree: log-probabilities differ by {difference:.1e} nats on average.")
