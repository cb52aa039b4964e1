"""Models that would be silently wrong: refused by name, with the reason and the remedy."""

import pytest
import torch
from helpers.tiny_models import tiny_model

from pl_grouprl.attention import UnsupportedModelError, check_parity, check_supported, shared_prefix
from pl_grouprl.models.score import rollout_logprobs
from pl_grouprl.packing import SharedPrefixLayout
from pl_grouprl.types import Rollout, RolloutGroup

LAYOUT = SharedPrefixLayout.from_groups([(4, [2, 3])])
ROW = torch.arange(1, 10)[None]
REMEDY = r"Train it with sharing='repeated', or choose a decoder with full causal attention\.$"

SMALL_STATE = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 2},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
LATENT = {
    **{"kv_lora_rank": 8, "q_lora_rank": 8, "num_key_value_heads": 4, "head_dim": 8},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
}
REFUSED = {
    "mamba": ({}, "MambaForCausalLM", "its layers Mamba.* carry a state"),
    "qwen3_next": (SMALL_STATE, "Qwen3NextForCausalLM", "its layers Qwen3NextGatedDeltaNet carry a state"),
    "minimax": ({}, "MiniMaxForCausalLM", "MiniMaxLightningAttention carry a state"),
    "gemma2": ({}, "Gemma2ForCausalLM", "config.layer_types has sliding_attention; only full_attention is supported"),
    "mistral": (
        {"sliding_window": 64},
        "MistralForCausalLM",
        "config.sliding_window=64 limits.*set it to None",
    ),
    "llama4_text": ({}, "Llama4ForCausalLM", "config.layer_types has chunked_attention"),
    "gpt_oss": ({}, "GptOssForCausalLM", "config.layer_types has sliding_attention"),
    "deepseek_v3": (LATENT, "DeepseekV3ForCausalLM", r"its attention is latent \(config.kv_lora_rank\)"),
    "bloom": ({"n_head": 4, "n_layer": 2}, "BloomForCausalLM", "does not go through transformers' AttentionInterface"),
    "stablelm": ({}, "StableLmForCausalLM", "its layers do not hand the layout on to their attention"),
    "nemotron": ({}, "NemotronForCausalLM", "its layers do not hand the layout on to their attention"),
    "roberta": (
        {"is_decoder": True, "num_key_value_heads": None},
        "RobertaForCausalLM",
        "RobertaModel counts positions from the padding token's id on",
    ),
    "bart": ({"is_encoder_decoder": False, "d_model": 32}, "BartForCausalLM", "BartDecoder takes no position_ids"),
    "doge": ({}, "DogeForCausalLM", "its attention adds a bias of its own to the scores"),
    "gptj": ({"n_head": 4, "n_layer": 2, "n_embd": 32, "rotary_dim": 8}, "GPTJForCausalLM", "AttentionInterface"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_refused_before_any_forward(family):
    overrides, name, reason = REFUSED[family]
    model = tiny_model(family, **overrides)
    message = rf"^model {name} \(model_type='{family}'\) cannot share prefixes: .*{reason}.* {REMEDY}"
    group = RolloutGroup([1, 2], [Rollout([3])])
    for call in (
        check_supported,
        shared_prefix,
        check_parity,
        lambda model: rollout_logprobs(model, [group]),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            call(model)
    assert not model.get_decoder()._forward_pre_hooks
    assert rollout_logprobs(model, [group], sharing="repeated")[0].shape == (1,)  # the remedy works


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("gemma2", {"layer_types": ["full_attention"] * 2, "sliding_window": None}, "attn_logit_softcapping caps"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 2, "sliding_window": None}, "its attention has sinks"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding_attention"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            r"\(dynamic\)",
        ),
    ],
    ids=["soft cap", "sinks", "window of some layers", "rotary frequencies"],
)
def test_refused_by_an_option_of_the_config(family, overrides, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        shared_prefix(tiny_model(family, **overrides))


@pytest.mark.parametrize(
    ("family", "overrides"),
    [("mistral", {"sliding_window": None}), ("qwen2", {"use_sliding_window": False, "sliding_window": 4096})],
)
def test_the_remedy_for_windows_works(family, overrides):
    check_parity(tiny_model(family, **overrides)).raise_if_failed()


def test_a_layout_that_does_not_reach_every_layer_is_refused_at_the_first_forward():
    model = tiny_model("llama")
    model.config.num_hidden_layers = 3  # as if a third layer had kept the layout to itself
    message = r"prefix_layout reached 2 attention modules of 3 layers in LlamaModel; .* Train this model with sharing="
    rows = torch.arange(1, 21)[None].repeat(3, 1)
    for call in (lambda: model(ROW, prefix_layout=LAYOUT), lambda: model(rows)):
        with shared_prefix(model), pytest.raises(RuntimeError, match=message):
            call()


def test_layers_with_a_bias_of_their_own_are_refused_at_the_first_forward():
    model = tiny_model("llama")
    bias = {"attention_mask": torch.zeros(1, 4, 9, 9)}
    model.model.layers[1].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | bias), with_kwargs=True
    )
    with (
        shared_prefix(model),
        pytest.raises(NotImplementedError, match="LlamaAttention adds a mask or bias of its"),
    ):
        model(ROW, prefix_layout=LAYOUT)


def test_layers_that_see_the_future_are_refused_at_the_first_forward():
    model = tiny_model("bert")
    with shared_prefix(model), pytest.raises(NotImplementedError, match="BertSelfAttention is not causal"):
        model(ROW, prefix_layout=LAYOUT)


@pytest.mark.parametrize(("family", "option"), [("llama", "attention_dropout"), ("gpt2", "attn_pdrop")])
def test_attention_dropout_is_refused_in_training_alone(family, option):
    model = tiny_model(family, **{option: 0.1})
    rows = torch.arange(1, 21)[None].repeat(3, 1)
    with shared_prefix(model):
        model(rows)
        model(ROW, prefix_layout=LAYOUT)
        model.train()
        message = r"has attention dropout 0.1.*set the config's attention dropout to 0 or call model.eval\(\)"
        for call in (lambda: model(rows), lambda: model(ROW, prefix_layout=LAYOUT)):
            with pytest.raises(ValueError, match=message):
                call()
    check_parity(model).raise_if_failed()  # compared in eval mode


@pytest.mark.parametrize(
    "family",
    [
        "gemma",
        "phi",
        "phi3",
        "glm",
        "glm4",
        "olmo2",
        "smollm3",
        "gpt_neox",
        "starcoder2",
        "cohere",
        "granite",
        "ernie4_5",
    ],
)
def test_other_families_pass(family):
    check_parity(tiny_model(family)).raise_if_failed()


@pytest.mark.parametrize("family", ["hunyuan_v1_dense", "seed_oss", "mixtral", "qwen2_moe", "minimax_m2", "glm4_moe"])
def test_more_families_pass(family):
    check_parity(tiny_model(family)).raise_if_failed()


def test_opt_passes():
    check_parity(tiny_model("opt", word_embed_proj_dim=32)).raise_if_failed()


def test_queries_scaled_by_their_place_in_the_row_are_refused():
    layers = {"layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 0], "attn_temperature_tuning": True}
    with pytest.raises(UnsupportedModelError, match="scales queries by their place in the row"):
        check_supported(tiny_model("llama4_text", **layers))
