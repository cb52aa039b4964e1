"""Samples the next batch of rollouts in a thread while the current one is trained."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import nn

from pl_grouprl.models.reference import frozen_copy
from pl_grouprl.rollout.engine import RolloutEngine, declares
from pl_grouprl.strategies.support import StrategySupport
from pl_grouprl.training.distribution import rollout_state
from pl_grouprl.types import Prompt, Rollout, RolloutGroup

Sample = Callable[[Sequence[Prompt], int, RolloutEngine], list[RolloutGroup]]
"""(prompts, rollout number, bound engine) -> their rollouts; runs in the thread."""

Regroup = Callable[[list[list[int]] | None, list[list[Rollout]]], list[RolloutGroup]]
"""(tokens of each prompt, or None for the dataset's; its rollouts) -> groups. Joins restored rollouts with prompts."""


class RolloutAhead:
    """Samples the next batch of rollouts from a copy of the policy.

    The copy takes the policy's weights when sampling starts and keeps them until it ends, while updates change the
    policy. The result depends on the seed, not on timing.

    Attributes:
        policy_step: Optimizer steps of the policy when the pending rollout started.
    """

    def __init__(self) -> None:
        self.policy_step = 0
        self._number: int | None = None
        self._pending: Future[list[RolloutGroup]] | None = None
        self._restored: tuple[list[list[int]] | None, list[list[Rollout]]] | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._policy: Any = None
        self._copy: Any = None
        self._engine: Any = None
        self._sample: Any = None

    def attach(self, policy: nn.Module, engine: RolloutEngine, tokenizer: Any, sample: Sample) -> None:
        """Prepare for a run.

        Args:
            policy: The policy, before it enters `shared_prefix`, which would apply to the copy too.
            engine: Its engine. A copy with the same options is bound to the policy's copy.
            tokenizer: Its tokenizer, copied because threads must not share one.
            sample: What the thread runs.
        """
        self._policy, self._copy = policy, frozen_copy(policy).eval()
        self._engine = copy.copy(engine)
        self._engine.bind(self._copy, copy.deepcopy(tokenizer))
        self._sample = sample
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-ahead")

    def start(self, prompts: Sequence[Prompt], rollout_number: int, policy_step: int) -> None:
        """Copy the policy's weights and start sampling. Nothing may be pending."""
        assert self._executor is not None
        assert self._pending is None
        self._copy_weights()
        self._number, self.policy_step = rollout_number, policy_step
        self._pending = self._executor.submit(self._run, list(prompts), rollout_number, _event(self._copy))

    def take(self, rollout_number: int, regroup: Regroup) -> list[RolloutGroup] | None:
        """Wait for this rollout, if it was started, and return its groups; raises what the thread raised.

        A pending rollout with another number is dropped: an epoch may end before all of its prompts are used.

        Args:
            rollout_number: The rollout that is due.
            regroup: Called if the rollouts come from a checkpoint.
        """
        number, pending, restored = self._number, self._pending, self._restored
        self._number = self._pending = self._restored = None
        groups = None if pending is None else pending.result()
        if number != rollout_number:
            return None
        return groups if restored is None else regroup(*restored)

    def state_dict(self) -> dict[str, Any] | None:
        """Wait for the pending rollout and return it as plain containers, without prompts; None if there is none."""
        if self._number is None:
            return None
        held: Any = self._restored
        if held is None:
            assert self._pending is not None
            groups = self._pending.result()
            held = [group.prompt_ids for group in groups], [group.rollouts for group in groups]
        prompt_ids, rollouts = held
        plain = [[rollout_state(rollout) for rollout in of_prompt] for of_prompt in rollouts]
        numbers = {"rollout_number": self._number, "policy_step": self.policy_step}
        return {**numbers, "prompt_ids": prompt_ids, "rollouts": plain}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore the pending rollout."""
        self._number = self._pending = self._restored = None
        if state is not None:
            self._number, self.policy_step = state["rollout_number"], state["policy_step"]
            rollouts = [[Rollout(**rollout) for rollout in of_prompt] for of_prompt in state["rollouts"]]
            self._restored = state.get("prompt_ids"), rollouts  # older checkpoints have no tokens

    def close(self) -> None:
        """Wait for the thread and free the copy. The sampled rollout stays, for a checkpoint or another fit."""
        if self._executor is not None:
            self._executor.shutdown()
        self._executor = self._policy = self._copy = self._engine = self._sample = None

    @torch.no_grad()
    def _copy_weights(self) -> None:
        for targets, sources in (
            (self._copy.parameters(), self._policy.parameters()),
            (self._copy.buffers(), self._policy.buffers()),
        ):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)

    def _run(self, prompts: Sequence[Prompt], rollout_number: int, copied: Any) -> list[RolloutGroup]:
        if copied is None:
            return self._sample(prompts, rollout_number, self._engine)
        with torch.cuda.stream(torch.cuda.Stream(next(self._copy.parameters()).device)):
            torch.cuda.current_stream().wait_event(copied)
            groups = self._sample(prompts, rollout_number, self._engine)
            torch.cuda.current_stream().synchronize()  # before the copy gets other weights
        return groups


def check_rollout_ahead(module: pl.LightningModule, engine: Any, support: StrategySupport, corrected: bool) -> None:
    """Refuse, at setup, options that cannot be combined with sampling ahead.

    Args:
        module: The module, attached to its Trainer.
        engine: Its rollout engine.
        support: Support for its strategy.
        corrected: Whether the loss corrects for the sampler's log-probabilities.

    Raises:
        ValueError: Says why, and what to change.
    """
    precision = module.trainer.precision_plugin
    for unfit, reason in (
        (
            not corrected,
            "its rollouts come from older weights and nothing corrects for that; set importance_sampling, for "
            "example to 'token_truncate'",
        ),
        (
            not declares(engine, "samples_from_copies"),
            f"engine is {type(engine).__name__}, which does not declare samples_from_copies (HFRolloutEngine does): it "
            "cannot sample from a copy of the policy during updates",
        ),
        (
            not support.keeps_plain_weights,
            f"only single devices and DDP have whole weights to copy, and trainer.strategy is "
            f"{type(module.trainer.strategy).__name__}",
        ),
        (
            type(precision) not in (Precision, MixedPrecision),
            f"precision={precision.precision} sets a default dtype for all threads; use 32-true or a mixed precision",
        ),
        (
            not hasattr(getattr(module.trainer, "datamodule", None), "peek"),
            "it needs to know the next prompts; pass a PromptDataModule as datamodule",
        ),
    ):
        if unfit:
            raise ValueError(f"rollout_ahead is 1, but {reason}. Or set rollout_ahead to 0.")


def _event(model: nn.Module) -> Any:
    """CUDA event that another stream waits on until the weights are copied; None on CPU."""
    if next(model.parameters()).device.type != "cuda":
        return None
    return torch.cuda.current_stream().record_event()
