"""What a forward pass of a few tokens says of a model: how wide its states are, what they see, what its head reads.

Configs do not say it reliably: a family may project its last states, pool them, or look ahead.

Legend: L tokens of a probe, D hidden size, C labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pl_grouprl.attention import find_decoder, sharing_paused

_LENGTH = 4
_ROUNDINGS = 4
"""How many roundings of the model's dtype a result may always be off."""
_STATE_TOLERANCE = 1e-5
"""States before the last token: rounding comes from a mixture of experts alone; untrained BERT differs by 5e-3."""
_SCORE_TOLERANCE = 1e-3
"""Scores, as the head runs on other shapes, on a GPU perhaps in TF32; untrained encoders differ by more than 1e-2."""


def hidden_size(decoder: Any) -> int:
    """Width of the states that a decoder returns. Its config's `hidden_size` is that of its layers, which may differ.

    Args:
        decoder: A transformers decoder without a language model head, in any mode, patched or not.
    """
    with _undisturbed(decoder):
        return _states(decoder, _probe_rows(decoder)[0]).shape[-1]


def check_causal(decoder: Any, owner: str) -> None:
    """Refuse a model whose state at a token depends on the tokens behind it.

    Two sequences that differ in their last token alone must have the same states before it.

    Args:
        decoder: A transformers model without a head.
        owner: Whose option the model is, for the error.

    Raises:
        ValueError: If the states differ by more than rounding.
    """
    first, second = _probe_rows(decoder)
    with _undisturbed(decoder):
        one, other = (_states(decoder, row)[:-1] for row in (first, second))
    error = (one - other).abs().max() / _not_zero(one.abs().max())
    if not error <= max(_STATE_TOLERANCE, _rounding(decoder)):
        raise ValueError(
            f"{owner}: {type(decoder).__name__} is not causal: two sequences that differ in their last token alone "
            f"have states before it that differ by {error.item():.1e} of the largest; use a decoder, such as Qwen2."
        )


def check_score_head(model: Any, head: nn.Linear, owner: str) -> None:
    """Refuse a classifier whose scores are not its head applied to the state at the last token.

    Encoders score otherwise: they read the first token, or put a pooler before the head.

    Args:
        model: A `...ForSequenceClassification`.
        head: Its linear layer; see `models.sequence_classifier.score_head`.
        owner: Whose option the model is, for the error.

    Raises:
        ValueError: If the scores differ by more than rounding.
    """
    decoder = find_decoder(model)
    for row in _probe_rows(model):
        with _undisturbed(model):
            expected_C = model(input_ids=row).logits[0].float()
            states_LD = _states(decoder, row)
            read_C = head(states_LD[-1].to(head.weight.dtype)).float()
        # Relative to the largest possible product: a score itself may be near zero.
        scale = (head.weight.float().norm(dim=1) * states_LD[-1].norm()).max()
        error = (expected_C - read_C).abs().max() / _not_zero(scale)
        if not error <= max(_SCORE_TOLERANCE, _rounding(model)):
            raise ValueError(
                f"{owner}: {type(model).__name__} scores the tokens {row[0].tolist()} with {_rounded(expected_C)}, and "
                f"its head gives {_rounded(read_C)} at the last of them: it reads its score elsewhere, or through "
                "further layers, as encoders do. Use a decoder's ForSequenceClassification, such as "
                "Qwen2ForSequenceClassification; a reward function of your own can call any other model."
            )


def _probe_rows(model: Any) -> tuple[Tensor, Tensor]:
    """Two sequences [1, L] that differ in their last token; without the padding token, which classifiers read over."""
    embeddings = model.get_input_embeddings()
    pad = model.config.get_text_config().pad_token_id
    known = [token for token in range(min(embeddings.num_embeddings, _LENGTH + 2)) if token != pad]
    first = [known[index % len(known)] for index in range(_LENGTH)]
    second = [*first[:-1], known[_LENGTH % len(known)]]
    return tuple(torch.tensor([row], device=embeddings.weight.device) for row in (first, second))  # type: ignore[return-value]


def _states(decoder: Any, row: Tensor) -> Tensor:
    """States of one sequence, shape [L, D], float32 or wider."""
    states = decoder(input_ids=row, use_cache=False, return_dict=True).last_hidden_state[0]
    return states.to(torch.promote_types(states.dtype, torch.float32))


@contextmanager
def _undisturbed(model: Any) -> Iterator[None]:
    """Run a model as it is in evaluation: no dropout, gradient, autocast or sharing; then all is as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), sharing_paused(model), torch.autocast(model.device.type, enabled=False):
            yield
    finally:
        for module in training:
            module.training = True


def _rounding(model: Any) -> float:
    return _ROUNDINGS * torch.finfo(model.dtype).eps


def _not_zero(scale: Tensor) -> Tensor:
    return scale.clamp(min=torch.finfo(scale.dtype).tiny)


def _rounded(values_C: Tensor) -> list[float]:
    return [round(value, 4) for value in values_C.tolist()]
