"""Common parts of strategies that shard gradients over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from pl_grouprl.strategies.support import StrategySupport


class ShardedSupport(StrategySupport):
    """Base class for strategies whose optimizer steps each rank's shards separately."""

    shards = True

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Norm of the gradients over all ranks' shards, a scalar. Collective."""
        device = self.trainer.strategy.root_device
        own = [gradient for gradient in self.gradients(parameters) if gradient.numel()]
        norms = torch._foreach_norm(own) if own else []
        total = torch.stack([torch.zeros((), device=device), *(n.to(device, torch.float32) for n in norms)])
        return self.trainer.strategy.reduce(total.square().sum(), reduce_op="sum").sqrt()

    def touch(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Zero: no reducer waits for gradients of unused parameters."""
        return torch.zeros((), device=self.trainer.strategy.root_device)
