"""DeepSpeed's ZeRO: shards gradients and optimizer state (stages 1 and 2), and weights too (stage 3).

Before the optimizer's step, gradients are not in `parameter.grad`: each rank has its shards, flattened by parameter
group.
DeepSpeed has no public way to read or scale them, so this file uses private attributes of DeepSpeed 0.19.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from pl_grouprl.strategies.support import StrategySupport
from pl_grouprl.strategies.weights import gathered, weights_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_DECIDED_BY_MODULE = {
    "gradient_clipping": "set trainer.gradient_clip_val",
    "optimizer": "set the optimizer of the module",
    "scheduler": "set the schedule of the module's optimizer",
}
"""Keys of DeepSpeed's configuration that are refused, with the remedy."""


class DeepSpeedSupport(StrategySupport):
    """DeepSpeed with ZeRO stage 1, 2 or 3, with or without CPU offloading.

    From stage 2 on, every micro-batch reduces its gradients, because a rank only keeps its shards of them.
    """

    keeps_plain_weights = False
    bounds_micro_batches = False  # its buffers are not counted
    keeps_shapes = False

    def __init__(self, trainer: Trainer | None) -> None:
        super().__init__(trainer)
        self.shards = self.stage == 3

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine around the module."""
        return self.trainer.strategy.model

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        config: Any = self.trainer.strategy.config  # type: ignore[attr-defined]
        return int(config.get("zero_optimization", {}).get("stage", 0))

    def check(self, module: LightningModule) -> None:
        """Refuse unsupported options, and disable what DeepSpeed or Lightning would do instead of the module.

        Raises:
            ValueError: If the Trainer accumulates gradients, ZeRO is off, the precision is float16, or DeepSpeed's
                configuration sets what the module decides.
        """
        strategy: Any = self.trainer.strategy
        accumulated = self.trainer.accumulate_grad_batches
        if accumulated > 1:
            raise ValueError(
                f"trainer.accumulate_grad_batches is {accumulated} under DeepSpeed, which cannot divide the step's "
                "losses by their common denominator; leave it out. Set num_mini_batches lower for larger steps, and "
                "max_tokens_per_micro_batch for less memory."
            )
        if self.stage not in (1, 2, 3):
            raise ValueError(f"DeepSpeed's ZeRO stage is {self.stage}; set stage to 1, 2 or 3, or use strategy ddp.")
        if self.trainer.precision.startswith("16"):
            raise ValueError(
                f"trainer.precision is {self.trainer.precision!r} under DeepSpeed, whose loss scaling differs from "
                "Lightning's; use 'bf16-mixed', which needs none."
            )
        for name, instead in _DECIDED_BY_MODULE.items():
            if strategy.config.get(name):
                raise ValueError(
                    f"config of DeepSpeed has {name}={strategy.config[name]!r}; leave it out and {instead}."
                )
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
        frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
        if not any(name in kept for name in frozen):
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
        if optimizer.micro_step_id == (0 if self.stage == 3 else -1):  # the step's first micro-batch
            self._forget_gradients()
        yield

    def backward(self, loss: Tensor) -> None:
        """Run backward for one of several micro-batches; adds to the gradients of this rank's shards."""
        from deepspeed.runtime.utils import register_output_backward_hooks

        # The engine does this itself for the loss its forward returns, that of the last micro-batch.
        register_output_backward_hooks(loss, preprocess_once_fn=self.engine._backward_prologue)
        super().backward(loss)

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """This rank's shards of the gradients that the next step uses; may be changed in place."""
        groups = [index for index in self._groups(parameters) if index not in self._steps.dropped]
        return [shard for index in groups for shard in self._gradients(index)]

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
        self._steps.drop(self._groups(parameters))

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
    def _steps(self) -> _GroupSteps:
        """The replacement for the optimizer's step of one group, installed on first use."""
        optimizer = self.engine.optimizer
        if not isinstance(optimizer._optimizer_step, _GroupSteps):
            optimizer._optimizer_step = _GroupSteps(self.engine, optimizer._optimizer_step)
        return optimizer._optimizer_step

    def _groups(self, parameters: Sequence[nn.Parameter]) -> list[int]:
        """Indices of the optimizer's groups (under ZeRO-3, sub-groups) that consist of the given parameters.

        Raises:
            ValueError: If the parameters do not form whole groups.
        """
        optimizer = self.engine.optimizer
        groups = optimizer.fp16_groups if self.stage == 3 else optimizer.bit16_groups
        wanted = {id(parameter) for parameter in parameters if parameter.requires_grad}
        indices = [index for index, group in enumerate(groups) if group and all(id(p) in wanted for p in group)]
        found = sum(len(groups[index]) for index in indices)
        if found != len(wanted):
            raise ValueError(
                f"{len(wanted)} parameters do not form whole parameter groups of the optimizer ({found} of them do), "
                "and DeepSpeed stores gradients by group; give a part that is trained separately its own group."
            )
        return indices

    def _gradients(self, index: int) -> list[Tensor]:
        """This rank's shards of a group's gradients."""
        optimizer = self.engine.optimizer
        if self.stage == 3 and optimizer.offload_optimizer:
            return [optimizer.fp32_partitioned_groups_flat[index].grad]
        if self.stage < 3 and optimizer.cpu_offload:
            return [optimizer.single_partition_of_fp32_groups[index].grad]
        return list(optimizer.averaged_gradients[index])

    def _forget_gradients(self) -> None:
        """Zero accumulated gradients; those of a parameter without a gradient in the first micro-batch would remain."""
        optimizer = self.engine.optimizer
        if self.stage == 3:
            optimizer.grad_partitions_flat_buffer.zero_()
        elif optimizer.cpu_offload:
            for accumulated in optimizer.accumulated_grads_in_cpu.values():
                accumulated.zero_()


def _init_engine(strategy: Any) -> None:
    """`init_deepspeed` of a strategy, without the warning that modules which clip by themselves do not clip.

    The hooks of the engine of the module's earlier run, if any, are removed.
    """
    module = strategy.lightning_module
    if "_deepspeed_engine" in vars(module):
        vars(module)["_deepspeed_engine"].destroy()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Since DeepSpeed handles gradient clipping internally")
        type(strategy).init_deepspeed(strategy)
    vars(module)["_deepspeed_engine"] = strategy.model  # not as a child
    if not module.trainer.training and strategy.zero_stage_3:  # DeepSpeed calls it after any load
        strategy.model.optimizer._restore_from_bit16_weights = lambda: None


def _load_weights(strategy: Any, checkpoint: Any, strict: bool = True) -> None:
    """`load_model_state_dict` of a strategy; in evaluation under ZeRO-3, from a folder's shards of the optimizer.

    They alone have the weights there, and DeepSpeed loads them only into an optimizer.
    """
    trainer = strategy.lightning_module.trainer
    if trainer.state.fn == TrainerFn.FITTING or not strategy.zero_stage_3 or strategy.load_full_weights:
        type(strategy).load_model_state_dict(strategy, checkpoint, strict)
        return
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    whole = get_fp32_state_dict_from_zero_checkpoint(trainer.ckpt_path) if strategy.is_global_zero else {}
    strategy._restore_zero_state({"state_dict": whole}, strict)


class _GroupSteps:
    """Replaces the method of ZeRO's optimizer that steps one group, to skip some groups.

    Zero gradients are not enough: momentum would still move the weights.
    """

    def __init__(self, engine: Any, step: Any) -> None:
        self._engine, self._step = engine, step
        self._dropped: set[int] = set()
        self._at = -1

    @property
    def dropped(self) -> set[int]:
        """Groups that the next step skips."""
        return self._dropped if self._at == self._engine.micro_steps else set()

    def drop(self, groups: Sequence[int]) -> None:
        """Skip groups in the next step."""
        self._dropped = self.dropped | set(groups)
        self._at = self._engine.micro_steps

    def __call__(self, index: int) -> None:
        if index not in self.dropped:
            self._step(index)


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
