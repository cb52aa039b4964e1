"""Finds a model's decoder, and refuses architectures that cannot share prefixes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from pl_grouprl.attention.state.stateful import stateful_mixers, unsupported_mixers
from pl_grouprl.utilities import internals

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_MIXERS = re.compile("attn|attention|mixer", re.IGNORECASE)
"""Class names of modules that mix tokens."""


class UnsupportedModelError(ValueError):
    """The model would give different results with shared and with repeated prefixes."""


class LayersFailedError(UnsupportedModelError):
    """The model's layers failed on a packed row, as those do that compute with the attention mask themselves."""


def find_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """The module that turns tokens into hidden states, without the language model head."""
    model = _without_adapter_wrapper(model)
    decoder = model.get_decoder()
    if not hasattr(decoder, "config"):  # ModernBertDecoder names its head `decoder`
        decoder = model.base_model
    # get_decoder does not find the decoder of Llama4ForCausalLM and returns the model itself; in a multimodal model,
    # that is taken for the decoder.
    has_head = decoder is model or hasattr(decoder, "lm_head")
    return getattr(decoder, "model", decoder) if has_head else decoder


def find_backbone(model: PreTrainedModel) -> PreTrainedModel:
    """The module that takes all inputs and returns hidden states.

    For multimodal models, the parent of decoder and vision tower; for text models, the decoder.
    """
    decoder = find_decoder(model)
    modules = _without_adapter_wrapper(model).modules()
    parents = (module for module in modules if any(child is decoder for child in module.children()))
    return next(filter(_is_composite, parents), decoder)


def _is_composite(module: Any) -> bool:
    """Whether a module's config holds a separate one for its text decoder."""
    config: Any = getattr(module, "config", None)
    return hasattr(config, "get_text_config") and config.get_text_config(decoder=True) is not config


def _without_adapter_wrapper(model: Any) -> Any:
    """Unwrap a PeftModel; return other models unchanged."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def unwrapped(model: Any) -> Any:
    """The PEFT or transformers model inside DDP, FSDP1, `torch.compile`, DeepSpeed's engine and other wrappers."""
    while not (hasattr(type(model), "get_decoder") or hasattr(type(model), "get_base_model")):
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            break
        model = inner
    return model


def positions_are_relative(decoder: PreTrainedModel) -> bool:
    """Whether shifting all positions by a constant leaves a row's result unchanged, as with plain rotary embeddings.

    False if norms with weights follow the rotation (HunYuan), queries are scaled by position, chunks are counted from
    position 0, or frequencies depend on the largest position.
    """
    rotary = any("rotary" in type(module).__name__.lower() for module in decoder.modules())
    config = decoder.config
    absolute = (
        config.model_type.startswith("hunyuan")
        or _scales_by_position(config)
        or "chunked_attention" in (getattr(config, "layer_types", None) or ())
        or has_dynamic_rope(decoder)
    )
    return rotary and not absolute


def has_dynamic_rope(decoder: nn.Module) -> bool:
    """Whether rotary frequencies depend on the largest position of a call (rope types `dynamic` and `longrope`).

    In such a model, a sequence's values depend on the longest sequence of the batch. A packed row has the same largest
    position as the padded batch of the same sequences, and so the same values.
    """
    types = [str(kind) for module in decoder.modules() for kind in _rope_types(module)]
    return any("dynamic" in kind or kind == "longrope" for kind in types)


def _rope_types(module: nn.Module) -> Iterator[Any]:
    rope_type = getattr(module, "rope_type", None)
    yield from rope_type.values() if isinstance(rope_type, dict) else [rope_type]


def takes_positions(decoder: nn.Module) -> bool:
    """Whether a decoder's forward takes `position_ids`."""
    return "position_ids" in inspect.signature(type(decoder).forward).parameters


def counts_tokens_itself(decoder: nn.Module) -> str | None:
    """Why a decoder does not accept positions, which packed rows and padded prompts need, or None if it does."""
    if not takes_positions(decoder):
        return f"{type(decoder).__name__} takes no position_ids."
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in decoder.modules()):
        return f"{type(decoder).__name__} counts positions from the padding token's id on."
    return None


def _scales_by_position(config: Any) -> bool:
    rope = getattr(config, "rope_parameters", None) or {}
    return bool(getattr(config, "attn_temperature_tuning", False)) or "llama_4_scaling_beta" in rope


def why_not_reached(decoder: nn.Module, layers: Sequence[nn.Module], reached: set[int]) -> str | None:
    """Say how many attention or stateful layers did not follow the layout; None if all did.

    Args:
        decoder: The decoder that ran.
        layers: Its layers that must follow the layout.
        reached: Identities of the modules that followed it.
    """
    stateful = [type(mixer).__name__ for mixer in stateful_mixers(decoder) if id(mixer) not in reached]
    if stateful:
        return f"prefix_layout did not reach {len(stateful)} of the layers {', '.join(sorted(set(stateful)))}"
    untouched = [layer for layer in layers if not any(id(module) in reached for module in layer.modules())]
    if any(_MIXERS.search(type(module).__name__) for layer in untouched for module in layer.modules()):
        return (
            f"prefix_layout reached {len(layers) - len(untouched)} of {len(layers)} layers in {type(decoder).__name__}"
        )
    return None if reached or not layers else f"prefix_layout reached no layer in {type(decoder).__name__}"


def check_supported(model: PreTrainedModel) -> None:
    """Refuse models whose architecture rules out exact prefix sharing.

    Further checks run the model: `shared_prefix` compares both paths on a few tokens when first entered, and attention
    refuses unknown masks and arguments.

    Raises:
        UnsupportedModelError: Names the model, the reason and the remedy.
    """
    reason = _reason(find_decoder(model))
    if reason is not None:
        raise refusal(model, reason)


_REMEDY = (
    "Train it with sharing='repeated' (a module of your own: without SharedPrefixCallback), or choose another decoder; "
    "docs/models.md lists those that are exact."
)


def refusal(
    model: PreTrainedModel,
    reason: str,
    remedy: str = _REMEDY,
    *,
    kind: type[UnsupportedModelError] = UnsupportedModelError,
) -> UnsupportedModelError:
    """Build the error, which names the model, the reason and the remedy."""
    config = find_decoder(model).config
    return kind(
        f"model {type(model).__name__} (model_type={config.model_type!r}) cannot share prefixes: {reason} {remedy}"
    )


def _reason(decoder: PreTrainedModel) -> str | None:
    config = decoder.config
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder."
    mixers = unsupported_mixers(decoder)
    if mixers:
        return f"its layers {', '.join(mixers)} carry a state, which would leak from one rollout into the next."
    if not internals.uses_attention_functions(decoder):
        return "its attention does not go through transformers' AttentionInterface, so the layout would not arrive."
    if bool(getattr(config, "alibi", False)):
        return "it biases scores by distance (config.alibi)."
    return counts_tokens_itself(decoder)
