"""Builds a small model of every decoder family in the installed transformers, by one recipe that names no family.

All weights are redrawn, including those that a family initializes to zero or one, so every visible token affects the
logits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from tiny_config import sections, small_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

MAX_WEIGHTS = 8_000_000


class CannotBuildError(RuntimeError):
    """The recipe cannot build a small model of this family."""


@dataclass(frozen=True)
class Family:
    """One model to try.

    Attributes:
        model_type: Model type of its config.
        model_class: Name of its class.
        images: Whether it also takes images; it is run with text alone.
        variant: Difference from the family's defaults, or empty.
        overrides: Fields of the language model's config for the variant.
    """

    model_type: str
    model_class: str
    images: bool = False
    variant: str = ""
    overrides: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        """Its name on the command line."""
        return f"{self.model_type} {self.variant}".strip()


def _rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **options}}


_ORIGINAL = {"original_max_position_embeddings": 16}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_FACTORS = {"short_factor": [1.0, 1.1] * 4, "long_factor": [1.5, 4.0] * 4}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}

VARIANTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("llama", "linear rope", _rope("linear", factor=4.0)),
    ("llama", "yarn rope", _rope("yarn", factor=4.0, **_ORIGINAL)),
    ("llama", "llama3 rope", _rope("llama3", **_LLAMA3, **_ORIGINAL)),
    ("llama", "dynamic rope", {**_rope("dynamic", factor=4.0), "max_position_embeddings": 16}),
    ("phi3", "longrope", {**_rope("longrope", **_FACTORS, **_ORIGINAL), **_ORIGINAL, "max_position_embeddings": 64}),
    ("llama", "biases", {"attention_bias": True, "mlp_bias": True}),
    ("llama", "tied embeddings", {"tie_word_embeddings": True}),
    ("gemma3_text", "untied embeddings", {"tie_word_embeddings": False}),
    ("gemma3_text", "all soft caps", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 2.0}),
    ("mistral", "no window", {"sliding_window": None}),
    ("qwen2", "windows", {**_WINDOWS, "use_sliding_window": True}),
    ("qwen3", "windows", {**_WINDOWS, "use_sliding_window": True}),
    ("lfm2", "short convolutions", {"layer_types": ["conv", "full_attention"]}),
    ("lfm2", "short convolutions with bias", {"layer_types": ["conv", "full_attention"], "conv_bias": True}),
    ("lfm2_moe", "short convolutions", {"layer_types": ["conv", "full_attention"]}),
    ("qwen3", "biases", {"attention_bias": True}),
)
"""Config options that change attention, for families whose defaults leave them off."""


def families() -> list[Family]:
    """All families with a class for text, or for images and text, by name, then the variants."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    with_images = dict(_registered(AutoModelForImageTextToText))
    found = {}
    for model_type, name in [*_registered(AutoModelForCausalLM), *with_images.items()]:
        found[model_type, name] = Family(model_type, name, images=with_images.get(model_type) == name)
    classes = {family.model_type: family.model_class for family in found.values() if not family.images}
    return [found[key] for key in sorted(found)] + [
        Family(model_type, classes[model_type], variant=variant, overrides=overrides)
        for model_type, variant, overrides in VARIANTS
    ]


def _registered(auto: Any) -> Iterable[tuple[str, str]]:
    """Model types and class names, including those registered at runtime; loads no model's code."""
    mapping = auto._model_mapping
    own = dict(mapping._model_mapping.items())
    own |= {config.model_type: model.__name__ for config, model in mapping._extra_content.items()}
    return [(model_type, names if isinstance(names, str) else names[0]) for model_type, names in own.items()]


def build(family: Family, seed: int = 0, *, fill: bool = False) -> PreTrainedModel:
    """A small random model of the family on the CPU, float32, in eval mode.

    Args:
        family: The family.
        seed: Seed of the weights.
        fill: See `small_config`.

    Raises:
        CannotBuildError: With the first line of the family's error.
    """
    from transformers import AutoConfig

    try:
        config = small_config(AutoConfig.for_model(family.model_type), family.overrides, fill=fill)
        with torch.device("meta"):
            weights = sum(weight.numel() for weight in _from_config(family, config).parameters())
        if weights > MAX_WEIGHTS:
            raise ValueError(f"{weights:,} weights are left in what should be a small model.")
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = _from_config(family, config)
    except Exception as error:
        raise CannotBuildError(first_line(error)) from error
    module: Any
    for module in model.modules():  # by default split for a large head, whatever the head's size
        if getattr(module, "mrope_section", None) and hasattr(module, "inv_freq"):
            module.mrope_section = sections(module.mrope_section, len(module.inv_freq))
    randomise(model, seed)
    return model.float().eval()


def _from_config(family: Family, config: PretrainedConfig) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto: Any = AutoModelForCausalLM
    if dict(_registered(AutoModelForCausalLM)).get(family.model_type) != family.model_class:
        auto = AutoModelForImageTextToText
    return auto.from_config(config, dtype=torch.float32)


@torch.no_grad()
def randomise(model: PreTrainedModel, seed: int) -> None:
    """Redraw matrices with gain 1.5; add noise with deviation 0.2 to vectors and to saved buffers of zeros."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() >= 2:
            weight.copy_(noise * 1.5 / weight.shape[-1] ** 0.5)
        else:
            weight.add_(0.2 * noise)
    saved = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in saved and buffer.is_floating_point() and not buffer.any():
            buffer.add_(0.2 * torch.randn(buffer.shape, generator=generator))


def first_line(error: BaseException) -> str:
    """An error's message on one line, the same on every machine."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("Class validation error"):  # a heading above the validator's message
        return lines[1]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
