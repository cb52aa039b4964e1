"""Tiny tokenizers of transformers: what `save_pretrained` writes, a sampler in another process can load."""

from __future__ import annotations

from typing import Any

LETTERS = 24
END, TURN = 5, 6

_TEMPLATE = "{% for message in messages %}{{ message['content'] }}<turn>{% endfor %}"


def letters_tokenizer() -> Any:
    """Token i is the i-th letter; 5 is the end token and 6 ends a turn, both special. It has a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = {END: "<end>", TURN: "<turn>"}
    vocabulary = {names.get(token, chr(ord("a") + token)): token for token in range(LETTERS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<end>",
        additional_special_tokens=["<turn>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def bytes_tokenizer() -> Any:
    """A token is a byte, so that a character may take several, and there are tokens that never make one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({symbol: token for token, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
