"""The prompt of a group that is larger than a micro-batch: run once, while its rollouts follow in slices.

One forward of the prompt leaves tensors in every layer (`attention.prefix_states`). They are cut from their graph, so
that each slice of rollouts is differentiated by itself and adds to their gradients. One backward pass through the
prompt, from the sum of these gradients, ends the step: the gradients are those of the whole group in one call, and the
memory is that of the prompt and one slice.

Legend: P tokens of the prompt, S tokens of a slice, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pl_grouprl.attention import find_backbone, find_decoder
from pl_grouprl.attention.prefix_states import Name, PrefixStates
from pl_grouprl.attention.support import frequencies_move
from pl_grouprl.media.inputs import check_batch_media
from pl_grouprl.media.positions import media_position_ids
from pl_grouprl.models.adapter_layers import adapter_layers
from pl_grouprl.models.score import run_decoder
from pl_grouprl.packing import ScoringBatch, pack
from pl_grouprl.types import Rollout, RolloutGroup, is_per_token

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PrefixPass:
    """The prompt of one group, run once by each model that scores the group's slices.

    It belongs to one set of weights: make a new one after an optimizer step.

    Args:
        group: The group; its rollouts are not read.
        device: Where the models are.
        sequence_group: The ranks that run the prompt and each slice together; see `ScoringBatch`. Each of them then
            has the states of its heads.
    """

    def __init__(self, group: RolloutGroup, device: torch.device | str, sequence_group: Any = None) -> None:
        self.num_tokens = len(group.prompt_ids)
        prompt = pack([replace(group, rollouts=[Rollout([])])], device=device)
        self.batch = replace(prompt, sequence_group=sequence_group)
        self._done: dict[tuple[Any, ...], Prefix] = {}
        self._counted = False

    def count_once(self) -> int:
        """Tokens of the prompt, P, at the first call, and 0 from then on: for sums over slices."""
        counted, self._counted = self._counted, True
        return 0 if counted else self.num_tokens

    def states(self, model: PreTrainedModel) -> Prefix:
        """What the prompt left in a model. The first time the prompt is run, with gradient where it is enabled.

        With gradient and without are two runs, and so are an adapter switched on and off.

        Args:
            model: A model in a `shared_prefix` context.

        Raises:
            NotImplementedError: If the model cannot run a group in slices.
            ValueError: If the model cannot place the prompt's images and videos.
        """
        switched_off = any(layer.disable_adapters for layer in adapter_layers(model))
        key = (find_backbone(model), torch.is_grad_enabled(), switched_off)
        if key not in self._done:
            self._done[key] = Prefix(model, self.batch)
        return self._done[key]

    def hidden_states(self, model: PreTrainedModel, batch: ScoringBatch) -> Tensor:
        """Run a slice; return the hidden states of the prompt's last token and of the slice, shape [1 + S, D]."""
        prefix = self.states(model)
        hidden = run_decoder(model, batch, **self._media(model, batch), prefix_states=prefix.given)
        return torch.cat([prefix.last_hidden, hidden])

    def _media(self, model: PreTrainedModel, batch: ScoringBatch) -> dict[str, Tensor]:
        """What a slice is passed because its prompt has images or videos: positions behind them, and types of text."""
        if not self.batch.media:
            return {}
        whole = replace(
            self.batch, layout=batch.layout, targets_N=batch.targets_N, rollout_index_N=batch.rollout_index_N
        )
        check_batch_media(model, whole)
        tokens = batch.model_inputs["input_ids"]
        inputs = {name: torch.zeros_like(tokens) for name in self.batch.media if is_per_token(name)}
        positions = media_position_ids(model, whole)
        return inputs if positions is None else inputs | {"position_ids": positions[..., self.num_tokens :]}

    def loss(self, parameters: Iterable[nn.Parameter] = (), *, loss_scale: float = 1.0) -> Tensor:
        """A zero whose backward pass takes the collected gradients through the prompt, in all models that ran it.

        To be called once, when all slices have been differentiated; what the prompt left is forgotten then. A model of
        which no slice was differentiated gets gradients of zero, so that collectives of sharded weights match.

        Args:
            parameters: Parameters that shall get a gradient in any case, zero if no other.
            loss_scale: Factor of the losses of the slices (of a gradient scaler), if this one is multiplied by it too.

        Returns:
            A scalar that can be differentiated, also where no run of the prompt had a gradient.
        """
        done, self._done = self._done, {}
        zeros = [prefix.loss(loss_scale) for prefix in done.values() if prefix.needs_backward]
        zeros += [0 * parameter.flatten()[:1].sum() for parameter in parameters]
        zeros.append(torch.zeros((), device=self.batch.targets_N.device, requires_grad=True))
        return torch.stack([zero.to(torch.float32) for zero in zeros]).sum()


class Prefix:
    """What the prompt left in one model.

    Attributes:
        given: What slices read in each layer.
        last_hidden: Hidden state of the prompt's last token, shape [1, D]; it predicts each rollout's first token.
    """

    def __init__(self, model: PreTrainedModel, batch: ScoringBatch) -> None:
        if frequencies_move(find_decoder(model)):
            raise NotImplementedError(
                f"{type(model).__name__} has rotary frequencies that depend on the longest sequence of a call, so that "
                "a group in slices would differ from one in one call; use a larger token budget."
            )
        recorder = PrefixStates()
        hidden = run_decoder(model, batch, prefix_states=recorder)
        self._leaves: list[Leaf] = []
        self.last_hidden = self._cut(hidden[-1:])
        recorded: dict[tuple[nn.Module, Name], Tensor] = recorder.take_out()
        self.given = PrefixStates({place: self._cut(tensor) for place, tensor in recorded.items()})

    @property
    def needs_backward(self) -> bool:
        """Whether anything that the prompt left depends on a trained parameter."""
        return bool(self._leaves)

    def loss(self, loss_scale: float) -> Tensor:
        """A zero that hands the collected gradients on."""
        # A gradient reaches the last layer in any case, and so every layer's own collectives.
        used = [leaf for number, leaf in enumerate(self._leaves) if leaf.gradient is not None or number == 0]
        return _HandOn.apply([leaf.gradient for leaf in used], loss_scale, *[leaf.recorded for leaf in used])

    def _cut(self, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        leaf = Leaf(tensor)
        self._leaves.append(leaf)
        return leaf.cut()


class Leaf:
    """A tensor that is cut from its graph, and the sum of the gradients that reach it there.

    Attributes:
        recorded: The tensor in its graph.
        gradient: The sum, in float32 or wider; None before the first.
    """

    def __init__(self, recorded: Tensor) -> None:
        self.recorded = recorded
        self.gradient: Tensor | None = None

    def cut(self) -> Tensor:
        """The same values as a leaf; what a backward pass would leave in its `grad` goes into the sum."""
        leaf = self.recorded.detach().requires_grad_()
        leaf.register_post_accumulate_grad_hook(self._collect)
        return leaf

    def _collect(self, leaf: Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        self.gradient = wide if self.gradient is None else self.gradient.add_(wide)


class _HandOn(torch.autograd.Function):
    """Zero, with given gradients; a sum of products would have the same, and a value without meaning."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor | None], loss_scale: float, *recorded: Tensor) -> Tensor:
        ctx.gradients, ctx.loss_scale = gradients, loss_scale
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in recorded]
        return torch.zeros((), device=recorded[0].device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        factor = grads[0] / ctx.loss_scale
        found = [
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None else (gradient * factor).to(dtype)
            for gradient, (shape, dtype, device) in zip(ctx.gradients, ctx.like, strict=True)
        ]
        return None, None, *found
