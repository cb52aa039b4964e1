"""A llama of two layers and a byte-level tokenizer, written as a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers.tiny_models import tiny_model

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("Ċ Ċ", "Ġ Ġ", "Ġ a", "a b", "1 2")
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_ENDINGS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def vocabulary() -> list[str]:
    """Special tokens, all bytes, and what the merges make."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*SPECIAL, *alphabet, *(merge.replace(" ", "") for merge in MERGES)]


def tiny_llama() -> Any:
    """The model that `write_gguf` writes, its rows long enough for blocks of 32 weights."""
    size = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": len(vocabulary())}
    return tiny_model("llama", **size, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=2)


def write_gguf(file: Path, kind: str = "F32", pre: str | None = "smollm", without: str = "-", bad: bool = False) -> Any:
    """Write the tiny llama with its tokenizer.

    Args:
        file: Where to; its folder exists.
        kind: How matrices are stored: `F32`, `Q8_0`, `Q4_1`. Norms are float32.
        pre: The tokenizer's rules of splitting text into words.
        without: Weights whose name contains this are left out.
        bad: Whether one weight is infinite.

    Returns:
        The model, with its weights as they are stored: what a file of floats gives back.
    """
    import gguf

    model = tiny_llama()
    writer = gguf.GGUFWriter(str(file), "llama")
    _write_config(writer, model.config)
    _write_tokenizer(writer, pre)
    for name, weight in model.state_dict().items():
        if without in name or name.startswith("lm_head"):
            continue
        stored = gguf.GGMLQuantizationType[kind if weight.ndim == 2 else "F32"]
        values = _permuted(name, weight, model.config).contiguous().numpy()
        if bad and name == "model.norm.weight":
            values = values * float("inf")
        packed = gguf.quants.quantize(values, stored)
        with torch.no_grad():
            weight.copy_(_restored(name, torch.from_numpy(gguf.quants.dequantize(packed, stored).copy()), model.config))
        writer.add_tensor(_gguf_name(name), packed, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _write_config(writer: Any, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)


def _write_tokenizer(writer: Any, pre: str | None) -> None:
    tokens = vocabulary()
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def _gguf_name(name: str) -> str:
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in whole:
        return whole[name]
    _, _, layer, ending = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{_ENDINGS[ending]}.weight"


def _permuted(name: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """llama.cpp rotates neighbouring dimensions of queries and keys, transformers the halves of a head."""
    heads = _rotated_heads(name, config)
    return weight if heads is None else weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def _restored(name: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    heads = _rotated_heads(name, config)
    return weight if heads is None else weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


def _rotated_heads(name: str, config: Any) -> int | None:
    if "q_proj" in name:
        return config.num_attention_heads
    return config.num_key_value_heads if "k_proj" in name else None
