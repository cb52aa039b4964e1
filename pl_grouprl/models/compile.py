"""Compiles decoder layers one by one, so all layers and batches share few graphs."""

from __future__ import annotations

from typing import Any

from torch import nn

from pl_grouprl.attention import find_decoder

COMPILER_BACKEND = "inductor"
"""Compiler backend for a layer's graph; torch.compile's default."""


def compile_layers(model: Any) -> None:
    """Compile each decoder layer of a transformers model, in place, for sequences of any length.

    Names in its `state_dict` do not change. Everything around the layers (embeddings, head, a vision tower) and deep
    copies of the model stay uncompiled.

    Raises:
        ValueError: If the decoder has no list of `num_hidden_layers` layers.
    """
    from lightning.pytorch.utilities.rank_zero import rank_zero_info

    rank_zero_info("compile_layers: the first forward and backward passes compile, which may take a minute each.")
    for layer in decoder_layers(model):
        layer.compile(backend=COMPILER_BACKEND, dynamic=True)


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
    raise ValueError(
        f"{type(decoder).__name__} has no list of {count} layers (its config's num_hidden_layers) to compile; leave "
        "out compile_layers."
    )
