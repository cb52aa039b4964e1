"""Which heads are plain matrices, and that scoring them as such changes nothing."""

import sys

import pytest
import torch
from helpers.tiny_models import random_groups, tiny_model
from torch import nn

from pl_grouprl.attention import shared_prefix
from pl_grouprl.models.score import plain_weight, score
from pl_grouprl.packing import pack


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma"])
def test_a_plain_head_is_recognized_and_unchanged(family):
    model = tiny_model(family)
    head = model.get_output_embeddings()
    assert plain_weight(model, torch.float32) is head.weight
    assert "forward" not in vars(head)


def test_hidden_states_of_another_dtype_are_cast_by_the_model():
    model = tiny_model("llama")
    assert plain_weight(model, torch.bfloat16) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert plain_weight(model, torch.bfloat16) is model.lm_head.weight


def test_in_inference_mode():
    model = tiny_model("llama")
    batch = pack(random_groups(0, [(9, [4, 0, 7]), (3, [1])]))
    with shared_prefix(model):
        with torch.no_grad():
            expected = score(model, batch, entropy=True)
        with torch.inference_mode():
            assert plain_weight(model, torch.float32) is model.lm_head.weight
            actual = score(model, batch, entropy=True)
    torch.testing.assert_close(actual[:2], expected[:2], atol=0, rtol=0)


def scaled(family, name, value):
    more = {"layer_types": ["full_attention"] * 2} if family == "gemma2" else {}
    return tiny_model(family, **{name: value}, **more)


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [("cohere", "logit_scale", 0.3), ("granite", "logits_scaling", 3.0), ("gemma2", "final_logit_softcapping", 0.5)],
)
def test_a_head_that_does_more_is_not_plain(family, name, value):
    assert plain_weight(scaled(family, name, value), torch.float32) is None


class Doubled(nn.Linear):
    """A subclass may compute anything: adapters, quantised and sharded layers."""

    def forward(self, states):
        return 2 * super().forward(states)


def with_bias(model, head):
    head.bias = nn.Parameter(torch.zeros(len(head.weight)))


def with_hook(model, head):
    head.register_forward_hook(lambda module, args, logits: logits + 1)


def with_pre_hook(model, head):
    head.register_forward_pre_hook(lambda module, args: None)


def with_own_forward(model, head):
    head.forward = head.forward


def of_a_subclass(model, head):
    model.set_output_embeddings(Doubled(head.in_features, head.out_features, bias=False))


def changed_in_place(model, head):
    forward = model.forward

    def changed(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits.mul_(2)
        return output

    model.forward = changed


def without_head(model, head):
    model.set_output_embeddings(None)


@pytest.mark.parametrize(
    "change",
    [with_bias, with_hook, with_pre_hook, with_own_forward, of_a_subclass, changed_in_place, without_head],
)
def test_a_changed_head_is_not_plain(change):
    model = tiny_model("llama")
    change(model, model.get_output_embeddings())
    assert plain_weight(model, torch.float32) is None


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])  # gpt2: the weight is that of the embeddings too
def test_scoring_by_blocks_and_by_chunks_agree(family, frozen, monkeypatch):
    model = tiny_model(family).double()
    model.get_output_embeddings().weight.requires_grad_(not frozen)
    batch = pack(random_groups(0, [(9, [4, 0, 7]), (3, [1])]))
    results = []
    for known in (True, False):
        if not known:
            monkeypatch.setattr(sys.modules["pl_grouprl.models.score"], "plain_weight", lambda model, dtype: None)
        model.zero_grad()
        with shared_prefix(model):
            scores = score(model, batch, temperature=0.8, entropy=True, score_norm=True)
            scores.logprobs_N.square().sum().backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        results.append((scores[:3], grads))
    (one, one_grads), (other, other_grads) = results
    torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-10)
    assert one_grads.keys() == other_grads.keys()
    for name, gradient in one_grads.items():
        torch.testing.assert_close(gradient, other_grads[name], atol=1e-11, rtol=1e-9)
