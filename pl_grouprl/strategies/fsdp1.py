"""FSDP1 (Lightning's FSDPStrategy): wraps the whole LightningModule, with each decoder layer as a unit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
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
    """Wraps decoder layers; everything else is gathered while the module is called.

    FSDP1 has limits that ModelParallelStrategy (FSDP2) does not have. A step is one call of the wrapper, so it can have
    only one micro-batch. Frozen weights cannot be left out of checkpoints. And of a frozen model (reference, teacher),
    only the decoder layers are sharded: the rest is not in checkpoints, and FSDP1 would report it as missing.
    """

    bounds_micro_batches = False
    keeps_shapes = False

    def check(self, module: LightningModule) -> None:
        """Refuse what FSDP1 cannot do.

        Raises:
            ValueError: Names the option, its value and the remedy.
        """
        options = self._options
        if not options.get("use_orig_params", True):
            raise ValueError("FSDPStrategy has use_orig_params=False, which rules out parameter groups; leave it out.")
        budget = getattr(module, "max_tokens_per_micro_batch", None)
        if budget is not None:
            raise ValueError(
                f"max_tokens_per_micro_batch is {budget} under FSDPStrategy, which runs a step's backward in one pass; "
                "leave it out, or use ModelParallelStrategy (strategy/fsdp2.yaml)."
            )
        warm_up = getattr(module, "critic_warmup_steps", 0)
        if warm_up:
            raise ValueError(
                f"critic_warmup_steps is {warm_up} under FSDPStrategy, which cannot save an optimizer that has not "
                "stepped all parameters; set it to 0, or use ModelParallelStrategy (strategy/fsdp2.yaml)."
            )
        if getattr(getattr(module, "policy_source", None), "adapter", None) is not None:
            raise ValueError(
                "policy has an adapter, whose frozen base FSDPStrategy cannot leave out of checkpoints; use "
                "ModelParallelStrategy (strategy/fsdp2.yaml), or ddp."
            )
        refuse_whole_weights(module, "FSDPStrategy")

    def shard(self, module: LightningModule) -> None:
        """Tell the strategy which modules to wrap.

        Raises:
            ValueError: If the strategy is configured to wrap anything but decoder layers.
        """
        strategy: Any = self.trainer.strategy
        strategy._setup_model = partial(_wrapped_once, module, partial(type(strategy)._setup_model, strategy))
        if any(isinstance(inner, FullyShardedDataParallel) for inner in module.modules()):
            return
        for parameter in module.parameters():
            # Flat shards lose the shape, which weight decay and cost estimates need.
            parameter.whole_shape = parameter.shape  # type: ignore[attr-defined]
        layers = [layer for root in roots(module) for layer in decoder_layers_of(root)]
        self._refuse_other_units(module, layers)
        self._options["auto_wrap_policy"] = partial(lambda_auto_wrap_policy, lambda_fn=lambda inner: inner in layers)
        unsharded = _frozen_outside(module, layers)
        if unsharded:
            for parameter in unsharded:
                parameter.data = parameter.data.to(self.trainer.strategy.root_device)
            self._options["ignored_states"] = unsharded

    @contextlib.contextmanager
    def whole_weights(self, *models: nn.Module) -> Iterator[None]:
        """Gather all weights of some models, and bypass the layers' wrappers, which would free them."""
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
        """Run a method of the module inside the wrapper's forward, like `training_step`."""
        strategy = self.trainer.strategy
        assert strategy.model is not None
        return strategy._forward_redirection(strategy.model, module, method, *args, **kwargs)

    def named_weights(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Each weight of a model, copied from its FSDP unit, which stays gathered for consecutive weights.

        The order is the same as under other strategies, so the root unit is gathered before and after the layers.
        """
        wrapped = self.trainer.strategy.model
        assert isinstance(wrapped, FullyShardedDataParallel)
        wrapped.check_is_root()  # otherwise the first unit gathered would become the root
        unit_of: dict[nn.Module, nn.Module] = {}
        for unit in model.modules():  # outermost first
            if isinstance(unit, FullyShardedDataParallel):
                unit_of.update(dict.fromkeys(unit.modules(), unit))
        for unit, weights in groupby(weights_of(model), lambda weight: unit_of.get(weight.owner, wrapped)):
            with gathered(_summon(unit)):
                for weight in weights:
                    yield weight.name, weight.get().clone()  # the unit's storage will be freed, so no view

    def _refuse_other_units(self, module: nn.Module, layers: Sequence[nn.Module]) -> None:
        """Refuse an `auto_wrap_policy` that wraps anything but decoder layers."""
        policy = self._options.get("auto_wrap_policy")
        if policy is None:
            return
        for name, inner in module.named_modules():
            size = sum(parameter.numel() for parameter in inner.parameters())
            wraps = policy(module=inner, recurse=False, nonwrapped_numel=size)
            if wraps and inner not in layers and inner is not module:
                raise ValueError(
                    f"FSDPStrategy's auto_wrap_policy wraps {name} ({type(inner).__name__}), which ranks may call "
                    "different numbers of times; leave it out (null): decoder layers are always wrapped."
                )

    @property
    def _options(self) -> dict[str, Any]:
        return self.trainer.strategy.kwargs  # type: ignore[attr-defined]


def _wrapped_once(module: LightningModule, wrap: Callable[[nn.Module], nn.Module], model: nn.Module) -> nn.Module:
    """A module's wrapper, made in its first run. Another could not be: its weights are flat shards then."""
    if "_fsdp1_wrapper" not in vars(module):
        vars(module)["_fsdp1_wrapper"] = wrap(model)  # not as a child, which it has as one
    wrapper: nn.Module = vars(module)["_fsdp1_wrapper"]
    return wrapper


def _frozen_outside(module: LightningModule, layers: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Parameters of frozen models that are not in decoder layers."""
    in_layers = {id(parameter) for layer in layers for parameter in layer.parameters()}
    frozen = [root for root in roots(module) if not any(p.requires_grad for p in root.parameters())]
    return [p for root in frozen for p in root.parameters() if id(p) not in in_layers]


def _summon(unit: nn.Module) -> contextlib.AbstractContextManager[None]:
    summoned: contextlib.AbstractContextManager[None] = FullyShardedDataParallel.summon_full_params(
        unit, recurse=False, writeback=False
    )
    return summoned
