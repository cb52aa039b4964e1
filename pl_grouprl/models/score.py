"""Score rollouts: log-probabilities and their kin of every response token, the prompt encoded once per group.

Legend: N response tokens of all rollouts one after another, D hidden size.
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
    """Run the decoder and return the hidden states of all its positions, rows one after another, shape [B * L, D].

    For a batch with shared prefixes, one row, that is [T, D]. The batch's indices (`predict_index_N`, `final_index_B`)
    point into it. Images and videos of the prompts are encoded in the same call.

    A slice of a group (`packing.slices`) runs its S tokens behind the prompt of `batch.prefix`, which is run now if it
    has not been: that gives [1 + S, D], the prompt's last position first.

    Args:
        model: A decoder, with or without a head, or a model of which one is a part.
        batch: What `packing.pack` made, on the model's device.

    Raises:
        RuntimeError: If the batch has shared prefixes and no `shared_prefix(model)` is in force: the model would ignore
            the layout.
        ValueError: If the model cannot place the batch's images and videos; see `media.inputs.check_batch_media`.
    """
    if batch.sharing == "shared" and in_force(model) is None:
        raise RuntimeError(
            f"batch has sharing='shared', but no shared_prefix context is in force for {type(model).__name__}, which "
            "would ignore the layout; score it inside `with shared_prefix(model):`, or pack with sharing='repeated'."
        )
    return run_decoder(model, batch) if batch.prefix is None else batch.prefix.hidden_states(model, batch)


def run_decoder(model: PreTrainedModel, batch: ScoringBatch, **more: Any) -> Tensor:
    """Run the decoder on the tokens of a batch, without a prompt that was run before; see `hidden_states`.

    Args:
        model: As there.
        batch: As there.
        more: Further keyword arguments of the decoder.
    """
    inputs = batch.model_inputs | more
    if batch.sequence_group is not None:
        if batch.sharing != "shared":
            raise ValueError(
                f"a batch with sharing={batch.sharing!r} is not run by several ranks together; pack it with "
                "sharing='shared', or use sequence_parallel_size=1."
            )
        inputs = inputs | {"sequence_group": batch.sequence_group}
    if batch.media:
        check_batch_media(model, batch)
        positions = media_position_ids(model, batch)
        inputs = inputs if positions is None else inputs | {"position_ids": positions}
    # In a context the rows of a repeated batch would be found to share their prompts.
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
    """Score the response tokens of a batch in one pass, without a tensor of all logits.

    Only the hidden states that predict response tokens reach the head. A head that is one matrix is taken by blocks of
    the vocabulary, any other `chunk_size` tokens at a time; see `token_scores`.

    Args:
        model: A causal language model. For a batch with shared prefixes `shared_prefix(model)` must be in force until
            the backward pass is done.
        batch: What `packing.pack` made, on the model's device.
        temperature: Divides the logits: that of the sampler.
        chunk_size: Tokens whose logits may exist at the same time.
        entropy: Also return the entropy of each distribution.
        entropy_grad: Let gradients flow through the entropy.
        score_norm: Also return the squared norm of the gradient of the log-probability by the logits.
        sketch: Also return this sketch of the gradient of the log-probability by the head's weights.
        states: What `hidden_states(model, batch)` returned, where the decoder has been run already.

    Returns:
        Tensors of shape [N], in the order of the batch's targets.
    """
    if states is None:
        states = hidden_states(model, batch)
    return token_scores(
        states.index_select(0, batch.predict_index_N),
        batch.targets_N,
        logits_function(model),
        temperature=temperature,
        chunk_size=chunk_size,
        entropy=entropy,
        entropy_grad=entropy_grad,
        score_norm=score_norm,
        sketch=sketch,
        weight_VD=plain_weight(model, states.dtype),
    )


def rollout_logprobs(
    model: PreTrainedModel,
    groups: Sequence[RolloutGroup],
    *,
    sharing: Sharing = "shared",
    temperature: float = 1.0,
    backend: str = "auto",
    chunk_size: int = 512,
) -> list[Tensor]:
    """Log-probability of every token of every rollout given its prompt and what came before.

    Args:
        model: A causal language model. Its mode (train or eval) is left alone.
        groups: Prompts with their rollouts, of any number and length.
        sharing: `shared` encodes each prompt once, `repeated` once per rollout in a padded batch.
        temperature: Divides the logits.
        backend: Attention backend for shared prefixes; see `shared_prefix`.
        chunk_size: Tokens whose logits may exist at the same time.

    Returns:
        One tensor of shape [tokens] per rollout, through the groups in the caller's order, in float32 (float64 for a
        float64 model); with gradient where it is enabled.

    Raises:
        UnsupportedModelError: If the model cannot share prefixes.
        RuntimeError: If activation checkpointing would run the forward again after the patch is gone.
    """
    get_backend(backend)  # an unknown name is an error either way
    batch = pack(groups, sharing, device=model.device)
    context = nullcontext() if sharing == "repeated" else _patched_for(model, backend)
    with context:
        logprobs_N = score(model, batch, temperature=temperature, chunk_size=chunk_size).logprobs_N
    return list(logprobs_N.split(batch.rollout_lengths))


def _patched_for(model: PreTrainedModel, backend: str) -> SharedPrefix:
    recomputes = getattr(model, "is_gradient_checkpointing", False) and model.training
    if recomputes and torch.is_grad_enabled() and in_force(model) is None:
        raise RuntimeError(
            "activation checkpointing runs the forward again in the backward pass, when this function's patch is gone; "
            "put forward and backward into `with shared_prefix(model):`."
        )
    return shared_prefix(model, backend)
