"""Router logits of a mixture of experts, recorded while the policy scores a batch, and the loss that they give.

Legend: B rollouts, L longest row, T packed tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pl_grouprl.attention import find_decoder
from pl_grouprl.attention.routers import why_not_balanced
from pl_grouprl.functional.router_loss import load_balancing_loss
from pl_grouprl.packing import ScoringBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RouterLogits = list[Tensor]
"""Logits of each layer's router for all positions of one decoder call, shape [B * L, E] or [T, E] each."""


def check_balanced(model: PreTrainedModel, option: str) -> None:
    """Refuse a model that the load-balancing loss does not belong to.

    Args:
        model: A causal language model.
        option: The option that asks for the loss, with its value, for the message.

    Raises:
        ValueError: If the model is no mixture of experts, or one whose routers work in another way.
    """
    reason = why_not_balanced(find_decoder(model))
    if reason is not None:
        kind = getattr(model.config, "model_type", type(model).__name__)
        raise ValueError(f"{option} for a policy of model type {kind!r}: {reason}; leave the option at 0.")


@contextmanager
def record_router_logits(model: PreTrainedModel) -> Iterator[RouterLogits]:
    """Collect the router logits of the decoder's call inside the context.

    The decoder itself hands them out, once per call: what activation checkpointing runs again in the backward pass is
    not recorded again.

    Args:
        model: A model that `check_balanced` has accepted.

    Yields:
        A list that is filled when the decoder has run; it holds the logits of the latest call.
    """
    recorded: RouterLogits = []

    def ask(decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs | {"output_router_logits": True}

    def keep(decoder: Any, args: tuple[Any, ...], output: Any) -> None:
        # The head's calls pass through the decoder too, which stands aside then and has none.
        if output.get("router_logits") is not None:
            recorded[:] = output.router_logits

    decoder = find_decoder(model)
    handles = [decoder.register_forward_pre_hook(ask, with_kwargs=True), decoder.register_forward_hook(keep)]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def router_balancing_loss(model: PreTrainedModel, batch: ScoringBatch, recorded: RouterLogits) -> Tensor:
    """The load-balancing loss of one decoder call, the same number for shared and repeated prefixes.

    Every token counts as often as the repeated run encodes it: one of a prompt once for each rollout, padding never.

    Args:
        model: The model whose decoder ran.
        batch: What it ran on.
        recorded: What `record_router_logits` collected meanwhile.

    Returns:
        A scalar, with gradient where it is enabled.

    Raises:
        RuntimeError: If nothing was recorded, or no gradient would reach the routers.
    """
    if not recorded:
        raise RuntimeError("no router logits were recorded; score the batch inside record_router_logits(model).")
    if torch.is_grad_enabled() and not any(logits.requires_grad for logits in recorded):
        raise RuntimeError(
            "the recorded router logits carry no gradient, so the load-balancing loss would train nothing; use "
            "activation checkpointing with use_reentrant=False, and train weights at or below the routers."
        )
    return load_balancing_loss(recorded, experts_per_token(model), _copies_per_position(batch))


def experts_per_token(model: PreTrainedModel) -> int:
    """K, the number of experts that a token visits."""
    for owner in (model, find_decoder(model).config):
        count = getattr(owner, "num_experts_per_tok", None)
        if isinstance(count, int):
            return count
    raise ValueError(f"{type(model).__name__} does not say how many experts a token visits (num_experts_per_tok).")


def _copies_per_position(batch: ScoringBatch) -> Tensor:
    """How often the repeated run holds the token of each position of the decoder's call, shape [T] or [B * L]."""
    if batch.sharing == "repeated":
        return batch.model_inputs["attention_mask"].flatten()
    return batch.layout.multiplicity
