"""FSDP1 (Lightning's FSDPStrategy): the whole LightningModule is wrapped, its decoder layers are units of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

from pl_grouprl.strategies.sharded import ShardedSupport, decoder_layers_of, refuse_whole_weights, roots
from pl_grouprl.strategies.weights import gathered, weights_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


class FSDP1Support(ShardedSupport):
    """Wraps decoder layers; what is around them is gathered with the module, for as long as it is called.

    A frozen reference has its layers sharded alone: what is around them is no part of a checkpoint, and FSDP1 would
    miss it there. All passes of a step would be one call of the wrapper, so there can be one only; and FSDP1 knows
    nothing of frozen weights that a checkpoint leaves out. ModelParallelStrategy (FSDP2) serves both.
    """

    def check(self, module: LightningModule) -> None:
        """Refuse what FSDP1 cannot do.

        Raises:
            ValueError: With the option, its value and what to do.
        """
        options = self._options
        if not options.get("use_orig_params", True):
            raise ValueError("FSDPStrategy has use_orig_params=False, which knows no parameter groups; leave it out.")
        budget = getattr(module, "max_tokens_per_micro_batch", None)
        if budget is not None:
            raise ValueError(
                f"max_tokens_per_micro_batch is {budget} under FSDPStrategy, which differentiates a step in one pass; "
                "leave it out, or use ModelParallelStrategy (strategy/fsdp2.yaml)."
            )
        warm_up = getattr(module, "critic_warmup_steps", 0)
        if warm_up:
            raise ValueError(
                f"critic_warmup_steps is {warm_up} under FSDPStrategy, which saves no optimizer that has not stepped "
                "all parameters; set it to 0, or use ModelParallelStrategy (strategy/fsdp2.yaml)."
            )
        if getattr(getattr(module, "policy_source", None), "adapter", None) is not None:
            raise ValueError(
                "policy has an adapter, whose frozen base FSDPStrategy cannot leave out of checkpoints; use "
                "ModelParallelStrategy (strategy/fsdp2.yaml), or ddp."
            )
        refuse_whole_weights(module, "FSDPStrategy")

    def shard(self, module: LightningModule) -> None:
        """Say which modules the strategy is to wrap when it wraps the whole one.

        Raises:
            ValueError: If the strategy is told to wrap others than decoder layers.
        """
        if any(isinstance(inner, FullyShardedDataParallel) for inner in module.modules()):
            return
        for parameter in module.parameters():
            parameter.whole_shape = parameter.shape  # type: ignore[attr-defined]  # for weight decay and costs
        layers = [layer for root in roots(module) for layer in decoder_layers_of(root)]
        self._refuse_other_units(module, layers)
        self._options["auto_wrap_policy"] = partial(lambda_auto_wrap_policy, lambda_fn=lambda inner: inner in layers)
        reference = getattr(module, "reference", None)
        if reference is not None:
            within = {id(parameter) for layer in layers for parameter in layer.parameters()}
            around = [parameter for parameter in reference.parameters() if id(parameter) not in within]
            for parameter in around:
                parameter.data = parameter.data.to(self.trainer.strategy.root_device)
            self._options["ignored_states"] = around

    @contextlib.contextmanager
    def whole_weights(self, *models: nn.Module) -> Iterator[None]:
        """Gather all weights of some models, and call their layers past the wrappers, which would let go of them."""
        wrapped = self.trainer.strategy.model
        units = [unit for model in models for unit in model.modules() if isinstance(unit, FullyShardedDataParallel)]
        assert isinstance(wrapped, nn.Module)
        with gathered(*(_summon(unit) for unit in (wrapped, *units))):
            for unit in units:
                unit.forward = unit.module.__call__  # type: ignore[method-assign]
            try:
                yield
            finally:
                for unit in units:
                    del unit.forward

    def call(self, module: LightningModule, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the module inside the wrapper's forward, as `training_step` is run."""
        strategy = self.trainer.strategy
        assert strategy.model is not None
        return strategy._forward_redirection(strategy.model, module, method, *args, **kwargs)

    def named_weights(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Each weight of a model, copied out of its unit, which is whole for as long as its weights follow each other.

        The order is that of other strategies, so what is around the layers is gathered before them and again behind.
        """
        wrapped = self.trainer.strategy.model
        assert isinstance(wrapped, FullyShardedDataParallel)
        wrapped.check_is_root()  # the first that is gathered would be set up as the root
        unit_of: dict[nn.Module, nn.Module] = {}
        for unit in model.modules():  # from the outside in
            if isinstance(unit, FullyShardedDataParallel):
                unit_of.update(dict.fromkeys(unit.modules(), unit))
        for unit, weights in groupby(weights_of(model), lambda weight: unit_of.get(weight.owner, wrapped)):
            with gathered(_summon(unit)):
                for weight in weights:
                    yield weight.name, weight.get().clone()  # the unit's storage is freed under whoever has a view

    def _refuse_other_units(self, module: nn.Module, layers: Sequence[nn.Module]) -> None:
        policy = self._options.get("auto_wrap_policy")
        if policy is None:
            return
        for name, inner in module.named_modules():
            size = sum(parameter.numel() for parameter in inner.parameters())
            wraps = policy(module=inner, recurse=False, nonwrapped_numel=size)
            if wraps and inner not in layers and inner is not module:
                raise ValueError(
                    f"FSDPStrategy's auto_wrap_policy wraps {name} ({type(inner).__name__}), which ranks may call "
                    "different numbers of times; leave it out (null): decoder layers are wrapped in any case."
                )

    @property
    def _options(self) -> dict[str, Any]:
        return self.trainer.strategy.kwargs  # type: ignore[attr-defined]


def _summon(unit: nn.Module) -> contextlib.AbstractContextManager[None]:
    summoned: contextlib.AbstractContextManager[None] = FullyShardedDataParallel.summon_full_params(
        unit, recurse=False, writeback=False
    )
    return summoned
