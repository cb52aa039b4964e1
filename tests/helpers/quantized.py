"""A small policy in a folder, whose linear layers have whole blocks of 64 weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pl_grouprl.demo.tasks import digit_tokenizer
from pl_grouprl.models import FourBit, LoRAAdapter, PretrainedPolicy

FLOAT = FourBit(compute_dtype="float32")


def save_policy(folder: Path) -> str:
    """Write random weights of two layers and the tokenizer of digits; return the path."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(digit_tokenizer()), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=64, eos_token_id=1,
        pad_token_id=0, initializer_range=0.1,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    digit_tokenizer().save_pretrained(folder)
    return str(folder)


def quantized_policy(path: str, quantization: FourBit | None = FLOAT, **options: Any) -> PretrainedPolicy:
    """The folder's policy with an adapter on a base of 4 bits."""
    return PretrainedPolicy(path, adapter=LoRAAdapter(r=4), quantization=quantization, **options)


def move_adapter(model: Any) -> Any:
    """Give the adapter an effect."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model
