"""Gradients that are cut into shards, one part of each on every rank: norms over all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from pl_grouprl.strategies.support import StrategySupport


class ShardedSupport(StrategySupport):
    """What strategies have in common whose optimizer steps each rank's shards by themselves."""

    shards = True
    keeps_plain_weights = False

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Norm of the gradients, the square root of the ranks' sums of squares, a scalar. All ranks call it."""
        device = self.trainer.strategy.root_device
        own = [gradient for gradient in self.gradients(parameters) if gradient.numel()]
        norms = torch._foreach_norm(own) if own else []
        total = torch.stack([torch.zeros((), device=device), *(n.to(device, torch.float32) for n in norms)])
        return self.trainer.strategy.reduce(total.square().sum(), reduce_op="sum").sqrt()

    def touch(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Zero: nobody waits for gradients of what took no part in the loss."""
        return torch.zeros((), device=self.trainer.strategy.root_device)
