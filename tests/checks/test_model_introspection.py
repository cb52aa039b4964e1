"""What a short run shows: hidden size, causality, and what a score head reads."""

import pytest
import torch
from helpers.tiny_models import FAMILIES, tiny_model
from torch import nn

from pl_grouprl.attention import find_decoder, in_force, shared_prefix
from pl_grouprl.checks.model_introspection import check_causal, check_score_head, hidden_size

_TINY = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def encoder_classifier(family):
    from transformers import AutoConfig, AutoModelForSequenceClassification

    options = {
        **_TINY,
        **({"pooler_hidden_size": 32} if family == "deberta-v2" else {}),
        **({"d_inner": 48} if family == "xlnet" else {}),
        "pad_token_id": 0,
    }
    if family == "xlnet":
        options = {"d_model": 32, "n_layer": 2, "n_head": 4, **options}
    config = AutoConfig.for_model(family, **options)
    config.num_labels = 1
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()


def decoder_classifier(family, labels=1, dtype=torch.float32):
    from transformers import AutoModelForSequenceClassification

    config = tiny_model(family).config
    config.num_labels = labels
    return AutoModelForSequenceClassification.from_config(config, dtype=dtype).eval()


def linear_child(model):
    (head,) = [child for child in model.children() if isinstance(child, nn.Linear)]
    return head


def narrow_opt():
    """States of width 32 inside and 16 outside."""
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"vocab_size": 61, "hidden_size": 32, "word_embed_proj_dim": 16, "ffn_dim": 48, "num_hidden_layers": 1}
    return OPTForCausalLM(OPTConfig(**sizes, num_attention_heads=4, max_position_embeddings=64, pad_token_id=1))


def test_hidden_size_is_that_of_the_returned_states():
    assert hidden_size(find_decoder(tiny_model("llama"))) == 32
    assert hidden_size(find_decoder(narrow_opt())) == 16


@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, torch.float32) for family in FAMILIES), ("qwen2", torch.bfloat16)]
)
def test_decoders_pass(family, dtype):
    check_causal(find_decoder(tiny_model(family, dtype=dtype)), "Source")
    if family != "qwen3_moe":
        for labels in (1, 3):
            model = decoder_classifier(family, labels, dtype)
            check_score_head(model, linear_child(model), "Source")


@pytest.mark.parametrize("family", ["bert", "modernbert", "deberta-v2", "xlnet"])
def test_encoders_are_refused(family):
    model = encoder_classifier(family)
    name = type(model).__name__
    with pytest.raises(ValueError, match=f"Source: {name} scores"):
        check_score_head(model, linear_child(model), "Source")
    with pytest.raises(ValueError, match=r"Source: .* is not causal"):
        check_causal(find_decoder(model), "Source")


def test_a_head_after_another_layer_or_with_nan_is_refused():
    model = decoder_classifier("llama")
    head = nn.Linear(32, 1)
    with pytest.raises(ValueError, match="scores the tokens"):
        check_score_head(model, head, "Source")
    model.score.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="nan"):
        check_score_head(model, model.score, "Source")
    model.score.weight.data.zero_()
    check_score_head(model, model.score, "Source")


def test_a_probe_leaves_no_trace():
    model = tiny_model("gpt2", attn_pdrop=0.5, resid_pdrop=0.5).train()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    random_state = torch.get_rng_state()
    with shared_prefix(model) as context, torch.autocast("cpu", dtype=torch.bfloat16):
        assert hidden_size(model.transformer) == 32
        check_causal(model.transformer, "Source")
        assert in_force(model) is context
        assert context.last_call is None  # not in the report of what was shared
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_few_tokens_are_enough():
    check_causal(find_decoder(tiny_model("llama", vocab_size=3)), "Source")
    check_causal(find_decoder(tiny_model("llama", vocab_size=3, pad_token_id=None)), "Source")
