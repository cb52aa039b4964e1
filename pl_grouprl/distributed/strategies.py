"""What modules need from a Trainer's strategy: DDP, FSDP1, FSDP2, DeepSpeed.

`support_of` picks one of four classes with one interface, which stand below side by side. The first is for strategies
under which every rank has all weights; the others shard them.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.distributed.tensor import DTensor

from pl_grouprl.attention import find_backbone
from pl_grouprl.attention.support import decoder_layers
from pl_grouprl.utilities.distributed import local_shard

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


def support_of(trainer: Trainer | None) -> StrategySupport:
    """Pick the support for the Trainer's strategy.

    Raises:
        ValueError: If the strategy is not supported.
    """
    from lightning.pytorch import strategies

    strategy = None if trainer is None else trainer.strategy
    if isinstance(strategy, strategies.DeepSpeedStrategy):  # also a DDPStrategy
        return DeepSpeedSupport(trainer)
    if strategy is None or isinstance(strategy, strategies.SingleDeviceStrategy | strategies.DDPStrategy):
        return StrategySupport(trainer)
    if isinstance(strategy, strategies.ModelParallelStrategy):
        return FSDP2Support(trainer)
    if isinstance(strategy, strategies.FSDPStrategy):
        return FSDP1Support(trainer)
    raise ValueError(
        f"trainer.strategy is {type(strategy).__name__}, which is not supported here; use a single device, ddp, "
        "FSDPStrategy, ModelParallelStrategy or DeepSpeedStrategy (configs/strategy has a file for each)."
    )


# A model's weights, whatever wraps or shards it.

_WRAPPERS = {"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"}
"""Name parts added by FSDP1, torch.compile and PyTorch's activation checkpointing."""


class Weight(NamedTuple):
    """The attribute that contains a weight; a strategy may replace the tensor when it gathers or shards it."""

    name: str
    owner: nn.Module
    attribute: str

    def get(self) -> Tensor:
        """The current tensor, detached."""
        tensor: Tensor = getattr(self.owner, self.attribute)
        return tensor.detach()


def plain_name(name: str) -> str:
    """Remove the parts of a name that wrappers added."""
    return ".".join(part for part in name.split(".") if part and part not in _WRAPPERS)


def named_places(model: nn.Module) -> dict[str, Weight]:
    """Parameters and persistent buffers by name, module by module; every name of a tied one maps to its first."""
    found: dict[int, Weight] = {}
    places: dict[str, Weight] = {}
    for prefix, owner in model.named_modules(remove_duplicate=False):
        for attribute, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is None or attribute in owner._non_persistent_buffers_set:
                continue
            name = plain_name(f"{prefix}.{attribute}")
            places[name] = found.setdefault(id(tensor), Weight(name, owner, attribute))
    return places


def weights_of(model: nn.Module) -> list[Weight]:
    """Each parameter and persistent buffer once, module by module, parameters in the order of `named_parameters`."""
    return [weight for name, weight in named_places(model).items() if weight.name == name]


def local_weights(model: nn.Module) -> Iterator[Tensor]:
    """This rank's part of each weight, whole or a shard; `requires_grad` is kept."""
    for weight in weights_of(model):
        tensor = getattr(weight.owner, weight.attribute)
        yield local_shard(tensor).requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def gathered(*contexts: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """Enter contexts that gather weights, outside inference mode, in which Lightning validates.

    The body runs in the caller's mode.
    """
    with contextlib.ExitStack() as entered:
        with torch.inference_mode(False), torch.no_grad():
            for context in contexts:
                entered.enter_context(context)
        try:
            yield
        finally:
            with torch.inference_mode(False), torch.no_grad():
                entered.close()


def roots(module: nn.Module) -> list[nn.Module]:
    """The outermost modules that are called as a whole: transformers models, and others with direct parameters.

    Args:
        module: A LightningModule, a critic, or a transformers model.
    """
    if _is_transformers_model(module) or any(True for _ in module.parameters(recurse=False)):
        return [module]
    return [root for child in module.children() for root in roots(child)]


def _is_transformers_model(module: nn.Module) -> bool:
    return hasattr(module, "get_input_embeddings") and hasattr(module, "config")


def _decoder_layers(root: nn.Module) -> Sequence[nn.Module]:
    return list(decoder_layers(root)) if _is_transformers_model(root) else []


# A single device and DDP, and the interface.


class StrategySupport:
    """Access to weights and gradients under a strategy. This class is for a single device and DDP.

    Args:
        trainer: The run's Trainer; None for a module that is used without one.

    Attributes:
        shards: Whether a rank holds only a part of the weights between forward and backward passes.
        keeps_plain_weights: Whether every rank holds all weights as ordinary tensors at any time, so that another
            thread may copy them.
        bounds_micro_batches: Whether a token budget may be chosen from the free memory.
        keeps_shapes: Whether the optimizer gets weights in their own shapes, rather than flat shards.
    """

    shards: bool = False
    keeps_plain_weights: bool = True
    bounds_micro_batches: bool = True
    keeps_shapes: bool = True

    def __init__(self, trainer: Trainer | None) -> None:
        self._trainer = trainer

    @property
    def trainer(self) -> Trainer:
        """The run's Trainer."""
        if self._trainer is None:
            raise RuntimeError("the module is not attached to a Trainer; call this inside a run.")
        return self._trainer

    def serves(self, trainer: Trainer | None) -> bool:
        """Whether this belongs to that Trainer."""
        return self._trainer is trainer

    def check(self, module: LightningModule) -> None:
        """Reject, at setup, options that this strategy does not support.

        Raises:
            ValueError: Names the option, its value and the remedy.
        """

    def shard(self, module: LightningModule) -> None:
        """Shard the models of a module if the strategy leaves that to `configure_model`."""

    @contextlib.contextmanager
    def whole_weights(self, *models: nn.Module) -> Iterator[None]:
        """Context with whole weights on each rank, for sampling; inside it, ranks may make different calls.

        Collective on enter and exit.
        """
        yield

    def call(self, module: LightningModule, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the module as the strategy runs `training_step`, so wrappers see the forward.

        Collective; all ranks run the same forward passes in it.
        """
        return getattr(module, method)(*args, **kwargs)

    def forward_context(self) -> contextlib.AbstractContextManager[Any]:
        """The forward context of the run's precision, such as autocast; a null context without a Trainer."""
        return contextlib.nullcontext() if self._trainer is None else self._trainer.precision_plugin.forward_context()

    def autocast_dtype(self, device_type: str) -> torch.dtype | None:
        """The dtype of that context's autocast; None without autocast."""
        with self.forward_context():
            return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None

    def backward(self, loss: Tensor) -> None:
        """Run backward for one of several micro-batches inside `training_step`; adds to gradients without reducing."""
        if self._trainer is None:
            loss.backward()
        else:
            self._trainer.strategy.backward(loss, None)

    @contextlib.contextmanager
    def accumulating(self, module: LightningModule, *, last: bool) -> Iterator[None]:
        """Context for forward and backward of one micro-batch; strategies reduce gradients only in the last one.

        DDP needs nothing: it reduces only in the backward pass after `training_step`. Lightning runs the last backward
        pass after this context exits, so settings must persist.
        """
        yield

    def zero_loss_over(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Zero that depends on every trained parameter, so a reducer that waits for all gradients gets them."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        return torch.stack([parameter.flatten()[:1].sum() * 0 for parameter in trained]).sum()

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """This rank's gradients, or shards of them, of parameters that have one; may be changed in place."""
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def weights(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """This rank's weights, or shards of them; call between steps."""
        return [local_shard(parameter) for parameter in parameters]

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Norm of the gradients over all ranks' shards, a scalar. Collective."""
        return torch.nn.utils.get_total_norm(self.gradients(parameters))

    def scale(self, parameters: Sequence[nn.Parameter], factor: float | Tensor) -> None:
        """Multiply gradients in place; they may be offloaded to the CPU while the factor is on the GPU."""
        gradients = self.gradients(parameters)
        if gradients:
            torch._foreach_mul_(gradients, factor.to(gradients[0].device) if isinstance(factor, Tensor) else factor)

    def clamp(self, parameters: Sequence[nn.Parameter], limit: float) -> None:
        """Clip each entry of the gradients to [-limit, limit], in place."""
        for gradient in self.gradients(parameters):
            gradient.clamp_(-limit, limit)

    def skip_in_next_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Exclude parameters from the next optimizer step: it skips parameters without a gradient."""
        for parameter in parameters:
            parameter.grad = None

    def named_weights(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Iterate over a model's parameters and persistent buffers, each whole, without a full second copy.

        Collective: all ranks iterate to the end or to the same weight, outside forward and backward passes and
        `whole_weights`. Closing or dropping the iterator frees what was gathered.

        Args:
            model: A transformers model, with or without adapters.

        Yields:
            Name and value. Parameters have the order and names of the unwrapped model's `named_parameters()`, so tied
            ones occur once, by their first name; buffers follow the parameters of their module. Values are detached and
            on the rank's device. They stay readable if kept, but the next optimizer step may change them.
        """
        for weight in weights_of(model):
            yield weight.name, weight.get()

    def master_weights(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Like `named_weights`, but where the optimizer steps float32 masters of rounded weights, those. Collective."""
        return self.named_weights(model)

    def full_state_dict(self, model: nn.Module) -> dict[str, Tensor] | None:
        """The state of a model's master weights on rank 0 (on the CPU unless plain); None elsewhere. Collective."""
        first = self.trainer.is_global_zero
        if self.keeps_plain_weights:
            return dict(model.state_dict()) if first else None
        state: dict[str, Tensor] = {}
        for name, weight in self.master_weights(model):
            if first:
                state[name] = weight.to("cpu", copy=True)
        return {name: state[place.name] for name, place in named_places(model).items()} if first else None


class ShardedSupport(StrategySupport):
    """Base class of FSDP1 and FSDP2, whose optimizer steps each rank's shards separately."""

    shards = True
    keeps_plain_weights = False

    def check(self, module: LightningModule) -> None:
        """Reject critics that need whole weights, and compiled layers."""
        strategy = type(self.trainer.strategy).__name__
        critic = getattr(module, "critic_source", None)
        if getattr(critic, "needs_whole_weights", False):
            raise ValueError(
                f"critic is a {type(critic).__name__}, which shares the storage of whole weights with the policy, and "
                f"{strategy} shards them; use PolicyCopyCritic or SharedTrunkCritic, or the strategy ddp."
            )
        if getattr(getattr(module, "policy_source", None), "kernels", None) == "compile":
            raise ValueError(f"policy has kernels='compile', which {strategy} does not support; omit it, or use ddp.")

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Norm of the gradients over all ranks' shards, a scalar. Collective."""
        device = self.trainer.strategy.root_device
        gradients = [gradient for gradient in self.gradients(parameters) if gradient.numel()]
        norms = torch._foreach_norm(gradients) if gradients else []
        total = torch.stack([torch.zeros((), device=device), *(n.to(device, torch.float32) for n in norms)])
        return self.trainer.strategy.reduce(total.square().sum(), reduce_op="sum").sqrt()

    def zero_loss_over(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Zero: no reducer waits for gradients of unused parameters."""
        return torch.zeros((), device=self.trainer.strategy.root_device)


# FSDP1 (Lightning's FSDPStrategy): wraps the whole LightningModule, with each decoder layer as a unit.


class FSDP1Support(ShardedSupport):
    """Wraps decoder layers; everything else is gathered while the module is called.

    FSDP1 has limits that ModelParallelStrategy (FSDP2) does not have. A step is one call of the wrapper, so it can have
    only one micro-batch. Frozen weights cannot be left out of checkpoints. And of a frozen model (reference, teacher),
    only the decoder layers are sharded: the rest is not in checkpoints, and FSDP1 would report it as missing.
    """

    bounds_micro_batches = False
    keeps_shapes = False

    def check(self, module: LightningModule) -> None:
        """Reject what FSDP1 cannot do; see `StrategySupport.check`."""
        if not self.trainer.strategy.kwargs.get("use_orig_params", True):  # type: ignore[attr-defined]
            raise ValueError("FSDPStrategy has use_orig_params=False, which rules out parameter groups; omit it.")
        budget = getattr(module, "max_tokens_per_micro_batch", None)
        warm_up = getattr(module, "critic_warmup_steps", 0)
        adapter = getattr(getattr(module, "policy_source", None), "adapter", None)
        for name, value, why in (
            ("max_tokens_per_micro_batch", budget, "runs a step's backward in one pass"),
            ("critic_warmup_steps", warm_up, "cannot save an optimizer that has not stepped all parameters"),
            ("policy's adapter", adapter, "cannot leave its frozen base out of checkpoints"),
        ):
            if value:
                raise ValueError(
                    f"{name} is {value} under FSDPStrategy, which {why}; omit it, or use ModelParallelStrategy "
                    "(strategy/fsdp2.yaml)."
                )
        super().check(module)

    def shard(self, module: LightningModule) -> None:
        """Tell the strategy which modules to wrap.

        Raises:
            ValueError: If the strategy is configured to wrap anything but decoder layers.
        """
        strategy: Any = self.trainer.strategy

        def wrap_once(model: nn.Module) -> nn.Module:
            """Wrap in the module's first run only; its weights are flat shards in a later one."""
            if "_fsdp1_wrapper" not in vars(module):
                vars(module)["_fsdp1_wrapper"] = type(strategy)._setup_model(strategy, model)  # not as a child
            wrapper: nn.Module = vars(module)["_fsdp1_wrapper"]
            return wrapper

        strategy._setup_model = wrap_once
        if any(isinstance(inner, FullyShardedDataParallel) for inner in module.modules()):
            return
        for parameter in module.parameters():
            # Flat shards lose the shape, which weight decay and cost estimates need.
            parameter.whole_shape = parameter.shape  # type: ignore[attr-defined]
        models = roots(module)
        layers = [layer for root in models for layer in _decoder_layers(root)]
        if (policy := strategy.kwargs.get("auto_wrap_policy")) is not None:
            for name, inner in module.named_modules():
                size = sum(parameter.numel() for parameter in inner.parameters())
                wraps = policy(module=inner, recurse=False, nonwrapped_numel=size)
                if wraps and inner not in layers and inner is not module:
                    raise ValueError(
                        f"FSDPStrategy's auto_wrap_policy wraps {name} ({type(inner).__name__}), which ranks may call "
                        "different numbers of times; omit it (null): decoder layers are always wrapped."
                    )
        strategy.kwargs["auto_wrap_policy"] = partial(lambda_auto_wrap_policy, lambda_fn=lambda inner: inner in layers)
        in_layers = {id(parameter) for layer in layers for parameter in layer.parameters()}
        frozen = [root for root in models if not any(p.requires_grad for p in root.parameters())]
        unsharded = [p for root in frozen for p in root.parameters() if id(p) not in in_layers]
        if unsharded:
            for parameter in unsharded:
                parameter.data = parameter.data.to(strategy.root_device)
            strategy.kwargs["ignored_states"] = unsharded

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


def _summon(unit: nn.Module) -> contextlib.AbstractContextManager[None]:
    summoned: contextlib.AbstractContextManager[None] = FullyShardedDataParallel.summon_full_params(
        unit, recurse=False, writeback=False
    )
    return summoned


# FSDP2 (Lightning's ModelParallelStrategy): `fully_shard` on each decoder layer, then on each model.


class FSDP2Support(ShardedSupport):
    """Shards each model over all ranks, trained or frozen.

    A decoder layer is gathered for its forward and its backward. Everything else (embeddings, norms, head) stays
    gathered from the model's call to the end of its backward, because logits are computed chunk by chunk.
    Weights are gathered in their storage dtype: under `bf16-mixed` that is float32, and autocast makes the bfloat16
    copies.

    While micro-batches accumulate, each rank holds whole gradients: the price of one reduction per step.
    """

    def check(self, module: LightningModule) -> None:
        """Reject tensor parallelism, which is Lightning's default, and parts that need whole weights."""
        size = self.trainer.strategy.device_mesh["tensor_parallel"].size()  # type: ignore[attr-defined]
        if size > 1:
            raise ValueError(
                f"ModelParallelStrategy has tensor_parallel_size={size} (its default 'auto' is the number of devices "
                "of a node), but only data parallelism shards here; set "
                f"data_parallel_size={self.trainer.world_size} and tensor_parallel_size=1."
            )
        super().check(module)

    def shard(self, module: LightningModule) -> None:
        """Shard all models that are not sharded yet."""
        mesh = self.trainer.strategy.device_mesh["data_parallel"]  # type: ignore[attr-defined]
        for root in roots(module):
            if isinstance(root, FSDPModule):
                continue
            for layer in _decoder_layers(root):
                fully_shard(layer, mesh=mesh, reshard_after_forward=True)
            fully_shard(root, mesh=mesh, reshard_after_forward=False)
            if _is_transformers_model(root) and (backbone := find_backbone(root)) is not root:  # type: ignore[arg-type]
                _call_through(root, backbone)

    @contextlib.contextmanager
    def whole_weights(self, *models: nn.Module) -> Iterator[None]:
        """Gather all weights of some models once, instead of in every call."""
        sharded = _sharded_roots(*models)
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
            _each_unit(_sharded_roots(module), FSDPModule.reshard)

    @contextlib.contextmanager
    def accumulating(self, module: LightningModule, *, last: bool) -> Iterator[None]:
        """Reduce gradients only in the backward of the last micro-batch."""
        for root in _sharded_roots(module):
            root.set_requires_gradient_sync(last)
        yield

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """This rank's shards of the gradients."""
        gradients = super().gradients(parameters)
        return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]

    def named_weights(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Each weight of a model, gathered separately, even while its units are gathered."""
        for weight in weights_of(model):
            yield weight.name, _whole(weight)  # no name here keeps it alive until the next one is gathered


@torch.inference_mode(False)
@torch.no_grad()
def _whole(weight: Weight) -> Tensor:
    tensor = weight.get()  # a gathered unit will free its storage, so copy
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def _sharded_roots(*models: nn.Module) -> list[Any]:
    return [root for model in models for root in roots(model) if isinstance(root, FSDPModule)]


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


# DeepSpeed's ZeRO: shards gradients and optimizer state (stages 1 and 2), and weights too (stage 3).
#
# Before the optimizer's step, gradients are not in `parameter.grad`: each rank has its shards, flattened by parameter
# group. DeepSpeed has no public way to read or scale them, so this class uses private attributes of DeepSpeed 0.19.


class DeepSpeedSupport(StrategySupport):
    """DeepSpeed with ZeRO stage 1, 2 or 3, with or without CPU offloading.

    From stage 2 on, every micro-batch reduces its gradients, because a rank only keeps its shards of them.
    """

    keeps_plain_weights = False
    bounds_micro_batches = False  # its buffers are not counted
    keeps_shapes = False

    def __init__(self, trainer: Trainer | None) -> None:
        super().__init__(trainer)
        config: Any = self.trainer.strategy.config  # type: ignore[attr-defined]
        self.stage = int(config.get("zero_optimization", {}).get("stage", 0))
        self.shards = self.stage == 3

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine around the module."""
        return self.trainer.strategy.model

    def check(self, module: LightningModule) -> None:
        """Reject unsupported options, and disable what DeepSpeed or Lightning would do instead of the module.

        Raises:
            ValueError: If the Trainer accumulates gradients, ZeRO is off, the precision is float16, or DeepSpeed's
                configuration sets what the module decides.
        """
        strategy: Any = self.trainer.strategy
        accumulated, precision = self.trainer.accumulate_grad_batches, self.trainer.precision
        if accumulated > 1:
            raise ValueError(f"accumulate_grad_batches is {accumulated} under DeepSpeed; lower num_mini_batches.")
        if self.stage not in (1, 2, 3):
            raise ValueError(f"DeepSpeed's ZeRO stage is {self.stage}; set stage to 1, 2 or 3, or use strategy ddp.")
        if precision.startswith("16"):
            raise ValueError(f"trainer.precision is {precision!r} under DeepSpeed; use 'bf16-mixed'.")
        for name in ("gradient_clipping", "optimizer", "scheduler"):
            if strategy.config.get(name):
                raise ValueError(f"config of DeepSpeed has {name}={strategy.config[name]!r}; leave it to the module.")
        # The module clips by part, and logs the norm.
        strategy.config["gradient_clipping"] = 0.0
        strategy.init_deepspeed = partial(_init_engine, strategy)
        strategy.load_model_state_dict = partial(_load_weights, strategy)
        # Use PyTorch's optimizer even if offloaded, so steps are the same under all strategies.
        strategy.config.setdefault("zero_force_ds_cpu_optimizer", False)
        # DeepSpeed only prints speed from it; to infer it, Lightning would build the train loader, even for validation.
        strategy.config.setdefault("train_micro_batch_size_per_gpu", 1)
        # Lightning would create models with sharded weights, which sources that load or initialize weights do not
        # support. DeepSpeed shards them when training begins.
        strategy.model_sharded_context = contextlib.nullcontext

    def shard(self, module: LightningModule) -> None:
        """Make DeepSpeed leave frozen weights out of its checkpoints if the module does."""
        kept = module.state_dict()
        if not any(name in kept for name, parameter in module.named_parameters() if not parameter.requires_grad):
            self.trainer.strategy.exclude_frozen_parameters = True  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def whole_weights(self, *models: nn.Module) -> Iterator[None]:
        """Under ZeRO-3, gather all weights of the models, and remove the hooks that would shard them again."""
        if self.stage < 3:
            yield
            return
        import deepspeed

        offload = self._offload()
        parameters = [parameter for model in models for parameter in model.parameters()]
        with deepspeed.zero.GatheredParameters(parameters), _hooks_aside(models, offload):
            yield

    def call(self, module: LightningModule, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the module inside the engine's forward, like `training_step`.

        Under ZeRO-3 each layer gathers its weights as it runs, so all ranks must run the same layers equally often.
        """
        results: list[Any] = []

        def forward() -> None:  # returns nothing: ZeRO-3 would search the result for tensors
            module.forward = original  # type: ignore[method-assign]
            results.append(getattr(module, method)(*args, **kwargs))

        original = module.forward
        module.forward = forward  # type: ignore[method-assign]
        try:
            self.engine()
        finally:
            module.forward = original  # type: ignore[method-assign]
        return results[0]

    @contextlib.contextmanager
    def accumulating(self, module: LightningModule, *, last: bool) -> Iterator[None]:
        """Context for one micro-batch. Every trained parameter must get a gradient in the last one."""
        optimizer = self.engine.optimizer
        self.engine.set_gradient_accumulation_boundary(last)
        optimizer.clear_backward_seen_flag()  # as every forward of the engine does
        if optimizer.micro_step_id == (0 if self.stage == 3 else -1):
            # The step's first micro-batch; what a parameter without a gradient in it has accumulated would remain.
            if self.stage == 3:
                optimizer.grad_partitions_flat_buffer.zero_()
            elif optimizer.cpu_offload:
                for accumulated in optimizer.accumulated_grads_in_cpu.values():
                    accumulated.zero_()
        yield

    def backward(self, loss: Tensor) -> None:
        """Run backward for one of several micro-batches; adds to the gradients of this rank's shards."""
        from deepspeed.runtime.utils import register_output_backward_hooks

        # The engine does this itself for the loss its forward returns, that of the last micro-batch.
        register_output_backward_hooks(loss, preprocess_once_fn=self.engine._backward_prologue)
        super().backward(loss)

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """This rank's shards of the gradients that the next step uses; may be changed in place."""
        optimizer, steps = self.engine.optimizer, self._group_steps
        shards: list[Tensor] = []
        for index in self._groups(parameters):
            if steps.skips(index):
                continue
            if self.stage == 3 and optimizer.offload_optimizer:
                shards.append(optimizer.fp32_partitioned_groups_flat[index].grad)
            elif self.stage < 3 and optimizer.cpu_offload:
                shards.append(optimizer.single_partition_of_fp32_groups[index].grad)
            else:
                shards += optimizer.averaged_gradients[index]
        return shards

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Norm of the gradients over all ranks' shards, a scalar. Collective."""
        device = self.trainer.strategy.root_device
        shards = self.gradients(parameters)
        norms = [torch.linalg.vector_norm(shard, dtype=torch.float32).to(device) for shard in shards]
        square = torch.stack(norms).square().sum() if norms else torch.zeros((), device=device)
        total = self.trainer.strategy.reduce(square, reduce_op="sum")
        assert isinstance(total, Tensor)
        return total.sqrt() / self.engine.optimizer.loss_scale

    def skip_in_next_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Exclude parameters from the next optimizer step, including its moments."""
        steps, now = self._group_steps, self.engine.micro_steps
        steps.skipped_at.update(dict.fromkeys(self._groups(parameters), now))

    def named_weights(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Each weight of a model; under ZeRO-3, gathers each module's direct weights together."""
        if self.stage < 3:
            yield from super().named_weights(model)
            return
        import deepspeed

        self._offload()
        for owner, weights in groupby(weights_of(model), lambda weight: weight.owner):
            with gathered(deepspeed.zero.GatheredParameters(owner.parameters(recurse=False))):
                for weight in weights:
                    yield weight.name, weight.get()

    def master_weights(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Under `bf16-mixed`, in float32: the optimizer's own of what is trained, of which the model has roundings."""
        if not self.trainer.precision.endswith("mixed"):
            yield from self.named_weights(model)
            return
        from deepspeed.utils import safe_get_full_fp32_param

        for weight, (name, rounded) in zip(weights_of(model), self.named_weights(model), strict=True):
            master = safe_get_full_fp32_param(getattr(weight.owner, weight.attribute))
            yield name, rounded.float() if master is None else master

    @torch.inference_mode(False)
    def _offload(self) -> Any:
        """Drop prefetched weights; returns ZeRO-3's object that gathers and shards weights."""
        offload = getattr(self.engine.optimizer, "parameter_offload", self.engine.optimizer)
        offload.empty_partition_cache()
        return offload

    @property
    def _group_steps(self) -> _GroupSteps:
        """The replacement for the optimizer's step of one group, installed on first use."""
        optimizer = self.engine.optimizer
        if not isinstance(optimizer._optimizer_step, _GroupSteps):
            optimizer._optimizer_step = _GroupSteps(self.engine, optimizer._optimizer_step)
        return optimizer._optimizer_step

    def _groups(self, parameters: Sequence[nn.Parameter]) -> list[int]:
        """Indices of the optimizer's groups (under ZeRO-3, sub-groups) that consist of the given parameters."""
        optimizer = self.engine.optimizer
        groups = optimizer.fp16_groups if self.stage == 3 else optimizer.bit16_groups
        wanted = {id(parameter) for parameter in parameters if parameter.requires_grad}
        indices = [index for index, group in enumerate(groups) if group and all(id(p) in wanted for p in group)]
        found = sum(len(groups[index]) for index in indices)
        if found != len(wanted):
            raise ValueError(f"DeepSpeed needs these {len(wanted)} parameters in a separate parameter group.")
        return indices


class _GroupSteps:
    """Replaces the method of ZeRO's optimizer that steps one group, to skip some groups.

    Zero gradients are not enough: momentum would still move the weights.
    """

    def __init__(self, engine: Any, step: Any) -> None:
        self._engine, self._step = engine, step
        self.skipped_at: dict[int, int] = {}
        """The engine's `micro_steps` of the step that skips a group, by group."""

    def skips(self, index: int) -> bool:
        """Whether the next step skips a group."""
        return self.skipped_at.get(index) == self._engine.micro_steps

    def __call__(self, index: int) -> None:
        if not self.skips(index):
            self._step(index)


def _init_engine(strategy: Any) -> None:
    """`init_deepspeed` of a strategy, without the warning about clipping; replaces the engine of an earlier run."""
    module = strategy.lightning_module
    if "_deepspeed_engine" in vars(module):
        vars(module)["_deepspeed_engine"].destroy()  # and its hooks
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Since DeepSpeed handles gradient clipping internally")
        type(strategy).init_deepspeed(strategy)
    vars(module)["_deepspeed_engine"] = strategy.model  # not as a child
    if not module.trainer.training and strategy.zero_stage_3:  # DeepSpeed calls it after any load
        strategy.model.optimizer._restore_from_bit16_weights = lambda: None


def _load_weights(strategy: Any, checkpoint: Any, strict: bool = True) -> None:
    """`load_model_state_dict` of a strategy; in evaluation under ZeRO-3, from a folder's shards of the optimizer.

    Only those have the weights there, and DeepSpeed loads them only into an optimizer.
    """
    trainer = strategy.lightning_module.trainer
    if trainer.state.fn == TrainerFn.FITTING or not strategy.zero_stage_3 or strategy.load_full_weights:
        type(strategy).load_model_state_dict(strategy, checkpoint, strict)
        return
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    whole = get_fp32_state_dict_from_zero_checkpoint(trainer.ckpt_path) if strategy.is_global_zero else {}
    strategy._restore_zero_state({"state_dict": whole}, strict)


@contextlib.contextmanager
def _hooks_aside(models: Sequence[nn.Module], offload: Any) -> Iterator[None]:
    """Remove ZeRO-3's gathering and sharding hooks from some models. Other hooks stay."""
    modules = [module for model in models for module in model.modules()]
    registries = {id(hooks): hooks for m in modules for hooks in (m._forward_pre_hooks, m._forward_hooks)}
    taken: dict[int, set[int]] = {}
    for handle in (*offload.forward_hooks, *offload.backward_hooks):
        registry = id(handle.hooks_dict_ref())
        if registry in registries:
            taken.setdefault(registry, set()).add(handle.id)
    before = {registry: OrderedDict(registries[registry]) for registry in taken}
    for registry, ids in taken.items():
        for hook_id in ids:
            del registries[registry][hook_id]
    try:
        yield
    finally:
        for registry, ids in taken.items():
            now = OrderedDict(registries[registry])
            kept = [(key, hook) for key, hook in before[registry].items() if key in ids or key in now]
            registries[registry].clear()
            registries[registry].update([*kept, *now.items()])
