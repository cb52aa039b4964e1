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
def test_what_differs_is_refused_each_time_and_what_passed_is_not_looked_at():
    model = tiny_model("llama")
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot sample from LlamaForCausalLM: with its cache a log-probability"):
            decoding_check.check_decoding(model, wrong)
    decoding_check._PASSED.add(model)
    decoding_check.check_decoding(model, wrong)


def test_weights_that_are_not_whole_are_not_looked_at():
    class Sharded(torch.nn.Parameter):
        pass

    model = tiny_model("llama")
    model.lm_head.weight = Sharded(model.lm_head.weight.detach())
    decoding_check.check_decoding(model, never_called)
    decoding_check.check_decoding(tiny_model("llama").to("meta"), never_called)


def test_what_rounding_explains():
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
