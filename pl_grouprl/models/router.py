"""Records the router logits of a mixture of experts while the policy scores a batch, and computes their loss.

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
"""Router logits of each layer for all positions of one decoder call, shape [B * L, E] or [T, E] each."""


def check_balanced(model: PreTrainedModel, option: str) -> None:
    """Refuse a model that the load-balancing loss does not apply to.

    Args:
        model: A causal language model.
        option: The option that enables the loss, with its value, for the error.

    Raises:
        ValueError: If the model is not a mixture of experts, or its routers work differently.
    """
    reason = why_not_balanced(find_decoder(model))
    if reason is not None:
        kind = getattr(model.config, "model_type", type(model).__name__)
        raise ValueError(f"{option} for a policy of model type {kind!r}: {reason}; leave the option at 0.")


@contextmanager
def record_router_logits(model: PreTrainedModel) -> Iterator[RouterLogits]:
    """Collect the router logits of the decoder's call inside the context.

    The decoder returns them once per call; recomputation by activation checkpointing is not recorded.

    Args:
        model: A model accepted by `check_balanced`.

    Yields:
        A list, filled with the logits of the decoder's latest call.
    """
    recorded: RouterLogits = []

    def request(decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs | {"output_router_logits": True}

    def record(decoder: Any, args: tuple[Any, ...], output: Any) -> None:
        # When only the head runs, the decoder is bypassed and returns none.
        if output.get("router_logits") is not None:
            recorded[:] = output.router_logits

    decoder = find_decoder(model)
    handles = [decoder.register_forward_pre_hook(request, with_kwargs=True), decoder.register_forward_hook(record)]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def router_balancing_loss(model: PreTrainedModel, batch: ScoringBatch, recorded: RouterLogits) -> Tensor:
    """The load-balancing loss of one decoder call, the same for shared and repeated prefixes.

    Every token counts as often as with repeated prefixes: prompt tokens once per rollout, padding never.

    Args:
        model: The model whose decoder ran.
        batch: The batch that it ran on.
        recorded: The logits collected by `record_router_logits`.

    Returns:
        A scalar, with gradient if enabled.

    Raises:
        RuntimeError: If nothing was recorded, or no gradient would reach the routers.
    """
    if not recorded:
        raise RuntimeError("no router logits were recorded; score the batch inside record_router_logits(model).")
    if torch.is_grad_enabled() and not any(logits.requires_grad for logits in recorded):
        raise RuntimeError(
            "the recorded router logits have no gradient, so the load-balancing loss would train nothing; use "
            "activation checkpointing with use_reentrant=False, and train weights at or below the routers."
        )
    return load_balancing_loss(recorded, experts_per_token(model), _copies_per_position(batch))


def experts_per_token(model: PreTrainedModel) -> int:
    """The number of experts that a token visits."""
    for owner in (model, find_decoder(model).config):
        count = getattr(owner, "num_experts_per_tok", None)
        if isinstance(count, int):
            return count
    raise ValueError(f"{type(model).__name__} does not say how many experts a token visits (num_experts_per_tok).")


def _copies_per_position(batch: ScoringBatch) -> Tensor:
    """How often each position of the decoder's call occurs with repeated prefixes, shape [T] or [B * L]."""
    if batch.sharing == "repeated":
        return batch.model_inputs["attention_mask"].flatten()
    return batch.layout.multiplicity
