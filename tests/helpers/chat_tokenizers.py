"""Tokenizers with the special tokens of families of chat models: a token is a byte, or one of the special ones."""

from __future__ import annotations

import string
from typing import Any

from tests.helpers.tiny_tokenizers import bytes_tokenizer

QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_TEXT = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = ("<user>", "<assistant>", "<call>", "<result>", "<end>")


def chat_tokenizer(
    special: tuple[str, ...], eos: str, text_tokens: tuple[str, ...] = (), bos: str | None = None
) -> Any:
    """A byte-level tokenizer with further tokens; only those of `special` are left out of decoded text."""
    tokenizer = bytes_tokenizer()
    tokenizer.add_special_tokens({"eos_token": eos, "additional_special_tokens": [t for t in special if t != eos]})
    tokenizer.add_tokens(list(text_tokens))
    if bos is not None:
        tokenizer.bos_token = bos
    return tokenizer


def qwen_tokenizer() -> Any:
    """As Qwen3's: tags of calls and thoughts are tokens that are not special."""
    return chat_tokenizer(QWEN, "<|im_end|>", QWEN_TEXT)


def llama_tokenizer() -> Any:
    return chat_tokenizer(LLAMA, "<|eot_id|>", bos="<|begin_of_text|>")


def gemma_tokenizer() -> Any:
    """The end of a turn is not the EOS token."""
    return chat_tokenizer(GEMMA, "<eos>", bos="<bos>")


def plain_tokenizer() -> Any:
    """One token per letter, digit and space, and the tokens of the plain format."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ("<pad>", *PLAIN, " ", *string.digits, *string.ascii_lowercase)
    backend = Tokenizer(models.WordLevel({token: place for place, token in enumerate(tokens)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<end>",
        pad_token="<pad>",
        additional_special_tokens=[token for token in PLAIN if token != "<end>"],
        clean_up_tokenization_spaces=False,
    )


def add_to_texts(tokenizer: Any, form: str) -> None:
    """Let a tokenizer add special tokens to texts: `<bos> $A <eos>`."""
    from tokenizers.processors import TemplateProcessing

    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in form.split() if token != "$A"]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(form, None, special)
