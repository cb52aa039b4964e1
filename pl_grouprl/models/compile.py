"""Decoder layers compiled one by one, so that all of them and all batches share few graphs."""

from __future__ import annotations

from typing import Any

from torch import nn

from pl_grouprl.attention import find_decoder

COMPILER_BACKEND = "inductor"
"""What turns a layer's graph into code; torch.compile's own default."""


def compile_layers(model: Any) -> None:
    """Compile each decoder layer of a transformers model, in place, for sequences of any length.

    Names in its `state_dict` stay as they are. What is around the layers (embeddings, head, a vision tower) runs as
    before. A deep copy of the model is not compiled.

    Raises:
        ValueError: If the decoder has no list of `num_hidden_layers` layers.
    """
    for layer in decoder_layers(model):
        layer.compile(backend=COMPILER_BACKEND, dynamic=True)


def decoder_layers(model: Any) -> nn.ModuleList:
    """Find the layers of a model's decoder.

    Raises:
        ValueError: If it has no list of as many modules as its config says.
    """
    decoder = find_decoder(model)
    count = getattr(decoder.config, "num_hidden_layers", None)
    for module in decoder.modules():  # from the outside in, so before a list of as many experts
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(
        f"{type(decoder).__name__} has no list of {count} layers (its config's num_hidden_layers) to compile; leave "
        "out compile_layers."
    )
