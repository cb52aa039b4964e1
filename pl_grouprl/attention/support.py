"""Reads a model's structure, and tells apart architectures that cannot share prefixes."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Collection, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pl_grouprl.attention.stateful import stateful_mixers, unsupported_mixers
from pl_grouprl.utilities import internals

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_MIXERS = re.compile("attn|attention|mixer", re.IGNORECASE)
"""Class names of modules that mix tokens."""


class UnsupportedModelError(ValueError):
    """The model would give different results with shared and with repeated prefixes."""


class LayersFailedError(UnsupportedModelError):
    """The model's layers failed on a packed row, as those do that compute with the attention mask themselves."""


def find_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """The module that turns tokens into hidden states, without the language model head."""
    model = base_of(model)
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
    for module in base_of(model).modules():
        if not any(child is decoder for child in module.children()):
            continue
        config: Any = getattr(module, "config", None)
        # Its config holds a separate one for its text decoder.
        if hasattr(config, "get_text_config") and config.get_text_config(decoder=True) is not config:
            return module
    return decoder


def base_of(model: Any) -> Any:
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
        or bool(getattr(config, "attn_temperature_tuning", False))
        or "llama_4_scaling_beta" in (getattr(config, "rope_parameters", None) or {})
        or "chunked_attention" in (getattr(config, "layer_types", None) or ())
        or has_dynamic_rope(decoder)
    )
    return rotary and not absolute


def has_dynamic_rope(decoder: nn.Module) -> bool:
    """Whether rotary frequencies depend on the largest position of a call (rope types `dynamic` and `longrope`).

    In such a model, a sequence's values depend on the longest sequence of the batch. A packed row has the same largest
    position as the padded batch of the same sequences, and so the same values.
    """
    for module in decoder.modules():
        rope_type = getattr(module, "rope_type", None)
        types = map(str, rope_type.values() if isinstance(rope_type, dict) else [rope_type])
        if any("dynamic" in kind or kind == "longrope" for kind in types):
            return True
    return False


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


def why_not_reached(decoder: nn.Module, layers: Sequence[nn.Module], reached: Collection[int]) -> str | None:
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
    """Check that a model's architecture does not rule out exact prefix sharing.

    Further checks run the model: `shared_prefix` compares both paths on a few tokens when first entered, and attention
    raises at unknown masks and arguments.

    Raises:
        UnsupportedModelError: Names the model, the reason and the remedy.
    """
    decoder = find_decoder(model)
    if getattr(decoder.config, "is_encoder_decoder", False):
        reason: str | None = "it is an encoder-decoder."
    elif mixers := unsupported_mixers(decoder):
        reason = f"its layers {', '.join(mixers)} carry a state, which would leak from one rollout into the next."
    elif not internals.uses_attention_functions(decoder):
        reason = "its attention does not go through transformers' AttentionInterface, so the layout would not arrive."
    elif bool(getattr(decoder.config, "alibi", False)):
        reason = "it biases scores by distance (config.alibi)."
    else:
        reason = counts_tokens_itself(decoder)
    if reason is not None:
        raise refusal(model, reason)


_REMEDY = (
    "Train it with sharing.mode='repeated' (a reward model: sharing='repeated'; your own module: without "
    "SharedPrefixCallback), or choose another decoder; docs/models.md lists those that are exact."
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


_STANDARD = ["gate_logits", "num_experts", "top_k", "attention_mask"]


def why_not_balanced(decoder: nn.Module) -> str | None:
    """Why the standard load-balancing loss does not apply to a decoder, or None if it does.

    Families differ: some choose experts by sigmoid scores and a correction bias, which balances them without a loss;
    some do not record the logits of all tokens. The model itself is inspected, not a list of names.
    """
    names = (name for name, _ in (*decoder.named_parameters(), *decoder.named_buffers()))
    reason = why_no_standard_loss(decoder)
    if reason is None and any(name.endswith("correction_bias") for name in names):
        return "its routers choose by a correction bias, so the logits do not say which experts are used"
    return reason


def why_no_standard_loss(decoder: nn.Module) -> str | None:
    """Why the family's loss does not take router logits [tokens, experts] and a mask of padding; None if it does.

    If it does, router logits at padding may have any value.
    """
    classes = tuple(getattr(recorder, "target_class", recorder) for recorder in internals.router_recorders(decoder))
    if not any(isinstance(module, classes) for module in decoder.modules()):
        return "its decoder has no router logits to record"
    # A wrapped decoder's class is created on the fly from the class in the family's file.
    for kind in type(decoder).__mro__:
        loss = getattr(sys.modules.get(kind.__module__), "load_balancing_loss_func", None)
        if loss is not None:
            is_standard = list(inspect.signature(loss).parameters) == _STANDARD
            return None if is_standard else "transformers computes another load-balancing loss for it"
    return "transformers has no load-balancing loss for it"


MAX_SELECTED = 3
"""Tokens that a layer selects in the check, fewer than any of its sequences has."""


class SmallSelections(TorchFunctionMode):
    """Limits `topk` in functions that take the attention mask, as indexers do; of few tokens, all would be selected.

    Args:
        most: Tokens that a layer selects; if None, only notes which functions select.
    """

    def __init__(self, most: int | None = MAX_SELECTED) -> None:
        super().__init__()
        self._most, self._tried = most, set[CodeType]()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs, caller = kwargs or {}, sys._getframe(1).f_code
        if func in (torch.topk, Tensor.topk) and _selects(caller):
            self._tried.add(caller)
            if self._most is not None and len(args) > 1:
                args = (args[0], min(args[1], self._most), *args[2:])
            elif self._most is not None:
                kwargs = kwargs | {"k": min(kwargs["k"], self._most)}
        return func(*args, **kwargs)

    def untried(self, decoder: nn.Module) -> list[str]:
        """Names of the decoder's methods that select tokens and have not run yet."""
        return sorted(name for code, name in _selecting_methods(decoder).items() if code not in self._tried)


def selects_tokens(decoder: nn.Module) -> bool:
    """Whether a module of the decoder selects tokens by the attention mask, as an indexer does."""
    return any(code.co_name == "forward" for code in _selecting_methods(decoder))


def _selecting_methods(decoder: nn.Module) -> dict[CodeType, str]:
    kinds = {kind for module in decoder.modules() if module is not decoder for kind in type(module).__mro__}
    methods = [(kind, inspect.unwrap(method)) for kind in kinds for method in vars(kind).values() if callable(method)]
    codes = [(getattr(method, "__code__", None), kind) for kind, method in methods]
    return {code: f"{kind.__name__}.{code.co_name}" for code, kind in codes if code is not None and _selects(code)}


def _selects(code: CodeType) -> bool:
    """Whether a function takes the attention mask and calls `topk`."""
    return "topk" in code.co_names and "attention_mask" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def decoder_layers(model: Any) -> nn.ModuleList:
    """Find the layers of a model's decoder.

    Raises:
        ValueError: If it has no list of as many layers as its config says.
    """
    decoder = find_decoder(model)
    count = getattr(decoder.config, "num_hidden_layers", None)
    for module in decoder.modules():  # outermost first, so before any list of as many experts
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(f"{type(decoder).__name__} has no list of {count} layers.")


def is_classifier(config: PretrainedConfig, kind: str = "SequenceClassification") -> bool:
    """Whether a checkpoint was saved from a `...For{kind}`; reward models are such classifiers."""
    return any(name.endswith(f"For{kind}") for name in config.architectures or ())


def score_head(model: PreTrainedModel, kind: str = "SequenceClassification") -> nn.Linear:
    """The linear layer that maps a hidden state to the scores of a sequence or a token.

    Families differ in which state it reads: `checks.model_introspection.check_score_head` distinguishes decoders, which
    read the last token, from encoders.

    Raises:
        ValueError: Unless exactly one direct child of the model is such a layer.
    """
    heads = [child for child in model.children() if isinstance(child, nn.Linear)]
    if len(heads) != 1 or heads[0].out_features != model.config.num_labels:
        raise ValueError(f"{type(model).__name__} has no single linear layer as its head; use one like Qwen2For{kind}.")
    return heads[0]
