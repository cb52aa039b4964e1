"""Which models share a prefix exactly, decided before any forward: the others are refused with the reason."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MIXES_WITHOUT_ATTENTION = re.compile(
    "Mamba|SSM|DeltaNet|DeltaAttention|ShortConv|Recurrent|Rwkv|LinearAttention|LightningAttention|RgLru|xLSTM"
)
"""Class names of layers that carry a state from token to token."""

_MOVING_FREQUENCIES = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies depend on the longest sequence of the call."""


class UnsupportedModelError(ValueError):
    """A model whose result would differ between a shared and a repeated prefix."""


def find_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """The module that turns tokens into hidden states, without the language model head."""
    decoder = model.get_decoder()
    if not hasattr(decoder, "config"):  # ModernBertDecoder names its head `decoder`
        decoder = model.base_model
    # Llama4ForCausalLM keeps its decoder where get_decoder does not look, and answers with itself.
    return getattr(model, "model", decoder) if decoder is model else decoder


def positions_are_relative(decoder: PreTrainedModel) -> bool:
    """Whether a row gives the same result at positions moved by a constant: rotary angles see distances only.

    Not so where norms with weights come behind the rotation (HunYuan) or queries are scaled by their position.
    """
    rotary = any("rotary" in type(module).__name__.lower() for module in decoder.modules())
    config = decoder.config
    return rotary and not (config.model_type.startswith("hunyuan") or _scales_by_position(config))


def counts_tokens_itself(decoder: nn.Module) -> str | None:
    """Why positions cannot be given to a decoder, or None: packed rows and padded prompts need them."""
    if "position_ids" not in inspect.signature(type(decoder).forward).parameters:
        return f"{type(decoder).__name__} takes no position_ids."
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in decoder.modules()):
        return f"{type(decoder).__name__} counts positions from the padding token's id on."
    return None


def _scales_by_position(config: Any) -> bool:
    rope = getattr(config, "rope_parameters", None) or {}
    return bool(getattr(config, "attn_temperature_tuning", False)) or "llama_4_scaling_beta" in rope


def check_supported(model: PreTrainedModel) -> None:
    """Refuse models that would be silently wrong with a shared prefix.

    Raises:
        UnsupportedModelError: With the model's name, the reason and what to do instead.
    """
    decoder = find_decoder(model)
    reason = _reason(decoder, decoder.config)
    if reason is not None:
        raise UnsupportedModelError(
            f"model {type(model).__name__} (model_type={decoder.config.model_type!r}) cannot share prefixes: {reason} "
            "Train it with sharing='repeated', or choose a decoder with full causal attention."
        )


def _reason(decoder: PreTrainedModel, config: Any) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder."
    stateful = sorted(
        {type(m).__name__ for m in decoder.modules() if _MIXES_WITHOUT_ATTENTION.search(type(m).__name__)}
    )
    if stateful:
        return f"its layers {', '.join(stateful)} carry a state, which would run from one rollout into the next."
    other = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if other:
        return f"config.layer_types has {', '.join(other)}; only full_attention is supported."
    if not decoder._can_set_attn_implementation():
        return "its attention does not go through transformers' AttentionInterface, so the layout would not arrive."
    return counts_tokens_itself(decoder) or _config_reason(config)


def _config_reason(config: Any) -> str | None:
    window = getattr(config, "sliding_window", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [rope, *(part for part in rope.values() if isinstance(part, dict))] if isinstance(rope, dict) else []
    rope_types = sorted({str(part.get("rope_type", part.get("type"))) for part in nested} & {*_MOVING_FREQUENCIES})
    findings = {
        f"config.sliding_window={window} limits attention to a window; set it to None if all sequences are shorter.":
            window is not None and getattr(config, "use_sliding_window", True),
        "config.attn_logit_softcapping caps the scores.": getattr(config, "attn_logit_softcapping", None) is not None,
        "its layers do not hand the layout on to their attention.": config.model_type in ("stablelm", "nemotron"),
        "its attention adds a bias of its own to the scores.": config.model_type == "doge",
        "its attention has sinks.": config.model_type == "gpt_oss",
        "its attention is latent (config.kv_lora_rank).": getattr(config, "kv_lora_rank", None) is not None,
        "it biases scores by distance (config.alibi).": bool(getattr(config, "alibi", False)),
        f"its rotary frequencies ({', '.join(rope_types)}) depend on the longest sequence of the call.":
            bool(rope_types),
        "it scales queries by their place in the row (config.attn_temperature_tuning).":
            bool(getattr(config, "attn_temperature_tuning", False)) and 0 in (config.no_rope_layers or ()),
    }  # fmt: skip
    return next((reason for reason, found in findings.items() if found), None)
