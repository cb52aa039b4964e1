"""Models that would be silently wrong: refused with the reason and the remedy, before or when a context is entered."""

import pytest
import torch
from helpers.tiny_models import tiny_model

from pl_grouprl.attention import UnsupportedModelError, check_parity, check_supported, in_force, shared_prefix
from pl_grouprl.models.score import rollout_logprobs
from pl_grouprl.packing import SharedPrefixLayout
from pl_grouprl.types import Rollout, RolloutGroup

LAYOUT = SharedPrefixLayout.from_groups([(4, [2, 3])])
ROW = torch.arange(1, 10)[None]
REMEDY = "sharing.mode='repeated'"

REFUSED = {
    "mamba": ({}, "MambaForCausalLM", "its layers Mamba.* carry a state"),
    "minimax": ({}, "MiniMaxForCausalLM", "MiniMaxLightningAttention carry a state"),
    "rwkv": ({}, "RwkvForCausalLM", "its layers Rwkv.* carry a state"),
    "bloom": ({"n_head": 4, "n_layer": 2}, "BloomForCausalLM", "does not go through transformers' AttentionInterface"),
    "roberta": (
        {"is_decoder": True, "num_key_value_heads": None},
        "RobertaForCausalLM",
        "RobertaModel counts positions from the padding token's id on",
    ),
    "bart": ({"is_encoder_decoder": False, "d_model": 32}, "BartForCausalLM", "BartDecoder takes no position_ids"),
    "gpt_neox_japanese": ({}, "GPTNeoXJapaneseForCausalLM", "AttentionInterface"),
}
"""What a look at the model shows."""

REFUSED_AT_ENTRY = {
    "doge": ("DogeForCausalLM", "(selects tokens in long rows only|it mixes tokens, or selects them)"),
    "bert": ("BertLMHeadModel", "composes its attention mask with bidirectional_mask_function"),
}
"""What running a few tokens shows."""

GROUP = RolloutGroup([1, 2], [Rollout([3])])


def enter(model):
    with shared_prefix(model):
        pass


def score(model):
    return rollout_logprobs(model, [GROUP])


@pytest.mark.parametrize("family", REFUSED)
def test_refused_before_any_forward(family):
    overrides, name, reason = REFUSED[family]
    model = tiny_model(family, **overrides)
    message = f"{name} .*{reason}.*{REMEDY}"
    for call in (check_supported, shared_prefix, check_parity, score):
        with pytest.raises(UnsupportedModelError, match=message):
            call(model)
    assert not model.base_model._forward_pre_hooks
    assert rollout_logprobs(model, [GROUP], sharing="repeated")[0].shape == (1,)  # the remedy works


@pytest.mark.parametrize("family", REFUSED_AT_ENTRY)
def test_refused_when_a_context_is_entered(family):
    name, reason = REFUSED_AT_ENTRY[family]
    model = tiny_model(family)
    before = model.config._attn_implementation
    message = f"{name} .*{reason}.*{REMEDY}"
    check_supported(model)
    for call in (enter, check_parity, score):
        with pytest.raises(UnsupportedModelError, match=message):
            call(model)
    assert model.config._attn_implementation == before
    assert in_force(model) is None
    assert not model.base_model._forward_pre_hooks
    assert not model.base_model._forward_hooks
    assert rollout_logprobs(model, [GROUP], sharing="repeated")[0].shape == (1,)


def test_biases_by_distance_are_refused():
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, alibi=True)
    with pytest.raises(UnsupportedModelError, match=r"AttentionInterface|biases scores by distance"):
        check_supported(FalconForCausalLM(config))


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("gemma2", {"layer_types": ["full_attention"] * 2, "sliding_window": 8}),
        ("gpt_oss", {"layer_types": ["full_attention"] * 2, "sliding_window": 8, "num_local_experts": 4}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 4096}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ],
    ids=str,
)
def test_windows_of_some_layers_or_none_pass(family, overrides):
    model = tiny_model(family, **overrides)
    check_supported(model)
    check_parity(model).raise_if_failed()


ROWS = torch.arange(1, 21)[None].repeat(3, 1)


def test_a_layout_that_does_not_reach_every_layer_is_refused():
    """At entry, where it is so then; at the first forward, where it is so since."""
    message = f"prefix_layout reached 1 of 2 layers.*{REMEDY}"
    model = tiny_model("llama")
    with shared_prefix(model):
        model.model.layers[1].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
        for call in (lambda: model(ROW, prefix_layout=LAYOUT), lambda: model(ROWS)):
            with pytest.raises(RuntimeError, match=message):
                call()
    other = tiny_model("llama")
    other.model.layers[1].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(UnsupportedModelError, match=message):
        enter(other)


def give_to_attention(model, **arguments):
    """Change what the second layer's attention is called with."""
    model.model.layers[1].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | arguments), with_kwargs=True
    )
    return model


def refuses_at_entry_and_later(message, **arguments):
    with pytest.raises(UnsupportedModelError, match=message):
        enter(give_to_attention(tiny_model("llama"), **arguments))
    model = tiny_model("llama")
    with shared_prefix(model):
        give_to_attention(model, **arguments)
        for call in (lambda: model(ROW, prefix_layout=LAYOUT), lambda: model(ROWS)):
            with pytest.raises(NotImplementedError, match=message):
                call()


@pytest.mark.parametrize("mask", [torch.zeros(1, 4, 9, 9), torch.zeros(1, 4, 9, 9, dtype=torch.long), None], ids=str)
def test_masks_and_biases_created_by_a_layer_are_refused(mask):
    refuses_at_entry_and_later("LlamaAttention has its own mask or bias", attention_mask=mask)


def test_unknown_arguments_are_refused():
    refuses_at_entry_and_later(
        "LlamaAttention passes attention_bias, score_scale", score_scale=2.0, attention_bias=torch.ones(4)
    )


def test_a_window_that_the_mask_lacks_is_refused_where_it_matters():
    """Some attention implementations go by the keyword, some by the mask."""
    refuses_at_entry_and_later("sliding_window=5", sliding_window=5)  # of sequences of 6 tokens and more
    enter(give_to_attention(tiny_model("llama"), sliding_window=4096))


def test_layers_that_see_the_future_are_refused():
    for causal in ({"is_causal": False}, None):
        model = tiny_model("llama")
        if causal is None:
            model.model.layers[1].self_attn.is_causal = False
        with pytest.raises(UnsupportedModelError, match="LlamaAttention is not causal"):
            enter(model if causal is None else give_to_attention(model, **causal))


@pytest.mark.parametrize(("family", "option"), [("llama", "attention_dropout"), ("gpt2", "attn_pdrop")])
def test_attention_dropout_is_refused_only_in_training(family, option):
    model = tiny_model(family, **{option: 0.1})
    with shared_prefix(model):
        model(ROWS)
        model(ROW, prefix_layout=LAYOUT)
        model.train()
        for call in (lambda: model(ROWS), lambda: model(ROW, prefix_layout=LAYOUT)):
            with pytest.raises(ValueError, match="attention dropout"):
                call()
    check_parity(model).raise_if_failed()  # compared in eval mode


# tests/parity/test_families.py has more.
@pytest.mark.parametrize("family", ["gemma", "olmo2", "gpt_neox", "starcoder2", "cohere"])
def test_other_families_pass(family):
    check_parity(tiny_model(family)).raise_if_failed()
