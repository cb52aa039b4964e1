"""Tiny random decoders, and a tokenizer of one letter per token."""

from __future__ import annotations

import pytest
import torch

VOCAB = 24


def build_model(family: str, **overrides):
    import transformers as tf

    torch.manual_seed(7)
    common = {"vocab_size": VOCAB, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    llama_like = {
        **common,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
    }
    window = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    gpt2 = {**common, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.3}
    config = {
        "llama": lambda: tf.LlamaConfig(**{**llama_like, **overrides}),
        "qwen3": lambda: tf.Qwen3Config(**{**llama_like, **overrides}),
        "qwen2_window": lambda: tf.Qwen2Config(**{**llama_like, **window, **overrides}),
        "qwen3_moe": lambda: tf.Qwen3MoeConfig(**{**llama_like, **experts, **overrides}),
        "gpt2": lambda: tf.GPT2Config(**{**gpt2, **overrides}),
    }[family]()
    return tf.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="session")
def make_model():
    return build_model


@pytest.fixture(scope="module")
def qwen3():
    return build_model("qwen3")


class Letters:
    """Token i is the i-th letter of the alphabet; the end token is special and has no letter."""

    def __init__(self, eos_token_id: int | None = None) -> None:
        self.eos_token_id = eos_token_id

    def decode(self, token_ids, skip_special_tokens: bool = False) -> str:
        pieces = ["<end>" if token == self.eos_token_id else chr(ord("a") + token) for token in token_ids]
        return "".join(piece for piece in pieces if not (skip_special_tokens and piece == "<end>"))


@pytest.fixture(scope="session")
def letters():
    return Letters
