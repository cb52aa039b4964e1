import pytest
import torch
from helpers.tiny_models import tiny_model
from torch.utils.flop_counter import FlopCounterMode

from pl_grouprl.attention import find_decoder
from pl_grouprl.models import ModelCost
from pl_grouprl.packing import SharedPrefixLayout

GROUPS = SharedPrefixLayout.from_groups([(10, [4, 6])])


def test_tiny_llama_by_hand():
    # Hidden 32, 4 heads of 8, 2 key/value heads, inner size 48, 2 layers: q, k, v, o and gate, up, down.
    per_layer = 32 * 32 + 32 * 16 + 32 * 16 + 32 * 32 + 3 * 32 * 48
    cost = ModelCost.of(find_decoder(tiny_model("llama")))
    assert cost.per_token == 2 * 2 * per_layer
    per_pair = 2 * 4 * (2 * 8 + 2 * 8)  # layers x heads x (scores and weighted sum)
    assert cost.per_pair == {None: per_pair}
    # Prompt 10, rollouts 4 and 6: 20 tokens instead of 30; 55 + (40 + 10) + (60 + 21) pairs instead of 105 + 136.
    assert cost.shared(GROUPS) == 20 * cost.per_token + 186 * per_pair
    assert cost.repeated(GROUPS) == 30 * cost.per_token + 241 * per_pair


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_linear_part_agrees_with_the_flop_counter(family):
    decoder = find_decoder(tiny_model(family))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        decoder(input_ids=torch.ones(1, 32, dtype=torch.long), use_cache=False)
    by_operator = counter.get_flop_counts()["Global"]
    linear = sum(
        count for operator, count in by_operator.items() if "mm" in str(operator) and "bmm" not in str(operator)
    )
    assert ModelCost.of(decoder).per_token * 32 == linear


@pytest.mark.parametrize(("family", "option"), [("glm4_moe", "n_routed_experts"), ("mixtral", "num_local_experts")])
def test_experts_by_other_names(family, option):
    few, many = (
        ModelCost.of(find_decoder(tiny_model(family, **{option: experts, "num_experts_per_tok": 2}))).per_token
        for experts in (4, 8)
    )
    assert many - few < 2 * 2 * 8 * 32 + 1  # a router with four rows more in each layer, and no expert


def test_experts_that_a_token_does_not_visit_are_not_counted():
    # 2 of 4 experts of inner size 16: gate and up in one matrix, down in another; and the router.
    attention = 32 * 32 + 32 * 16 + 32 * 16 + 32 * 32
    experts = 2 * (2 * 16 * 32 + 32 * 16) + 4 * 32
    assert ModelCost.of(find_decoder(tiny_model("qwen3_moe"))).per_token == 2 * 2 * (attention + experts)


def test_the_head_counts_for_scored_tokens():
    model = tiny_model("llama")
    decoder = find_decoder(model)
    alone, scored = ModelCost.of(decoder), ModelCost.of(decoder, model.get_output_embeddings())
    assert scored.per_prediction == 2 * 32 * 61
    groups = [(10, [4, 6]), (5, []), (3, [0])]
    layouts = [SharedPrefixLayout.from_groups([group]) for group in groups]
    head = 10 * scored.per_prediction
    assert scored.of_groups(groups) == [alone.shared(layouts[0]) + head, 0, alone.shared(layouts[2])]
    assert scored.of_groups(groups, "repeated") == [alone.repeated(layouts[0]) + head, 0, alone.repeated(layouts[2])]


def test_windows_by_hand():
    # Layer 1 sees 3 tokens, layer 2 all. Prompt of 4: 1 + 2 + 3 + 3 and 10 pairs. Rollout of 2 after it: 6 and 5 + 6.
    options = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
    cost = ModelCost.of(find_decoder(tiny_model("gemma2", **options)))
    per_layer = 4 * (2 * 8 + 2 * 8)
    assert cost.per_pair == {3: per_layer, None: per_layer}
    layout = SharedPrefixLayout.from_groups([(4, [2, 2])])
    assert cost.shared(layout) - 8 * cost.per_token == per_layer * (9 + 6 + 6 + 10 + 11 + 11)
    assert cost.repeated(layout) - 12 * cost.per_token == per_layer * 2 * (15 + 21)


@pytest.mark.parametrize(
    ("family", "options", "windows"),
    [
        ("mistral", {"sliding_window": 7}, {7: 2}),
        ("mistral", {"sliding_window": None}, {None: 2}),
        ("qwen2", {"sliding_window": 7, "use_sliding_window": False}, {None: 2}),
        (
            "llama4_text",
            {"attention_chunk_size": 5, "layer_types": ["chunked_attention", "full_attention"]},
            {5: 1, None: 1},
        ),
        ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}, {None: 1}),
    ],
)
def test_how_far_layers_see(family, options, windows):
    cost = ModelCost.of(find_decoder(tiny_model(family, **options)))
    assert cost.per_pair == {window: layers * 4 * 32 for window, layers in windows.items()}


def test_keys_and_values_of_latent_attention_differ_in_size():
    options = {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 12, "head_dim": 4}
    cost = ModelCost.of(find_decoder(tiny_model("deepseek_v3", **options)))
    assert cost.per_pair == {None: 2 * 4 * 2 * (6 + 4 + 12)}


def test_a_partitioned_parameter_counts_whole():
    decoder = find_decoder(tiny_model("llama"))
    whole = ModelCost.of(decoder)
    for parameter in decoder.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    assert ModelCost.of(decoder) == whole
