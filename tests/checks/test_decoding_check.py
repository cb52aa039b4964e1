from functools import partial

import pytest
import torch
from helpers.tiny_models import tiny_model

from pl_grouprl.checks import sampling as decoding_check
from pl_grouprl.types import Rollout


def never_called(prompts, sampling):
    raise AssertionError("sampled")


def wrong(prompts, sampling):
    return [[Rollout([1, 2], logprobs=[-50.0, -50.0])] for _ in prompts]


@torch.no_grad()
def test_failures_are_refused_each_time_and_passed_models_are_not_checked_again():
    model = tiny_model("llama")
    for _ in range(2):
        with pytest.raises(ValueError, match="LlamaForCausalLM"):
            decoding_check.check_decoding(model, wrong)
    decoding_check._PASSED[model] = {torch.float32}
    decoding_check.check_decoding(model, wrong)


def test_models_with_partial_weights_are_not_checked():
    class Sharded(torch.nn.Parameter):
        pass

    model = tiny_model("llama")
    model.lm_head.weight = Sharded(model.lm_head.weight.detach())
    decoding_check.check_decoding(model, never_called)
    decoding_check.check_decoding(tiny_model("llama").to("meta"), never_called)


def test_rounding_is_accepted():
    model = tiny_model("llama")
    assert decoding_check._allowed(model) == 1e-3
    with torch.autocast("cpu", torch.bfloat16):
        assert decoding_check._allowed(model) == 0.5
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert decoding_check._allowed(model) == 0.1
        assert decoding_check._allowed(model.double()) == 1e-3
    finally:
        torch.set_float32_matmul_precision(before)
    assert decoding_check._allowed(model.half()) == 0.1


@torch.no_grad()
def test_continuing_caches_is_tested_once(caplog):
    exact, inexact = tiny_model("llama"), tiny_model("llama")

    def turns(model, prompts, results, sampling):
        tokens = [*prompts[0].token_ids, *results[0]]
        logprobs = model(torch.tensor([tokens])).logits[0, -1].log_softmax(dim=-1)
        return [(tokens, Rollout([3], logprobs=[float(logprobs[3]) + (0.1 if model is inexact else 0.0)]))]

    def not_again(*args):
        raise AssertionError("sampled")

    with caplog.at_level("INFO"):
        for model in (exact, inexact):
            first = decoding_check.continues_exactly(model, partial(turns, model))
            assert first == decoding_check.continues_exactly(model, not_again) == (model is exact)
    (record,) = caplog.records
    assert "LlamaForCausalLM differ by 1.0e-01" in record.message


class Selecting(torch.nn.Module):
    """Adds the best of the tokens that a token sees, if those are many."""

    def __init__(self, many):
        super().__init__()
        self.many, self.selected = many, 0

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        length = hidden_states.shape[1]
        if length < self.many:
            return hidden_states
        hidden = torch.ones(length, length).triu(1).bool()
        scores = hidden_states.sum(dim=-1)[:, None].expand(-1, length, -1).masked_fill(hidden, -torch.inf)
        best = scores.topk(4, dim=-1).values
        self.selected = best.shape[-1]
        sums = torch.where(best.isfinite(), best, 0.0).sum(dim=-1)
        return hidden_states + torch.where(torch.arange(length) + 1 < self.many, 0.0, sums)[..., None]


def selecting_model(many):
    model = tiny_model("llama")
    model.model.layers[0].mlp = torch.nn.Sequential(model.model.layers[0].mlp, Selecting(many))
    return model


def sampled(model, prompts, sampling):
    rows = [torch.tensor([prompt.token_ids]) for prompt in prompts]
    logprobs = [float(model(row).logits[0, -1].float().log_softmax(dim=-1)[3]) for row in rows]
    return [[Rollout([3], logprobs=[logprob])] for logprob in logprobs]


@torch.no_grad()
@pytest.mark.parametrize(("many", "tries"), [(9, 1), (70, 2), (500, 3)])
def test_longer_prompts_are_tried_until_every_layer_has_selected_tokens(many, tries):
    model, calls = selecting_model(many), []

    def sample(prompts, sampling):
        calls.append([len(prompt.token_ids) for prompt in prompts])
        return sampled(model, prompts, sampling)

    decoding_check.check_decoding(model, sample)
    assert calls == [[factor * length for length in decoding_check.LENGTHS] for factor in (1, 8, 64)][:tries]
    assert model.model.layers[0].mlp[1].selected == 3


@torch.no_grad()
def test_half_precision_leaves_the_number_of_selected_tokens():
    model = selecting_model(9).bfloat16()
    decoding_check.check_decoding(model, partial(sampled, model))
    assert model.model.layers[0].mlp[1].selected == 4


@torch.no_grad()
@pytest.mark.parametrize(("many", "limit"), [(10**6, None), (70, 60)])
def test_a_selection_that_cannot_be_tried_is_refused(many, limit):
    model = selecting_model(many)
    with pytest.raises(ValueError, match=r"Selecting.forward"):
        decoding_check.check_decoding(model, partial(sampled, model), limit=limit)


def test_a_model_that_fails_with_a_cache_is_refused():
    def fails(prompts, sampling):
        raise AttributeError("no layers")

    with pytest.raises(ValueError, match="AttributeError: no layers"):
        decoding_check.check_decoding(tiny_model("llama"), fails)
