import pytest
import torch
from helpers.tiny_models import tiny_model
from torch.utils.flop_counter import FlopCounterMode

from pl_grouprl.attention import find_decoder
from pl_grouprl.packing import ModelCost, SharedPrefixLayout

GROUPS = SharedPrefixLayout.from_groups([(10, [4, 6])])


def test_tiny_llama_by_hand():
    # Hidden 32, 4 heads of 8, 2 key/value heads, inner size 48, 2 layers: q, k, v, o and gate, up, down.
    per_layer = 32 * 32 + 32 * 16 + 32 * 16 + 32 * 32 + 3 * 32 * 48
    cost = ModelCost.of(find_decoder(tiny_model("llama")))
    assert cost.per_token == 2 * 2 * per_layer
    assert cost.per_pair == 2 * 4 * (2 * 8 + 2 * 8)  # layers x heads x (scores and weighted sum)
    # Prompt 10, rollouts 4 and 6: 20 tokens instead of 30; 55 + (40 + 10) + (60 + 21) pairs instead of 105 + 136.
    assert cost.shared(GROUPS) == 20 * cost.per_token + 186 * cost.per_pair
    assert cost.repeated(GROUPS) == 30 * cost.per_token + 241 * cost.per_pair


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
