"""The dtype in which HFRolloutEngine samples from a policy with float32 weights."""

import copy

import pytest
import torch
from helpers.tiny_models import tiny_model

from pl_grouprl.models import LoRAAdapter
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.rollout.hf import attention
from pl_grouprl.types import SamplingConfig
from pl_grouprl.utilities.modes import computing_in

PROMPTS = [[5, 7, 11, 13, 17, 19, 23, 29], [31, 37, 41]]


def policy(with_adapter):
    model = tiny_model("qwen3", tie_word_embeddings=True)
    if with_adapter:
        model = LoRAAdapter(r=2).add_to(model)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.data.normal_(generator=torch.Generator().manual_seed(0))
    return model


def in_bfloat16(model):
    """A copy whose parameters are bfloat16; `to` would convert the rotary frequencies, too."""
    model = copy.deepcopy(model)
    for weight in model.parameters():
        weight.data = weight.data.bfloat16()
    return model


def sample(model, *, autocast=None, **options):
    engine = HFRolloutEngine(model, **options)
    engine.autocast_dtype = autocast
    groups = engine.generate(PROMPTS, SamplingConfig(max_new_tokens=24), num_generations=3, seed=0)
    return [(rollout.token_ids, rollout.logprobs) for group in groups for rollout in group]


@pytest.fixture
def seen(monkeypatch):
    """Dtypes of the inputs of all linear layers, and whether attention read shared prompts."""
    dtypes, linear, attend = set(), torch.nn.functional.linear, attention.attend_runs

    def recorded(input, weight, bias=None):
        dtypes.update((input.dtype, weight.dtype))
        return linear(input, weight, bias)

    def shared(*args, **kwargs):
        dtypes.add("shared prompts")
        return attend(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "linear", recorded)
    monkeypatch.setattr(attention, "attend_runs", shared)
    return dtypes


@pytest.mark.parametrize("with_adapter", [False, True])
def test_bf16_mixed_samples_exactly_like_bfloat16_weights(with_adapter, seen):
    model = policy(with_adapter)
    weights = dict(model.named_parameters())
    found = sample(model, autocast=torch.bfloat16)
    assert seen == {torch.bfloat16, "shared prompts"}
    assert found == sample(in_bfloat16(model))
    assert found != sample(model)
    assert all(now is weights[name] for name, now in model.named_parameters())
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


@pytest.mark.parametrize("with_adapter", [False, True])
def test_copies_are_those_of_the_current_weights(with_adapter):
    model = policy(with_adapter)
    engine_options = {"autocast": torch.bfloat16}
    before = sample(model, **engine_options)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    for weight in trained:
        weight.grad = torch.ones_like(weight) * 0.05
    optimizer.step()
    after = sample(model, **engine_options)
    assert after != before
    assert after == sample(in_bfloat16(model))


def test_what_is_set_is_kept(seen):
    model = policy(False)
    exact = sample(model)
    assert sample(model, autocast=torch.bfloat16, dtype="float32") == exact
    assert sample(model, autocast=torch.float16) == exact  # whose range is too small for some models
    assert seen <= {torch.float32, "shared prompts"}
    assert sample(model, dtype="bfloat16") == sample(in_bfloat16(model))
    assert sample(in_bfloat16(model), dtype="float32") != sample(in_bfloat16(model))


class Wide(torch.nn.Module):
    """A norm that multiplies by its weight in float32 alone."""

    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(size))

    def forward(self, hidden):
        return (hidden.float() @ self.weight).to(hidden.dtype)


def test_a_model_that_does_not_run_in_bfloat16_is_sampled_in_its_own_dtype(caplog):
    model = policy(False)
    model.model.norm = Wide(32)
    exact = sample(model)
    with caplog.at_level("INFO"):
        assert sample(model, autocast=torch.bfloat16) == exact
        assert sample(model, autocast=torch.bfloat16) == exact
    assert [record.message for record in caplog.records if "because bfloat16 fails" in record.message] != []
    with pytest.raises(RuntimeError, match="same dtype"):
        sample(model, dtype="bfloat16")


def test_transformers_own_list_of_float32_weights_is_heeded():
    model = tiny_model("llama")
    model._keep_in_fp32_modules_strict = {"norm", "self_attn.q_proj"}
    with computing_in(model, torch.bfloat16):
        wide = {name for name, weight in model.named_parameters() if weight.dtype == torch.float32}
    assert wide == {
        "model.norm.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
    }


def test_sequences_are_bounded_by_free_memory_unless_their_number_is_set(monkeypatch):
    asked = []

    def bound(count, needed, free):
        asked.append((count, needed))
        return 2

    monkeypatch.setattr("pl_grouprl.rollout.hf.engine.sequences_at_once", bound)
    model = policy(False)
    found = sample(model, autocast=torch.bfloat16)
    # 8 + 24 tokens of 2 layers with 2 heads of 8 for keys and values in bfloat16, and 61 logits
    assert asked == [(6, 32 * 2 * 2 * 2 * 8 * 2 + 24 * 61)]
    assert [tokens for tokens, _ in found] == [
        tokens for tokens, _ in sample(model, autocast=torch.bfloat16, max_sequences=2)
    ]
    assert len(asked) == 1
