"""A copy of the policy that a thread samples from while updates change the policy."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pl_grouprl.models.reference import frozen_copy
from pl_grouprl.rollout.engine import RolloutEngine


class PolicyCopy:
    """A frozen copy of a policy, and a copy of its engine that samples from it.

    Args:
        policy: The policy, before it enters `shared_prefix`, which would apply to the copy too.
        engine: Its engine, which declares `samples_from_copies`.
        tokenizer: Its tokenizer, copied because threads must not share one.

    Attributes:
        engine: The copy of the engine, bound to the copy of the policy.
    """

    def __init__(self, policy: nn.Module, engine: RolloutEngine, tokenizer: Any) -> None:
        self._policy, self._copy = policy, frozen_copy(policy).eval()
        self.engine: Any = copy.copy(engine)
        self.engine.bind(self._copy, copy.deepcopy(tokenizer))
        self._device = next(self._copy.parameters()).device
        self._filled: Any = None

    @torch.no_grad()
    def fill(self) -> None:
        """Copy the policy's weights. Nothing may be sampled meanwhile."""
        for targets, sources in (
            (self._copy.parameters(), self._policy.parameters()),
            (self._copy.buffers(), self._policy.buffers()),
        ):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
        if self._device.type == "cuda":
            self._filled = torch.cuda.current_stream().record_event()

    @contextmanager
    def sampling(self) -> Iterator[RolloutEngine]:
        """The engine, on a stream of its own that waits for the weights; for the sampling thread."""
        if self._filled is None:
            yield self.engine
            return
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            torch.cuda.current_stream().wait_event(self._filled)
            yield self.engine
            torch.cuda.current_stream().synchronize()  # before the copy gets other weights
