"""What the modules ask of a strategy; here the answers of a single device and of DDP, where every rank holds all."""

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
    """Reaches weights and gradients under one strategy. Subclasses serve those that shard.

    Args:
        trainer: The run's Trainer; None for a module that is used without one.

    Attributes:
        shards: Whether a rank holds only a part of the weights between forward and backward passes.
        keeps_plain_weights: Whether every rank holds all weights as ordinary tensors at any time, so that another
            thread may copy them.
    """

    shards: bool = False
    keeps_plain_weights: bool = True

    def __init__(self, trainer: Trainer | None) -> None:
        self._trainer = trainer

    @property
    def trainer(self) -> Trainer:
        """The run's Trainer."""
        if self._trainer is None:
            raise RuntimeError("the module is not attached to a Trainer; call this inside of a run.")
        return self._trainer

    def serves(self, trainer: Trainer | None) -> bool:
        """Whether this was made for that Trainer."""
        return self._trainer is trainer

    def check(self, module: LightningModule) -> None:
        """Refuse at setup what cannot be honoured under this strategy.

        Raises:
            ValueError: With the option, its value and what to do.
        """

    def shard(self, module: LightningModule) -> None:
        """Shard the models of a module where the strategy leaves that to `configure_model`. Here nothing."""

    @contextlib.contextmanager
    def whole_weights(self, *models: nn.Module) -> Iterator[None]:
        """Make each rank's weights whole for as long as it samples; ranks need not run the same calls meanwhile.

        All ranks enter and leave it together.
        """
        yield

    def call(self, module: LightningModule, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the module the way the strategy runs `training_step`, so that wrappers see the forward.

        All ranks call it, and run the same forward passes in it.
        """
        return getattr(module, method)(*args, **kwargs)

    def forward_context(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which the run's precision wants forward passes, such as autocast; none without a Trainer."""
        return contextlib.nullcontext() if self._trainer is None else self._trainer.precision_plugin.forward_context()

    def backward(self, loss: Tensor) -> None:
        """Differentiate one pass of several inside `training_step`, adding to the gradients; nothing is reduced."""
        if self._trainer is None:
            loss.backward()
        else:
            self._trainer.strategy.backward(loss, None)

    @contextlib.contextmanager
    def accumulating(self, module: LightningModule, *, last: bool) -> Iterator[None]:
        """Surround a pass, its forward and its backward: gradients are reduced over ranks in the last one only.

        The backward of the last pass is Lightning's, behind this context: what was set for it stays.
        """
        yield

    def touch(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Zero, as a function of every trained parameter: a reducer that waits for all gradients gets them."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        return torch.stack([parameter.flatten()[:1].sum() * 0 for parameter in trained]).sum()

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """This rank's gradients, or its shards of them, of those parameters that have one; to be changed in place."""
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def weights(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """This rank's weights, or its shards of them; call between steps."""
        return [local_shard(parameter) for parameter in parameters]

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Norm of the gradients, over all ranks' shards of them, a scalar. All ranks call it."""
        return torch.nn.utils.get_total_norm(self.gradients(parameters))

    def scale(self, parameters: Sequence[nn.Parameter], factor: float | Tensor) -> None:
        """Multiply gradients in place."""
        gradients = self.gradients(parameters)
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def clamp(self, parameters: Sequence[nn.Parameter], limit: float) -> None:
        """Clip each entry of the gradients to [-limit, limit], in place."""
        for gradient in self.gradients(parameters):
            gradient.clamp_(-limit, limit)

    def drop(self, parameters: Sequence[nn.Parameter]) -> None:
        """Leave parameters out of the coming optimizer step: AdamW passes over what has no gradient."""
        for parameter in parameters:
            parameter.grad = None

    def named_weights(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Each parameter and persistent buffer of a model, whole, one after another, without a second copy of all.

        All ranks iterate together, to the end or to the same weight, outside of passes and of `whole_weights`. What
        is left midway lets go of what was gathered as soon as the iterator is closed or nobody has it any more.

        Args:
            model: A transformers model, with or without adapters.

        Yields:
            Name and value. Parameters come in the order and by the names of `model.named_parameters()` of a model
            without wrappers, so tied ones once, by their first name; buffers behind the parameters of their module.
            Values are detached and on the rank's own device. They stay readable if kept, but may be live storage,
            which the next optimizer step changes.
        """
        for weight in weights_of(model):
            yield weight.name, weight.get()

    def full_state_dict(self, model: nn.Module) -> dict[str, Tensor] | None:
        """A model's whole state on rank 0, on the CPU where it was sharded; None on the others. All ranks call it."""
        first = self.trainer.is_global_zero
        if not self.shards:
            return dict(model.state_dict()) if first else None
        state: dict[str, Tensor] = {}
        for name, weight in self.named_weights(model):
            if first:
                state[name] = weight.to("cpu", copy=True)
        return {name: state[place.name] for name, place in named_places(model).items()} if first else None
