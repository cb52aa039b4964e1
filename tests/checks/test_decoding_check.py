from functools import partial

import pytest
import torch
from helpers.tiny_models import tiny_model

from pl_grouprl.checks import decoding_check
from pl_grouprl.types import Rollout


def never_called(prompts, sampling):
    raise AssertionError("sampled")


def wrong(prompts, sampling):
    return [[Rollout([1, 2], logprobs=[-50.0, -50.0])] for _ in prompts]


@torch.no_grad()
def test_failures_are_refused_each_time_and_passed_models_are_not_checked_again():
    model = tiny_model("llama")
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot sample from LlamaForCausalLM: with its cache a log-probability"):
            decoding_check.check_decoding(model, wrong)
    decoding_check._PASSED.add(model)
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
    assert "encodes every turn of an episode from the start: log-probabilities of LlamaForCausalLM" in record.message
    assert "differ by 1.0e-01" in record.message
