"""Frozen base models in 4 bits under a trained adapter (QLoRA, arXiv:2305.14314), using bitsandbytes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from pl_grouprl.utilities import optional
from pl_grouprl.utilities.arguments import checked_arguments

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig


@checked_arguments
@dataclass(frozen=True)
class FourBit:
    """How the linear layers of a frozen model are stored: 4 bits per weight, and a scale for every 64 weights.

    Embeddings, norms and the head keep the dtype of the policy.

    Attributes:
        quant_type: `nf4` has levels at the 16-quantiles of a normal distribution, `fp4` is a float of 4 bits.
        double_quant: Store the scales in 8 bits: 4.127 bits per weight instead of 4.5.
        compute_dtype: Dtype in which a layer's weights are dequantized and multiplied.

    Raises:
        ModuleNotFoundError: If bitsandbytes is not installed.
    """

    quant_type: Literal["nf4", "fp4"] = "nf4"
    double_quant: bool = True
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"

    def __post_init__(self) -> None:
        optional.require(optional.BITSANDBYTES_AVAILABLE, "FourBit", "bitsandbytes")

    def config(self) -> BitsAndBytesConfig:
        """The `quantization_config` of `from_pretrained`."""
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=self.quant_type,
            bnb_4bit_use_double_quant=self.double_quant,
            bnb_4bit_compute_dtype=getattr(torch, self.compute_dtype),
        )


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and modules of a model's 4-bit layers; none if bitsandbytes has not been imported."""
    if "bitsandbytes" not in sys.modules:
        return
    from bitsandbytes.nn import Linear4bit

    yield from ((name, module) for name, module in model.named_modules() if isinstance(module, Linear4bit))


def is_quantized(model: nn.Module) -> bool:
    """Whether a model has 4-bit layers."""
    return next(quantized_layers(model), None) is not None


def prepare_for_training(model: nn.Module) -> None:
    """Prepare a model with 4-bit layers for an adapter: gradients flow through them, and PEFT recognizes them.

    Does nothing to a model without such layers.
    """
    if is_quantized(model):
        _keep_gradients(model)
        _mark_for_peft(model)


def _keep_gradients(model: nn.Module) -> None:
    """Disable bitsandbytes' kernel for CPUs with bfloat16 instructions.

    It rounds to bfloat16, has no gradient, and permanently repacks the weight of a layer that uses it (in evaluation
    mode), so later gradients would be zero.
    """
    for _, layer in quantized_layers(model):
        layer.support_avx512bf16_for_cpu = False


def _mark_for_peft(model: nn.Module) -> None:
    """Set `is_loaded_in_4bit` on every submodel that may get the adapter, not only on the loaded model."""
    for module in model.modules():
        if hasattr(module, "get_input_embeddings"):
            module.is_loaded_in_4bit = True  # type: ignore[assignment]


def whole_shape(parameter: Tensor) -> Sequence[int]:
    """A parameter's shape; for a 4-bit one, its shape before packing."""
    state = getattr(parameter, "quant_state", None)
    return parameter.shape if state is None else state.shape


@torch.no_grad()
def dequantize(model: nn.Module) -> None:
    """Replace a model's 4-bit layers, in place, by layers of the original class with the same dequantized weights.

    PEFT's layers around them are converted too, so merging an adapter does not round to 4 bits.
    """
    layers = list(quantized_layers(model))
    if not layers:
        return
    from peft.tuners import lora

    for name, layer in layers:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, _dequantized(layer))
    for module in model.modules():
        if type(module) is lora.Linear4bit:
            module.__class__ = lora.Linear
            _set_orientation(module)
        if getattr(module, "is_loaded_in_4bit", False):
            _unmark(module)


def _dequantized(layer: Any) -> nn.Module:
    from bitsandbytes.functional import dequantize_4bit
    from transformers.pytorch_utils import Conv1D

    weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    plain: nn.Module
    if issubclass(getattr(layer, "source_cls", nn.Linear), Conv1D):  # GPT-2's, transposed for quantization
        plain, weight = Conv1D(layer.out_features, layer.in_features), weight.T.contiguous()
    else:
        plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    plain.weight = nn.Parameter(weight, requires_grad=False)
    plain.bias = layer.bias
    return plain


def _set_orientation(adapter: Any) -> None:
    """Set `fan_in_fan_out` in the parts of a PEFT layer, by whether the wrapped weight is transposed."""
    from transformers.pytorch_utils import Conv1D

    is_transposed = isinstance(adapter.get_base_layer(), Conv1D)
    for part in adapter.modules():
        if hasattr(part, "fan_in_fan_out"):
            part.fan_in_fan_out = is_transposed


def _unmark(model: Any) -> None:
    """Remove the attributes of a quantized model, with which transformers refuses to save or cast it."""
    for name in ("is_loaded_in_4bit", "is_quantized", "hf_quantizer", "quantization_method"):
        model.__dict__.pop(name, None)
    model.config.__dict__.pop("quantization_config", None)
