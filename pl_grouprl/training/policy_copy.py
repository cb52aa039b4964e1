"""A copy of the policy that a thread samples from while updates change the policy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pl_grouprl.models.reference import frozen_copy
from pl_grouprl.rollout.engine import RolloutEngine
from pl_grouprl.training.run import Run


class PolicyCopy:
    """A frozen copy of a policy, and a copy of its engine that samples from it.

    Args:
        run: Has the policy, before it enters `shared_prefix`, which would apply to the copy too. If its weights are
            shards, each rank gets a whole copy.
        engine: Its engine, which declares `samples_from_copies`.
        load: Loads the initial policy, to make a whole copy if the policy's weights are shards.

    Attributes:
        engine: The copy of the engine, bound to the copy of the policy.
    """

    def __init__(self, run: Run, engine: RolloutEngine, load: Callable[[], nn.Module]) -> None:
        self._run, self._device = run, run.device
        whole = frozen_copy(run.policy) if run.support.keeps_plain_weights else load().requires_grad_(False)
        self._copy = whole.to(self._device).eval()
        self.engine: Any = copy.copy(engine)
        self.engine.bind(self._copy, copy.deepcopy(run.tokenizer))  # threads must not share a tokenizer
        self._filled: Any = None

    @torch.no_grad()
    def fill(self) -> None:
        """Copy the policy's weights. Collective; nothing may be sampled meanwhile."""
        copied = dict(self._copy.named_parameters()) | dict(self._copy.named_buffers())
        for name, weight in self._run.support.named_weights(self._run.policy):
            copied[name].copy_(weight)
        if self._device.type == "cuda":
            self._filled = torch.cuda.current_stream().record_event()

    @contextmanager
    def sampling(self) -> Iterator[RolloutEngine]:
        """The engine, on a separate CUDA stream that waits for the weights; for the sampling thread."""
        if self._filled is None:
            yield self.engine
            return
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            torch.cuda.current_stream().wait_event(self._filled)
            yield self.engine
            torch.cuda.current_stream().synchronize()  # before the copy gets other weights
