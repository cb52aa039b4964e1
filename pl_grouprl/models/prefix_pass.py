"""Runs the prompt of a group larger than a micro-batch once; its rollouts follow in slices.

One forward of the prompt records tensors in every layer (`attention.prefix_states`). They are detached from their
graph, so each slice of rollouts runs backward separately and adds to their gradients. A final backward pass propagates
the summed gradients through the prompt. The result equals the gradients of the whole group in one call, with the memory
of the prompt and one slice.

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
from pl_grouprl.attention.support import has_dynamic_rope
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

    Valid for one set of weights: create a new one after an optimizer step.

    Args:
        group: The group; its rollouts are not read.
        device: Device of the models.
        sequence_group: The ranks that run the prompt and each slice together; see `ScoringBatch`. Each then has the
            states of its heads.
    """

    def __init__(self, group: RolloutGroup, device: torch.device | str, sequence_group: Any = None) -> None:
        self.num_tokens = len(group.prompt_ids)
        prompt = pack([replace(group, rollouts=[Rollout([])])], device=device)
        self.batch = replace(prompt, sequence_group=sequence_group)
        self._done: dict[tuple[Any, ...], Prefix] = {}
        self._counted = False

    def count_once(self) -> int:
        """P at the first call, then 0, for totals over slices."""
        counted, self._counted = self._counted, True
        return 0 if counted else self.num_tokens

    def states(self, model: PreTrainedModel) -> Prefix:
        """The prompt's states in a model. Runs the prompt the first time, with gradient if enabled.

        The states with and without gradient, and with and without adapters, are separate.

        Args:
            model: A model in a `shared_prefix` context.

        Raises:
            NotImplementedError: If the model cannot run a group in slices.
            ValueError: If the prompt's images and videos do not fit the model.
        """
        switched_off = any(layer.disable_adapters for layer in adapter_layers(model))
        key = (find_backbone(model), torch.is_grad_enabled(), switched_off)
        if key not in self._done:
            self._done[key] = Prefix(model, self.batch)
        return self._done[key]

    def hidden_states(self, model: PreTrainedModel, batch: ScoringBatch) -> Tensor:
        """Run a slice; return the hidden states of the prompt's last token and of the slice, shape [1 + S, D]."""
        prefix = self.states(model)
        hidden = run_decoder(model, batch, **self._media(model, batch), prefix_states=prefix.layer_states)
        return torch.cat([prefix.last_hidden, hidden])

    def _media(self, model: PreTrainedModel, batch: ScoringBatch) -> dict[str, Tensor]:
        """Arguments of a slice whose prompt has images or videos: positions after them, and token types of text."""
        if not self.batch.media:
            return {}
        with_media = replace(
            self.batch, layout=batch.layout, targets_N=batch.targets_N, rollout_index_N=batch.rollout_index_N
        )
        check_batch_media(model, with_media)
        tokens = batch.model_inputs["input_ids"]
        inputs = {name: torch.zeros_like(tokens) for name in self.batch.media if is_per_token(name)}
        positions = media_position_ids(model, with_media)
        return inputs if positions is None else inputs | {"position_ids": positions[..., self.num_tokens :]}

    def loss(self, parameters: Iterable[nn.Parameter] = (), *, loss_scale: float = 1.0) -> Tensor:
        """A zero whose backward pass propagates the collected gradients through the prompt, in all models that ran it.

        Call it once, after the backward of all slices; it drops the prompt's states. A model none of whose slices ran
        backward gets zero gradients, so collectives of sharded weights match.

        Args:
            parameters: Parameters that must get a gradient, zero if there is no other.
            loss_scale: A gradient scaler's factor on the slices' losses, if it will also multiply this one.

        Returns:
            A differentiable scalar, even if no run of the prompt had a gradient.
        """
        done, self._done = self._done, {}
        zeros = [prefix.loss(loss_scale) for prefix in done.values() if prefix.needs_backward]
        zeros += [0 * parameter.flatten()[:1].sum() for parameter in parameters]
        zeros.append(torch.zeros((), device=self.batch.targets_N.device, requires_grad=True))
        return torch.stack([zero.to(torch.float32) for zero in zeros]).sum()


class Prefix:
    """The prompt's states in one model.

    Attributes:
        layer_states: The states that slices read in each layer.
        last_hidden: Hidden state of the prompt's last token, shape [1, D]; it predicts each rollout's first token.
    """

    def __init__(self, model: PreTrainedModel, batch: ScoringBatch) -> None:
        if has_dynamic_rope(find_decoder(model)):
            raise NotImplementedError(
                f"{type(model).__name__} has rotary frequencies that depend on the longest sequence of a call, so a "
                "group in slices would differ from one in a single call; use a larger token budget."
            )
        recorder = PrefixStates()
        hidden = run_decoder(model, batch, prefix_states=recorder)
        self._leaves: list[Leaf] = []
        self.last_hidden = self._detach(hidden[-1:])
        recorded: dict[tuple[nn.Module, Name], Tensor] = recorder.pop_all()
        self.layer_states = PrefixStates({key: self._detach(tensor) for key, tensor in recorded.items()})

    @property
    def needs_backward(self) -> bool:
        """Whether any of the prompt's states depends on a trained parameter."""
        return bool(self._leaves)

    def loss(self, loss_scale: float) -> Tensor:
        """A zero whose backward pass propagates the collected gradients."""
        # A gradient always reaches the last layer, so every layer's collectives run.
        used = [leaf for number, leaf in enumerate(self._leaves) if leaf.gradient is not None or number == 0]
        return _Propagate.apply([leaf.gradient for leaf in used], loss_scale, *[leaf.recorded for leaf in used])

    def _detach(self, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        leaf = Leaf(tensor)
        self._leaves.append(leaf)
        return leaf.detach()


class Leaf:
    """A recorded tensor, and the sum of the gradients that reach its detached copies.

    Attributes:
        recorded: The tensor in its graph.
        gradient: The sum, in float32 or wider; None before the first.
    """

    def __init__(self, recorded: Tensor) -> None:
        self.recorded = recorded
        self.gradient: Tensor | None = None

    def detach(self) -> Tensor:
        """Return the values as a leaf whose gradients are added to the sum, not to `grad`."""
        leaf = self.recorded.detach().requires_grad_()
        leaf.register_post_accumulate_grad_hook(self._collect)
        return leaf

    def _collect(self, leaf: Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        self.gradient = wide if self.gradient is None else self.gradient.add_(wide)


class _Propagate(torch.autograd.Function):
    """Zero with given gradients. A sum of products would have the same gradients, but a meaningless value."""

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
