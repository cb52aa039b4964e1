"""A model that was looked at is as it was."""

from contextlib import suppress

import pytest
import torch
from helpers.tiny_models import tiny_model
from torch import nn

from pl_grouprl.utilities.modes import evaluating, examining, is_whole


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
