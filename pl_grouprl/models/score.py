"""Scores rollouts: log-probabilities and related quantities per response token, encoding each prompt once.

Legend: N response tokens of all rollouts, concatenated, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pl_grouprl.attention import SharedPrefix, find_backbone, in_force, shared_prefix, sharing_paused
from pl_grouprl.attention.backends.choice import get_backend
from pl_grouprl.functional.head_sketch import HeadSketch
from pl_grouprl.functional.logprobs import TokenScores, token_scores
from pl_grouprl.media.inputs import check_batch_media
from pl_grouprl.media.positions import media_position_ids
from pl_grouprl.models.head import logits_function, plain_weight
from pl_grouprl.packing import ScoringBatch, Sharing, pack
from pl_grouprl.types import RolloutGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def hidden_states(model: PreTrainedModel, batch: ScoringBatch) -> Tensor:
    """Run the decoder and return the hidden states of all positions, rows concatenated, shape [B * L, D].

    A batch with shared prefixes is one row, so [T, D]. The batch's indices (`predict_index_N`, `final_index_B`) point
    into the result. Images and videos of the prompts are encoded in the same call.

    A slice of a group (`packing.slices`) continues the path of `batch.prefix`, running it first if needed, and gives
    [1 + K + S, D]: the prompt's last position, the K response tokens of the path, then the S tokens of the slice.

    Args:
        model: A decoder, with or without a head, or a model that contains one.
        batch: Result of `packing.pack`, on the model's device.

    Raises:
        RuntimeError: If the batch has shared prefixes and no `shared_prefix(model)` is active: the model would ignore
            the layout.
        ValueError: If the batch's images and videos do not fit the model; see `media.inputs.check_batch_media`.
    """
    if batch.sharing == "shared" and in_force(model) is None:
        raise RuntimeError(
            f"batch has sharing='shared', but no shared_prefix context is active for {type(model).__name__}, which "
            "would ignore the layout; score it inside `with shared_prefix(model):`, or pack with sharing='repeated'."
        )
    return run_decoder(model, batch) if batch.prefix is None else batch.prefix.hidden_states(model, batch)


def run_decoder(model: PreTrainedModel, batch: ScoringBatch, **more: Any) -> Tensor:
    """Run the decoder on the tokens of a batch, ignoring `batch.prefix`; see `hidden_states`.

    Args:
        model: As in `hidden_states`.
        batch: As in `hidden_states`.
        more: Further keyword arguments of the decoder.
    """
    inputs = batch.model_inputs | more
    if batch.sequence_group is not None:
        if batch.sharing != "shared":
            raise ValueError(
                f"several ranks cannot run a batch with sharing={batch.sharing!r} together; pack it with "
                "sharing='shared', or use sequence_parallel_size=1."
            )
        inputs = inputs | {"sequence_group": batch.sequence_group}
    if batch.media:
        check_batch_media(model, batch)
        positions = media_position_ids(model, batch)
        inputs = inputs if positions is None else inputs | {"position_ids": positions}
    # Otherwise an active context would detect that the rows of a repeated batch share their prompts.
    with sharing_paused(model):
        hidden = find_backbone(model)(**inputs, use_cache=False, return_dict=True).last_hidden_state
    return hidden.flatten(0, 1)


def score(
    model: PreTrainedModel,
    batch: ScoringBatch,
    *,
    temperature: float = 1.0,
    chunk_size: int = 512,
    entropy: bool = False,
    entropy_grad: bool = False,
    score_norm: bool = False,
    sketch: HeadSketch | None = None,
    states: Tensor | None = None,
) -> TokenScores:
    """Score the response tokens of a batch in one pass, without materializing all logits.

    The head runs only on hidden states that predict response tokens: in blocks of the vocabulary if it is a plain
    matrix, otherwise in chunks of `chunk_size` tokens; see `token_scores`.

    Args:
        model: A causal language model. A batch with shared prefixes needs `shared_prefix(model)` to be active until
            the backward pass is done.
        batch: Result of `packing.pack`, on the model's device.
        temperature: Divides the logits; use the sampler's.
        chunk_size: Maximum number of tokens with logits in memory at a time.
        entropy: Also return the entropy of each distribution.
        entropy_grad: Let gradients flow through the entropy.
        score_norm: Also return the squared norm of the log-probability's gradient with respect to the logits.
        sketch: Also return this sketch of the log-probability's gradient with respect to the head's weights.
        states: Result of `hidden_states(model, batch)`, if the decoder has already run.

    Returns:
        Tensors of shape [N], in the order of the batch's targets.
    """
    if states is None:
        states = hidden_states(model, batch)
    predict_M, targets_M = batch.predict_index_N, batch.targets_N
    if batch.shared_tokens is not None:  # what rollouts have in common meets the head once, too
        predict_M, targets_M = predict_M[batch.shared_tokens.distinct_M], targets_M[batch.shared_tokens.distinct_M]
    scores = token_scores(
        states.index_select(0, predict_M),
        targets_M,
        logits_function(model),
        temperature=temperature,
        chunk_size=chunk_size,
        entropy=entropy,
        entropy_grad=entropy_grad,
        score_norm=score_norm,
        sketch=sketch,
        weight_VD=plain_weight(model, states.dtype),
    )
    return scores if batch.shared_tokens is None else scores.select(batch.shared_tokens.index_N)


def rollout_logprobs(
    model: PreTrainedModel,
    groups: Sequence[RolloutGroup],
    *,
    sharing: Sharing = "shared",
    temperature: float = 1.0,
    backend: str = "auto",
    chunk_size: int = 512,
) -> list[Tensor]:
    """Log-probability of every token of every rollout, given its prompt and earlier tokens.

    Args:
        model: A causal language model. Its mode (train or eval) does not change.
        groups: Prompts with their rollouts, of any number and length.
        sharing: `shared` encodes each prompt once, `repeated` once per rollout in a padded batch.
        temperature: Divides the logits.
        backend: Attention backend for shared prefixes; see `shared_prefix`.
        chunk_size: Maximum number of tokens with logits in memory at a time.

    Returns:
        One tensor of shape [tokens] per rollout, group by group in the caller's order, in float32 (float64 for a
        float64 model); with gradient if enabled.

    Raises:
        UnsupportedModelError: If the model cannot share prefixes.
        RuntimeError: If activation checkpointing would recompute the forward after the patch is removed.
    """
    least = get_backend(backend).min_saved_tokens  # fails early if unknown, even with repeated prefixes
    batch = pack(groups, sharing, min_saved_tokens=least, device=model.device)
    context = nullcontext() if sharing == "repeated" else _patched_for(model, backend)
    with context:
        logprobs_N = score(model, batch, temperature=temperature, chunk_size=chunk_size).logprobs_N
    return list(logprobs_N.split(batch.rollout_lengths))


def _patched_for(model: PreTrainedModel, backend: str) -> SharedPrefix:
    recomputes = getattr(model, "is_gradient_checkpointing", False) and model.training
    if recomputes and torch.is_grad_enabled() and in_force(model) is None:
        raise RuntimeError(
            "activation checkpointing runs the forward again in the backward pass, after this function removed its "
            "patch; put forward and backward into `with shared_prefix(model):`."
        )
    return shared_prefix(model, backend)
