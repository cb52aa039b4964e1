"""Policies from GGUF files: weights, tokenizer, export, and what is refused."""

from __future__ import annotations

import copy
from unittest.mock import patch

import pytest
import torch
from helpers.tiny_gguf import MERGES, SPECIAL, vocabulary, write_gguf
from helpers.versions import needs
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig

from pl_grouprl.callbacks.export_policy import export
from pl_grouprl.models.adapters import LoRAAdapter
from pl_grouprl.models.critic import PolicyCopyCritic, PretrainedCritic
from pl_grouprl.models.loading import split_gguf_path
from pl_grouprl.models.policy import PretrainedPolicy, as_policy_source, frozen_copy
from pl_grouprl.rollout.vllm.settings import write_model_folder

FILE = "tiny.Q8_0.gguf"
TEXTS = (
    "17 + 25 = 42",
    "12 aa ab  a",
    "Steps:\n\n1. Add 12 and 30",
    "x  12   3",
    "\n\n\ny\n  z\t\tz ",
    "don't I'll WE'RE they\u2019re",
    "naïve 你好 🙂 ١٢٣ ½ ²",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_end|>\n\n1",
    " leading and trailing ",
    "",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(scope="module")
def written(folder):
    """The model as the file stores it."""
    return write_gguf(folder / FILE, "Q8_0")


@pytest.fixture
def policy(folder, written):
    return PretrainedPolicy(str(folder), gguf_file=FILE)


def expected_tokenizer(*, digits):
    """Byte-level BPE over GPT-2's words, with or without digits on their own, from the vocabulary and the merges."""
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(vocabulary())}, merges))
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = [pre_tokenizers.Digits(individual_digits=True), words] if digits else [words]
    backend.pre_tokenizer = pre_tokenizers.Sequence(split)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    return backend


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
def test_weights_are_those_of_the_file(kind, tmp_path):
    expected = write_gguf(tmp_path / "a.gguf", kind).state_dict()
    model = PretrainedPolicy(str(tmp_path), gguf_file="a.gguf").load()
    assert model.dtype == torch.float32
    assert model.state_dict().keys() == expected.keys()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_dtype_and_attention(folder, written):
    model = PretrainedPolicy(str(folder), gguf_file=FILE, dtype="bfloat16", attn_implementation="eager").load()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "eager"
    expected = written.model.embed_tokens.weight.bfloat16()
    assert torch.equal(model.model.embed_tokens.weight, expected)


@needs("transformers", "5.23")
def test_no_trace_of_the_quantization_is_left(policy, written, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = policy.load(), policy.load_tokenizer()
    assert getattr(model, "hf_quantizer", None) is None
    assert not getattr(model, "is_quantized", False)
    assert not hasattr(model, "quantization_method")
    assert not hasattr(model.config, "quantization_config")
    assert not any(p.requires_grad for p in frozen_copy(model).parameters())
    copy.deepcopy(model).half().to(torch.float32)
    write_model_folder(model, tmp_path)
    export(model, tokenizer, tmp_path / "policy")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    tokens = torch.tensor([tokenizer("12 + 1\n\n2")["input_ids"]])
    torch.testing.assert_close(reloaded(tokens).logits, written(tokens).logits, rtol=0, atol=1e-5)
    assert reloaded.generation_config.eos_token_id == 2
    again = AutoTokenizer.from_pretrained(tmp_path / "policy")
    assert [again(text)["input_ids"] for text in TEXTS] == [tokenizer(text)["input_ids"] for text in TEXTS]
    assert again.chat_template == tokenizer.chat_template
    assert (again.eos_token_id, again.pad_token_id, again.bos_token_id) == (2, 2, 1)


def test_critics_and_adapters_of_a_file(folder, policy):
    model = policy.load()
    values = PolicyCopyCritic().load(model).trunk(torch.tensor([[3, 4, 5]])).last_hidden_state
    pretrained = PretrainedCritic(str(folder), gguf_file=FILE).load(model).trunk(torch.tensor([[3, 4, 5]]))
    torch.testing.assert_close(pretrained.last_hidden_state, values)
    adapted = PretrainedPolicy(str(folder), gguf_file=FILE, adapter=LoRAAdapter(r=2)).load()
    assert {name.split(".")[-3] for name, p in adapted.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}


@needs("transformers", "5.23")
@pytest.mark.parametrize(("pre", "digits"), [("smollm", True), ("starcoder", True), ("gpt-2", False)])
def test_the_tokenizer_splits_as_the_original(pre, digits, tmp_path):
    write_gguf(tmp_path / "a.gguf", pre=pre)
    tokenizer = PretrainedPolicy(str(tmp_path), gguf_file="a.gguf").load_tokenizer()
    expected = expected_tokenizer(digits=digits)
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == expected.encode(text).ids, text
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = [{"role": "user", "content": "12"}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert rendered == "<|im_start|>user\n12<|im_end|>\n<|im_start|>assistant\n"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")


@needs("transformers", "5.23")
@pytest.mark.parametrize("pre", [None, "default", "new-rules"])
def test_unknown_rules_of_splitting_are_refused(pre, tmp_path):
    write_gguf(tmp_path / "a.gguf", pre=pre)
    source = PretrainedPolicy(str(tmp_path), gguf_file="a.gguf")
    with pytest.raises(ValueError, match=repr(pre)):
        source.load_tokenizer()


def test_the_path_of_a_file_is_a_policy(folder, written):
    assert as_policy_source(f"{folder}/{FILE}") == PretrainedPolicy(str(folder), gguf_file=FILE)
    assert split_gguf_path("a.gguf") == (".", "a.gguf")
    assert split_gguf_path("/a.gguf") == ("/", "a.gguf")
    assert split_gguf_path("org/name") == ("org/name", None)


def test_the_config_is_read_once_per_file(tmp_path):
    write_gguf(tmp_path / "a.gguf")
    source = PretrainedPolicy(str(tmp_path), gguf_file="a.gguf")
    with patch("transformers.AutoConfig.from_pretrained", wraps=AutoConfig.from_pretrained) as read:
        source.load_config().vocab_size = 3
        assert source.load_config().vocab_size == len(vocabulary())
        assert read.call_count == 1
        write_gguf(tmp_path / "a.gguf", pre="a-longer-name")
        source.load_config()
        assert read.call_count == 2


@pytest.mark.parametrize(
    ("options", "error"), [({"without": "up_proj"}, "missing from it: .*up_"), ({"bad": True}, "NaN")]
)
def test_weights_are_checked(options, error, tmp_path):
    write_gguf(tmp_path / "a.gguf", **options)
    with pytest.raises(ValueError, match=error):
        PretrainedPolicy(str(tmp_path), gguf_file="a.gguf").load()
