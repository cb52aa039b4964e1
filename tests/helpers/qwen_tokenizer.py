"""A small tokenizer with the special tokens of Qwen3's, for conversations with tools."""

from __future__ import annotations

from typing import Any

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Single tokens that are ordinary text, as in Qwen3's vocabulary: decoding with `skip_special_tokens` keeps them."""

_MERGES = [
    *(("Ċ", "Ċ"), ("Ġ", "Ġ"), (">", "Ċ"), ("Ċ", "<"), ("}", "Ċ"), ('"', ","), ('"', ":"), ("Ġ", '"'), ("Ġ", "{")),
    *(("{", '"'), ("}", "}"), ("Ġ", "t"), ("Ġt", "h"), ("Ġth", "e"), ("i", "n"), ("e", "r"), ("in", "g"), ("u", "s")),
    *(("us", "er"), ("s", "s"), ("a", "ss"), ("t", "o"), ("o", "l"), ("to", "ol")),
]


def qwen_tokenizer() -> Any:
    """Bytes and a few merges, so that neighbours may share a token: newlines, brackets, parts of words."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in _MERGES)]
    backend = Tokenizer(models.BPE({symbol: token for token, symbol in enumerate(symbols)}, _MERGES))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
