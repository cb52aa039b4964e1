"""A model that was looked at is as it was."""

from contextlib import suppress

import pytest
import torch
from helpers.tiny_models import tiny_model
from torch import nn

from pl_grouprl.utilities.modes import evaluating, examining, is_whole, nonfinite_parameters


@pytest.mark.parametrize("context", [evaluating, examining])
def test_each_submodule_gets_back_its_own_mode(context):
    model = tiny_model().train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    with suppress(RuntimeError), context(model):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        raise RuntimeError("inside")
    assert [module.training for module in model.modules()] == before
    assert torch.is_grad_enabled()


def test_a_layer_that_merges_in_eval_is_not_merged():
    class Adapter(nn.Linear):
        merged = False

        def train(self, mode=True):
            self.merged = not mode
            return super().train(mode)

    layer = Adapter(2, 2)
    with evaluating(layer):
        assert not layer.training
        assert not layer.merged
    assert layer.training
    assert not layer.merged


def test_examining_rounds_like_the_model_and_makes_no_inference_tensors():
    model = tiny_model()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), examining(model):
        assert not torch.is_inference_mode_enabled()
        assert not torch.is_autocast_enabled("cpu")
        states = model(input_ids=torch.tensor([[1, 2, 3]])).logits
    assert states.dtype == torch.float32
    assert not states.is_inference()


def test_frequencies_of_the_longest_call_are_put_back():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny_model(max_position_embeddings=8, rope_parameters=rope)
    before = model.model.rotary_emb.inv_freq.clone()
    with examining(model):
        model(input_ids=torch.arange(16)[None])
        assert not torch.equal(model.model.rotary_emb.inv_freq, before)
    assert torch.equal(model.model.rotary_emb.inv_freq, before)


def test_weights_on_meta_are_not_whole():
    assert is_whole(nn.Linear(2, 2))
    assert not is_whole(nn.Linear(2, 2, device="meta"))


# Weights that are not finite are found by name, in every dtype and in shards.


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_single_entry_is_found(dtype):
    for place in (0, 500, 1000):
        weights = torch.ones(1001)
        weights[place] = torch.nan
        named = [("good", torch.ones(3).to(dtype)), ("bad", weights.to(dtype)), ("empty", torch.ones(0).to(dtype))]
        assert nonfinite_parameters(named) == ["bad"]


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_infinities_count_and_the_largest_finite_value_does_not(value):
    largest = torch.full((4, 4), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    infinite = largest.clone()
    infinite[1, 2] = value
    named = [("codes", torch.arange(3)), ("meta", torch.empty(2, device="meta"))]
    assert nonfinite_parameters([("largest", largest), ("infinite", infinite), *named]) == ["infinite"]
    assert nonfinite_parameters([]) == []


def test_a_shard_is_looked_at_in_place_of_the_empty_whole():
    parameter = nn.Parameter(torch.empty(0))
    parameter.ds_tensor = torch.tensor([1.0, torch.nan])  # as ZeRO-3 leaves it between forward passes
    assert nonfinite_parameters([("sharded", parameter)]) == ["sharded"]
