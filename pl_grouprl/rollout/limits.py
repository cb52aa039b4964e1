"""Limits on requests from a model: sequence length, vocabulary, and whether prompts may be padded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pl_grouprl.attention.selections import selects_tokens
from pl_grouprl.attention.support import find_decoder, takes_positions
from pl_grouprl.media.inputs import placeholder_ids
from pl_grouprl.rollout.prefill import keeps_more_than_keys


def length_limits(model: Any) -> dict[str, int]:
    """Maximum lengths of prompt plus completion, by the name of what sets each limit.

    Besides the model's positions, this includes the length beyond which rotary frequencies depend on the longest
    sequence of a call (dynamic scaling, LongRoPE). Beyond it, cached keys were rotated at the frequencies of their
    step, which no forward over the whole sequence reproduces, and frequencies would depend on other sequences in the
    batch.

    Args:
        model: A transformers decoder.

    Returns:
        Name and tokens of each limit; empty if there is none.
    """
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    limits = {} if positions is None else {"max_position_embeddings": int(positions)}
    for name, length in _rotary_limits(model):
        limits[name] = min(length, limits.get(name, length))
    return limits


def allows_padding(model: Any, longest: int) -> bool:
    """Whether prompts of different lengths can be batched.

    Not if the model counts positions itself, or a layer counts columns: one that scales queries by them
    (`counts_padding`), or one that keeps an index of the tokens and does not select by the attention mask (MiniMax M3's
    blocks).

    Args:
        model: A transformers decoder.
        longest: Length of the longest prompt plus completion.
    """
    decoder = find_decoder(model)
    heeds_mask = not keeps_more_than_keys(model) or selects_tokens(decoder)
    return heeds_mask and not counts_padding(model, longest) and (takes_positions(decoder) or needs_no_positions(model))


def needs_no_positions(model: Any) -> bool:
    """Whether a model biases scores by distance, which it reads from the attention mask."""
    return model.config.model_type in ("bloom", "mpt") or bool(getattr(model.config, "alibi", False))


def counts_padding(model: Any, longest: int) -> bool:
    """Whether a layer counts columns, padding included, so only prompts of equal length can be batched.

    Llama 4's layers without rotary embedding scale queries by their column, beyond some column.

    Args:
        model: A transformers decoder.
        longest: Length of the longest prompt plus completion.
    """
    config = model.config.get_text_config(decoder=True)
    tuned = bool(getattr(config, "attn_temperature_tuning", False)) and 0 in (config.no_rope_layers or ())
    return tuned and longest >= config.floor_scale


def vocabulary(model: Any) -> int | None:
    """Size of the vocabulary for prompts; None if unknown."""
    size = getattr(model.config.get_text_config(decoder=True), "vocab_size", None)
    return None if size is None else max(size, *(token + 1 for token in (0, *placeholder_ids(model).values())))


def _rotary_limits(model: Any) -> Iterator[tuple[str, int]]:
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        for layer_type, kind in types.items() if isinstance(types, dict) else [(None, types)]:
            name = f"original_max_position_embeddings (its {kind} rotary frequencies change beyond it)"
            if isinstance(kind, str) and "dynamic" in kind:
                yield name, module.original_max_seq_len
            elif kind == "longrope":
                parameters = module.config.rope_parameters
                parameters = parameters if layer_type is None else parameters[layer_type]
                yield name, parameters["original_max_position_embeddings"]
