"""The converted tokenizer, against one built from the file's vocabulary and merges as SmolLM2's own is."""

import gguf
import pytest
from helpers.smollm2 import QUESTIONS, messages, prepare, prompt_ids
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

TEXTS = {
    "digits": "In 1984, 17 + 25 = 42; 3.14159, 1,000,000 and 0x1F",
    "digits after spaces": "x  12   3\t4\n 5",
    "a list after an empty line": "Steps:\n\n1. Add 12 and 30.\n\n2. Done.\n\n\n3",
    "spaces": " a  b   c    d     ",
    "newlines": "\n\n\nx\n  y\t\tz \r\n",
    "contractions": "don't I'll WE'RE they\u2019re it's",
    "other scripts": "na\u00efve caf\u00e9 \u4f60\u597d \U0001f642 \u0661\u0662\u0663 \u00bd \u00b2 e\u0301",
    "code": "for i in range(10):\n    print(i**2)  # 100\n",
    "special tokens": "<|im_start|>user\n<|im_end|><|endoftext|> <repo_name> <jupyter_code>  <|im_end|>\n\n1",
    "almost special": "<|im_ start|> <im_end> < |im_end|>",
    "nothing": "",
}


@pytest.fixture(scope="module")
def expected():
    fields = gguf.GGUFReader(prepare()).fields
    tokens, kinds, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type", "merges"))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.CONTROL]
    assert len(special) == 17
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return backend


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_tokens(tokenizer, expected, text):
    assert tokenizer(text)["input_ids"] == expected.encode(text).ids
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_every_digit_is_a_token(tokenizer):
    assert [tokenizer.decode([token]) for token in tokenizer("a 1234")["input_ids"]] == ["a", " ", "1", "2", "3", "4"]


def test_special_tokens_and_chats(tokenizer, expected):
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    text = tokenizer.apply_chat_template(messages(QUESTIONS[0]), add_generation_prompt=True, tokenize=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<")
    assert text.endswith("<|im_end|>\n<|im_start|>user\nWhat is 6 + 7?<|im_end|>\n<|im_start|>assistant\n")
    assert prompt_ids(tokenizer, QUESTIONS[0]) == expected.encode(text).ids
    assert 100 < len(prompt_ids(tokenizer, QUESTIONS[0])) < 200
