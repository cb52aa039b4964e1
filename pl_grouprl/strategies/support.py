"""What modules need from a strategy. The base class is for a single device and DDP: every rank has all weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pl_grouprl.strategies.weights import named_places, weights_of
from pl_grouprl.utilities.distributed import local_shard

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class StrategySupport:
    """Access to weights and gradients under a strategy; subclasses are for those that shard.

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
        """Refuse, at setup, options that this strategy cannot honour.

        Raises:
            ValueError: Names the option, its value and the remedy.
        """

    def shard(self, module: LightningModule) -> None:
        """Shard the models of a module if the strategy leaves that to `configure_model`. No-op here."""

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

        Nothing to do here: DDP reduces only in the backward pass after `training_step`. Others must not undo their
        settings on exit, because Lightning runs the last backward pass after it.
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
