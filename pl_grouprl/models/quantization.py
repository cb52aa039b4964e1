"""A frozen base in 4 bits under a trained adapter (QLoRA, arXiv:2305.14314), by bitsandbytes."""

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
    """How the linear layers of a frozen model are stored: 4 bits per weight, and a scale for each 64 of them.

    Embeddings, norms and the head keep the dtype of the policy.

    Attributes:
        quant_type: `nf4` has a level for each 16-quantile of normally distributed weights, `fp4` is a float of 4 bits.
        double_quant: Store the scales with 8 bits: 4.127 bits per weight instead of 4.5.
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
    """Make a model's 4-bit layers, if it has any, trainable through: with gradients, and known to PEFT.

    On CPUs with bfloat16 instructions, a layer of bitsandbytes that runs in evaluation mode repacks its weight
    permanently, for a kernel that rounds to bfloat16 and has no gradient; later gradients would be zero. So that kernel
    is switched off. PEFT looks for `is_loaded_in_4bit` on the model that gets the adapter, which may be a part of the
    loaded one; so every part is marked.
    """
    for _, layer in quantized_layers(model):
        layer.support_avx512bf16_for_cpu = False
    if is_quantized(model):
        for module in model.modules():
            if hasattr(module, "get_input_embeddings"):
                module.is_loaded_in_4bit = True  # type: ignore[assignment]


def whole_shape(parameter: Tensor) -> Sequence[int]:
    """A parameter's shape; of a 4-bit one, that before packing."""
    state = getattr(parameter, "quant_state", None)
    return parameter.shape if state is None else state.shape


@torch.no_grad()
def dequantize(model: nn.Module) -> None:
    """Replace a model's 4-bit layers, in place, by layers of the original class with the same dequantized weights.

    PEFT's layers around them become those for such layers, so merging an adapter rounds nothing to 4 bits.
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
            _tell_orientation(module)
        if getattr(module, "is_loaded_in_4bit", False):
            _unmark(module)


def _dequantized(layer: Any) -> nn.Module:
    from bitsandbytes.functional import dequantize_4bit
    from transformers.pytorch_utils import Conv1D

    weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    plain: nn.Module
    if issubclass(getattr(layer, "source_cls", nn.Linear), Conv1D):  # GPT-2's, which was transposed to be quantized
        plain, weight = Conv1D(layer.out_features, layer.in_features), weight.T.contiguous()
    else:
        plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    plain.weight = nn.Parameter(weight, requires_grad=False)
    plain.bias = layer.bias
    return plain


def _tell_orientation(adapter: Any) -> None:
    """Tell the parts of a PEFT layer whether the weight that it wraps is transposed."""
    from transformers.pytorch_utils import Conv1D

    is_transposed = isinstance(adapter.get_base_layer(), Conv1D)
    for part in adapter.modules():
        if hasattr(part, "fan_in_fan_out"):
            part.fan_in_fan_out = is_transposed


def _unmark(model: Any) -> None:
    """Remove the marks of a quantized model, which transformers refuses to save or cast."""
    for name in ("is_loaded_in_4bit", "is_quantized", "hf_quantizer", "quantization_method"):
        model.__dict__.pop(name, None)
    model.config.__dict__.pop("quantization_config", None)
