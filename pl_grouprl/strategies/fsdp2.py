"""FSDP2 (Lightning's ModelParallelStrategy): `fully_shard` on each decoder layer, then on each model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from pl_grouprl.attention import find_backbone
from pl_grouprl.strategies.sharded import (
    ShardedSupport,
    decoder_layers_of,
    is_transformers_model,
    refuse_whole_weights,
    roots,
)
from pl_grouprl.strategies.weights import Weight, weights_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


class FSDP2Support(ShardedSupport):
    """Shards each model over all ranks, trained or frozen.

    A decoder layer is gathered for its forward and its backward. Everything else (embeddings, norms, head) stays
    gathered from the model's call to the end of its backward, because logits are computed chunk by chunk.
    Weights are gathered in their storage dtype: under `bf16-mixed` that is float32, and autocast makes the bfloat16
    copies.

    While micro-batches accumulate, each rank holds whole gradients: the price of one reduction per step.
    """

    def check(self, module: LightningModule) -> None:
        """Refuse tensor parallelism, which is Lightning's default, and parts that need whole weights."""
        mesh = self.trainer.strategy.device_mesh  # type: ignore[attr-defined]
        if mesh["tensor_parallel"].size() > 1:
            ranks = self.trainer.world_size
            raise ValueError(
                f"ModelParallelStrategy has tensor_parallel_size={mesh['tensor_parallel'].size()} (its default 'auto' "
                "is the number of devices of a node), but only data parallelism shards here; set "
                f"data_parallel_size={ranks} and tensor_parallel_size=1."
            )
        refuse_whole_weights(module, "ModelParallelStrategy")

    def shard(self, module: LightningModule) -> None:
        """Shard all models that are not sharded yet."""
        mesh = self.trainer.strategy.device_mesh["data_parallel"]  # type: ignore[attr-defined]
        for root in roots(module):
            if isinstance(root, FSDPModule):
                continue
            for layer in decoder_layers_of(root):
                fully_shard(layer, mesh=mesh, reshard_after_forward=True)
            fully_shard(root, mesh=mesh, reshard_after_forward=False)
            if is_transformers_model(root) and (backbone := find_backbone(root)) is not root:  # type: ignore[arg-type]
                _call_through(root, backbone)

    @contextlib.contextmanager
    def whole_weights(self, *models: nn.Module) -> Iterator[None]:
        """Gather all weights of some models once, instead of in every call."""
        sharded = [root for model in models for root in roots(model) if isinstance(root, FSDPModule)]
        for root in sharded:
            root.set_reshard_after_forward(False)
            root.set_reshard_after_backward(False)
        with torch.inference_mode(False), torch.no_grad():  # Lightning validates in inference mode
            _each_unit(sharded, FSDPModule.unshard)
        try:
            yield
        finally:
            _each_unit(sharded, FSDPModule.reshard)
            for root in sharded:
                root.set_reshard_after_backward(True)
                root.set_reshard_after_forward(True)
                root.set_reshard_after_forward(False, recurse=False)

    def call(self, module: LightningModule, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method, then reshard all weights."""
        try:
            return getattr(module, method)(*args, **kwargs)
        finally:
            _each_unit([root for root in roots(module) if isinstance(root, FSDPModule)], FSDPModule.reshard)

    @contextlib.contextmanager
    def accumulating(self, module: LightningModule, *, last: bool) -> Iterator[None]:
        """Reduce gradients only in the backward of the last micro-batch."""
        for root in roots(module):
            if isinstance(root, FSDPModule):
                root.set_requires_gradient_sync(last)
        yield

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """This rank's shards of the gradients."""
        gradients = super().gradients(parameters)
        return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]

    def named_weights(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Each weight of a model, gathered separately, even while its units are gathered."""
        for weight in weights_of(model):
            yield weight.name, _whole(weight)


@torch.inference_mode(False)
@torch.no_grad()
def _whole(weight: Weight) -> Tensor:
    tensor = weight.get()
    # A gathered unit will free its storage, so copy.
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def _each_unit(sharded: Sequence[nn.Module], function: Callable[[Any], Any]) -> None:
    for root in sharded:
        for unit in root.modules():
            if isinstance(unit, FSDPModule):
                function(unit)


def _call_through(root: Any, backbone: nn.Module) -> None:
    """Make calls of the backbone alone gather the weights outside the layers, as calls of the model do."""
    depth = 0  # of calls of the whole model
    backbone_forward = backbone.forward

    def enter(*_: Any) -> None:
        nonlocal depth
        depth += 1

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    root.register_forward_pre_hook(enter)
    root.register_forward_hook(leave, always_call=True)
    root.backbone_forward = backbone_forward
    register_fsdp_forward_method(root, "backbone_forward")

    @functools.wraps(backbone_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return (backbone_forward if depth else root.backbone_forward)(*args, **kwargs)

    backbone.forward = forward  # type: ignore[method-assign]
