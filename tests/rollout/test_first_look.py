import pytest
import torch

from pl_grouprl.rollout import first_look
from pl_grouprl.types import Rollout


def never_called(prompts, sampling):
    raise AssertionError("sampled")


def wrong(prompts, sampling):
    return [[Rollout([1, 2], logprobs=[-50.0, -50.0])] for _ in prompts]


@torch.no_grad()
def test_what_differs_is_refused_each_time_and_what_passed_is_not_looked_at(make_model):
    model = make_model("llama")
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot sample from LlamaForCausalLM: behind its cache a log-probability"):
            first_look.check_decoding(model, wrong)
    first_look._PASSED.add(model)
    first_look.check_decoding(model, wrong)


def test_weights_that_are_not_whole_are_not_looked_at(make_model):
    class Sharded(torch.nn.Parameter):
        pass

    model = make_model("llama")
    model.lm_head.weight = Sharded(model.lm_head.weight.detach())
    first_look.check_decoding(model, never_called)
    first_look.check_decoding(make_model("llama").to("meta"), never_called)


def test_what_rounding_explains(make_model):
    model = make_model("llama")
    assert first_look._allowed(model) == 1e-3
    with torch.autocast("cpu", torch.bfloat16):
        assert first_look._allowed(model) == 0.5
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert first_look._allowed(model) == 0.1
        assert first_look._allowed(model.double()) == 1e-3
    finally:
        torch.set_float32_matmul_precision(before)
    assert first_look._allowed(model.half()) == 0.1
