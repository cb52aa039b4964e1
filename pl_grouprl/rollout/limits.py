"""How long a sequence may be, and which tokens there are: what a model's config says about requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pl_grouprl.media.inputs import placeholder_ids


def length_limits(model: Any) -> dict[str, int]:
    """Longest sequences, prompt and completion together, by what sets each limit.

    Beside the positions that the model has there may be a length from which on its rotary frequencies depend on the
    longest sequence of a call (dynamic scaling, LongRoPE). Keys in the cache were rotated at the frequencies of the
    step that wrote them, which no forward over the whole sequence reproduces, and the frequencies of a sequence would
    depend on its neighbours in the batch. Up to that length the frequencies stand still.

    Args:
        model: A transformers decoder.

    Returns:
        Name and tokens of each limit. Empty where there is none.
    """
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    limits = {} if positions is None else {"max_position_embeddings": int(positions)}
    for name, length in _standing_frequencies(model):
        limits[name] = min(length, limits.get(name, length))
    return limits


def counts_padding(model: Any, longest: int) -> bool:
    """Whether a layer counts the columns of a batch, padding included, so that prompts of one length go together only.

    Llama 4 scales the queries of its layers without rotary positions by the column, from a certain one on.

    Args:
        model: A transformers decoder.
        longest: Tokens of the longest sequence, prompt and completion together.
    """
    config = model.config.get_text_config(decoder=True)
    tuned = bool(getattr(config, "attn_temperature_tuning", False)) and 0 in (config.no_rope_layers or ())
    return tuned and longest >= config.floor_scale


def vocabulary(model: Any) -> int | None:
    """Number of tokens that a prompt may hold; None where that is not known."""
    size = getattr(model.config.get_text_config(decoder=True), "vocab_size", None)
    return None if size is None else max(size, *(token + 1 for token in (0, *placeholder_ids(model).values())))


def _standing_frequencies(model: Any) -> Iterator[tuple[str, int]]:
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        for layer_type, kind in types.items() if isinstance(types, dict) else [(None, types)]:
            name = f"original_max_position_embeddings (its {kind} rotary frequencies move beyond it)"
            if isinstance(kind, str) and "dynamic" in kind:
                yield name, module.original_max_seq_len
            elif kind == "longrope":
                parameters = module.config.rope_parameters
                parameters = parameters if layer_type is None else parameters[layer_type]
                yield name, parameters["original_max_position_embeddings"]
