"""Runs a group larger than a micro-batch in parts: the prompt once, then slices of rollouts that continue it.

One forward of the prompt records tensors in every layer (`attention.prefix_states`). They are detached from their
graph, so each slice of rollouts runs its own backward and adds to their gradients. A final backward propagates the
sum through the prompt. Tokens that several rollouts share after the prompt may run as a branch, which is to its slices
what the prompt is to the others. The gradients equal those of the whole group in one call, with the memory of one path
and one slice.

Legend: P tokens of the path (the prompt and the branches down to this one), K response tokens of the path, S tokens of
a slice, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pl_grouprl.attention import find_backbone, find_decoder
from pl_grouprl.attention.prefix_states import PrefixStates
from pl_grouprl.attention.recorded import Leaf, Name, Prefilled, States
from pl_grouprl.attention.support import has_dynamic_rope
from pl_grouprl.media.inputs import check_batch_media
from pl_grouprl.media.positions import media_position_ids
from pl_grouprl.models.adapter_layers import adapter_layers
from pl_grouprl.models.score import run_decoder
from pl_grouprl.packing import ScoringBatch, pack
from pl_grouprl.packing.slices import pack_branch
from pl_grouprl.types import Rollout, RolloutGroup, is_per_token

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HIDDEN: Name = ("hidden",)


class PrefixPass:
    """One pass over a group's prompt, or over a branch after it, in each model that scores the slices below.

    Valid for one set of weights: create a new one after an optimizer step.

    Args:
        group: The group; its rollouts are not read.
        device: Device of the models.
        sequence_group: The ranks that run the prompt and each slice together; see `ScoringBatch`. Each then holds the
            states of its own heads.

    Attributes:
        num_tokens: P.
        batch: The prompt or the branch, without the path above it.
    """

    def __init__(self, group: RolloutGroup, device: torch.device | str, sequence_group: Any = None) -> None:
        self.num_tokens = len(group.prompt_ids)
        prompt = pack([replace(group, rollouts=[Rollout([])])], device=device)
        self.batch = replace(prompt, sequence_group=sequence_group)
        self._above: PrefixPass | None = None
        self._branch_ids: list[int] = []
        self._done: dict[tuple[Any, ...], Prefix] = {}
        self._counted = False

    def branch(self, token_ids: Sequence[int]) -> PrefixPass:
        """Create the pass over response tokens that some of the rollouts share after this one.

        Its `loss` must run backward before this pass's.

        Raises:
            NotImplementedError: If the prompt has images or videos.
        """
        if self.batch.media:
            raise NotImplementedError("a branch cannot run by itself after a prompt with images or videos.")
        below = copy(self)
        below.num_tokens, below._branch_ids = self.num_tokens + len(token_ids), list(token_ids)
        below.batch = pack_branch(token_ids, self, self.batch.targets_N.device)
        below._above, below._done, below._counted = self, {}, False
        return below

    @property
    def path_ids(self) -> list[int]:
        """The K response tokens of the path. A rollout below begins with them, or is a prefix of them."""
        parts, at = [], self
        while at._above is not None:
            parts.append(at._branch_ids)
            at = at._above
        return [token for part in reversed(parts) for token in part]

    def count_once(self) -> int:
        """Number of the path's tokens that no earlier call has counted, here or above, for sums over slices."""
        counted, at = self.num_tokens, self
        while not at._counted:  # once a pass is counted, all above it are
            at._counted = True
            if at._above is None:
                return counted
            at = at._above
        return counted - at.num_tokens

    def states(self, model: PreTrainedModel) -> Prefix:
        """Return the states of the path in a model. The first call runs it, with gradient if enabled.

        States with and without gradient, and with and without adapters, are cached separately.

        Args:
            model: A model in a `shared_prefix` context.

        Raises:
            NotImplementedError: If the model cannot run a group in slices.
            ValueError: If the prompt's images and videos do not fit the model.
        """
        switched_off = any(layer.disable_adapters for layer in adapter_layers(model))
        key = (find_backbone(model), torch.is_grad_enabled(), switched_off)
        missing: list[PrefixPass] = []
        at: PrefixPass | None = self
        while at is not None and key not in at._done:
            missing.append(at)
            at = at._above
        found = None if at is None else at._done[key]
        for one in reversed(missing):
            found = one._done[key] = Prefix(model, one.batch, found)
        assert found is not None
        return found

    def hidden_states(self, model: PreTrainedModel, batch: ScoringBatch) -> Tensor:
        """Run a slice; return the states of the prompt's last token, the path and the slice, shape [1 + K + S, D]."""
        prefix = self.states(model)
        states = PrefixStates(prefix.path, record=False, recomputes=_recomputes(model))
        return prefix.followed_by(run_decoder(model, batch, **self._media(model, batch), prefix_states=states))

    def _media(self, model: PreTrainedModel, batch: ScoringBatch) -> dict[str, Tensor]:
        """Extra arguments of a slice after images or videos: its position ids, and token types that say text."""
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
        """A zero whose backward propagates the gradients that slices left, through every model that ran this pass.

        Call it once, after the backward of all slices; it drops the states. A model in which no slice ran backward gets
        zero gradients, so that collectives of sharded weights match across ranks.

        Args:
            parameters: Parameters that must have a gradient; it is zero if they get no other.
            loss_scale: The gradient scaler's factor, which the slices' gradients already include; set it if the scaler
                will also multiply this loss.

        Returns:
            A differentiable scalar, even if no model ran this pass with gradient.
        """
        done, self._done = self._done, {}
        zeros = [prefix.loss(loss_scale) for prefix in done.values() if prefix.needs_backward]
        zeros += [0 * parameter.flatten()[:1].sum() for parameter in parameters]
        zeros.append(torch.zeros((), device=self.batch.targets_N.device, requires_grad=True))
        return torch.stack([zero.to(torch.float32) for zero in zeros]).sum()


class Prefix:
    """The states of a path in one model.

    Attributes:
        path: What slices read: the states of the prompt, then of each branch. With the states in each layer are the
            hidden states that predict the tokens of the path after the prompt, and those that follow it: of the
            prompt's last token, then of each branch; together [1 + K, D].
    """

    def __init__(self, model: PreTrainedModel, batch: ScoringBatch, above: Prefix | None = None) -> None:
        if has_dynamic_rope(find_decoder(model)):
            raise NotImplementedError(
                f"{type(model).__name__} has rotary frequencies that depend on the longest sequence of a call, so a "
                "group in slices would differ from one in a single call; use a larger token budget."
            )
        path = () if above is None else above.path
        recorder = PrefixStates(path, record=True, recomputes=_recomputes(model))
        hidden = run_decoder(model, batch, prefix_states=recorder)
        own = {_HIDDEN: Leaf(hidden[-1:] if above is None else hidden)}
        self._backbone = find_backbone(model)
        self.path: tuple[States, ...] = (*path, {self._backbone: own, **recorder.pop_all()})
        self._leaves = [
            leaf for leaves in self.path[-1].values() for leaf in leaves.values() if leaf.recorded.requires_grad
        ]

    @property
    def needs_backward(self) -> bool:
        """Whether any of its own states depends on a trained parameter."""
        return bool(self._leaves)

    def followed_by(self, hidden: Tensor) -> Tensor:
        """The hidden states of the path, then those of a slice, shape [1 + K + S, D]."""
        return Prefilled(self.path, self._backbone, _HIDDEN).join(hidden)

    def loss(self, loss_scale: float) -> Tensor:
        """A zero whose backward propagates the collected gradients."""
        # Always include the first, the last layer's output, so that every layer runs backward with its collectives.
        used = [leaf for number, leaf in enumerate(self._leaves) if leaf.gradient is not None or number == 0]
        return _Propagate.apply([leaf.gradient for leaf in used], loss_scale, *[leaf.recorded for leaf in used])


def _recomputes(model: PreTrainedModel) -> bool:
    """Whether activation checkpointing runs layers again in the backward pass."""
    return bool(getattr(model, "is_gradient_checkpointing", False)) and model.training


class _Propagate(torch.autograd.Function):
    """A zero with prescribed gradients. A sum of products would have the same ones, but a meaningless value."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor | None], loss_scale: float, *recorded: Tensor) -> Tensor:
        ctx.gradients, ctx.loss_scale = gradients, loss_scale
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in recorded]
        return torch.zeros((), device=recorded[0].device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        factor = grads[0] / ctx.loss_scale
        scaled = [
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None else (gradient * factor).to(dtype)
            for gradient, (shape, dtype, device) in zip(ctx.gradients, ctx.like, strict=True)
        ]
        return None, None, *scaled
