"""Finds facts about a model by running a few tokens: its hidden size, whether it is causal, what a score head reads.

Configs are not reliable for this: a model may project its last states, pool them, or look ahead.

Legend: L tokens of a probe, D hidden size, C labels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pl_grouprl.attention import find_decoder, sharing_paused
from pl_grouprl.utilities.modes import examining
from pl_grouprl.utilities.tolerances import compare, tolerance_of

_LENGTH = 4
"""Tokens of a probe."""


def hidden_size(decoder: Any) -> int:
    """Width of the states that a decoder returns, which may differ from the layers' `hidden_size` in the config.

    Args:
        decoder: A transformers decoder without a language model head, in any mode, patched or not.
    """
    with examining(decoder), sharing_paused(decoder):
        return _states(decoder, _probe_rows(decoder)[0]).shape[-1]


def check_causal(decoder: Any, owner: str) -> None:
    """Check that a model's state at a token does not depend on later tokens.

    Two sequences that differ only in their last token must have the same states before it.

    Args:
        decoder: A transformers model without a head.
        owner: The option that the model belongs to, for the error.

    Raises:
        ValueError: If the states differ by more than rounding.
    """
    with examining(decoder), sharing_paused(decoder):
        one, other = (_states(decoder, row)[:-1] for row in _probe_rows(decoder))
    error = compare(other, one).relative_largest
    if not error <= tolerance_of(decoder.dtype).causal:
        raise ValueError(
            f"{owner}: {type(decoder).__name__} is not causal: sequences that differ only in their last token have "
            f"states before it that differ by {error:.1e} of the largest; use a decoder, such as Qwen2."
        )


def check_score_head(model: Any, head: nn.Linear, owner: str, kind: str = "SequenceClassification") -> None:
    """Check that a classifier's scores are its head applied to the state at the (last) token.

    Encoders score differently: they read the first token, or have a pooler before the head.

    Args:
        model: A `...ForSequenceClassification` or `...ForTokenClassification`.
        head: Its linear layer; see `attention.support.score_head`.
        owner: The option that the model belongs to, for the error.
        kind: `SequenceClassification` or `TokenClassification`.

    Raises:
        ValueError: If the scores differ by more than rounding.
    """
    decoder = find_decoder(model)
    for row in _probe_rows(model):
        with examining(model), sharing_paused(model):
            logits = model(input_ids=row).logits.float()
            expected_C = logits.reshape(-1, logits.shape[-1])[-1]  # of the last token, if there are scores per token
            states_LD = _states(decoder, row)
            read_C = head(states_LD[-1].to(head.weight.dtype)).float()
        # Relative to the largest possible product, since a score may be near zero.
        scale = (head.weight.float().norm(dim=1) * states_LD[-1].norm()).max()
        error = compare(read_C, expected_C).largest / max(scale.item(), 1e-30)
        if not error <= tolerance_of(model.dtype).score:
            scores, read = ([round(value, 4) for value in values.tolist()] for values in (expected_C, read_C))
            raise ValueError(
                f"{owner}: {type(model).__name__} scores the tokens {row[0].tolist()} with {scores}, and its head "
                f"gives {read} at the last of them. Use a decoder's For{kind}, such as Qwen2For{kind}."
            )


def _probe_rows(model: Any) -> list[Tensor]:
    """Two sequences [1, L] that differ in their last token; without the padding token, which classifiers skip."""
    embeddings = model.get_input_embeddings()
    pad = model.config.get_text_config().pad_token_id
    known = [token for token in range(min(embeddings.num_embeddings, _LENGTH + 2)) if token != pad]
    first = [known[index % len(known)] for index in range(_LENGTH)]
    second = [*first[:-1], known[_LENGTH % len(known)]]
    return [torch.tensor([row], device=embeddings.weight.device) for row in (first, second)]


def _states(decoder: Any, row: Tensor) -> Tensor:
    """States of one sequence, shape [L, D], float32 or wider."""
    states = decoder(input_ids=row, use_cache=False, return_dict=True).last_hidden_state[0]
    return states.to(torch.promote_types(states.dtype, torch.float32))
