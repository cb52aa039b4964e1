"""Which requests are served, which are refused, and in which words; what a call leaves as it was."""

import gc
import math
from typing import get_args

import pytest
import torch
from helpers.engines import ENGINES, new_engine, on, surroundings
from helpers.rollouts import PROMPTS, changed

from pl_grouprl.rollout import RolloutEngine
from pl_grouprl.rollout.engine import Capability, declares
from pl_grouprl.types import SamplingConfig


@on("qwen3")
def test_prompts_come_back_in_order(subject):
    prompts = [[token] * length for token in range(1, 6) for length in (7, 1, 4)]
    together = subject.sample(prompts, max_new_tokens=5, temperature=0.0)
    for prompt, group in zip(prompts, together, strict=True):
        ((alone,),) = subject.sample([prompt], max_new_tokens=5, temperature=0.0)
        assert [rollout.token_ids for rollout in group] == [alone.token_ids]


@on("qwen3")
def test_the_longest_request_is_served(subject):
    for length, max_new_tokens in ((250, 6), (255, 1), (1, 255)):
        ((rollout,),) = subject.sample([[1] * length], max_new_tokens=max_new_tokens)
        assert len(rollout.token_ids) == max_new_tokens
        assert rollout.finish_reason == "length"


@on("qwen3")
def test_prompts_may_be_any_sequence_and_binding_again_is_harmless(subject):
    assert subject.sample([], 3) == []
    expected = subject.sample([[1, 2], [3]], max_new_tokens=4)
    assert subject.sample(((1, 2), (3,)), max_new_tokens=4) == expected
    subject.engine.bind(subject.model, subject.tokenizer)
    assert subject.sample([[1, 2], [3]], max_new_tokens=4) == expected


@pytest.mark.parametrize(
    ("prompts", "num_generations", "options", "message"),
    [
        ([[1], []], 1, {}, r"prompts\[1\] is empty"),
        ([[1], [1] * 250], 1, {"max_new_tokens": 7}, r"prompts\[1\].*max_new_tokens=7.*max_position_embeddings=256"),
        ([[1, 24]], 1, {}, "24.*vocab_size=24"),
        ([[1, -1]], 1, {}, "from -1"),
        ([[1]], 1, {"stop": ("x",)}, "no tokenizer"),
    ],
)
@on("qwen3")
def test_requests_that_cannot_be_served(subject, prompts, num_generations, options, message):
    with pytest.raises(ValueError, match=message):
        subject.sample(prompts, num_generations, **{"max_new_tokens": 4, **options})
    assert len(subject.sample([[1]], max_new_tokens=2)) == 1  # goes on serving


@pytest.mark.parametrize("temperature", [0.005, 2.5])
@on("qwen3", engines=("vllm",))
def test_temperatures_that_vllm_does_not_support_are_refused(subject, temperature):
    with pytest.raises(ValueError, match=rf"SamplingConfig\.temperature is {temperature}"):
        subject.sample(PROMPTS, 2, max_new_tokens=2, temperature=temperature)
    for served in (0.01, 2.0):
        assert len(subject.sample([[1]], max_new_tokens=2, temperature=served)) == 1


@pytest.mark.parametrize("name", [pytest.param(name, marks=tried.marks) for name, tried in ENGINES.items()])
def test_an_engine_without_a_policy_says_so(name):
    engine = new_engine(name)
    assert isinstance(engine, RolloutEngine)
    assert {capability for capability in get_args(Capability) if declares(engine, capability)} == (
        ENGINES[name].capabilities
    )
    with pytest.raises(ValueError, match=r"has no model; .*bind"):
        engine.generate([[1]], SamplingConfig(), num_generations=1, seed=0)


@on("qwen3")
def test_logits_that_are_not_finite_are_reported(subject):
    with changed(subject.model.model.norm.weight, lambda weight: weight.fill_(math.nan), subject.sync):
        for temperature in (0.0, 1.0):
            with pytest.raises(FloatingPointError, match="not finite"):
                subject.sample([[1, 2]], max_new_tokens=2, temperature=temperature)
    assert len(subject.sample([[1, 2]], max_new_tokens=2)) == 1


@on("qwen3")
def test_the_process_is_left_as_it_was(subject):
    """vLLM takes a process for its own."""
    before, after = subject.surroundings
    assert after == before
    gc.unfreeze()  # the number of frozen objects can be compared only if there are none
    before = surroundings()
    subject.sample(PROMPTS, 2, max_new_tokens=4)
    subject.sync()
    after = surroundings()
    gc.freeze()
    assert after == before


@on("qwen3")
def test_the_policy_is_left_as_it_was(subject):
    model = subject.model
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    try:
        subject.sample(PROMPTS, 2, max_new_tokens=4)
        subject.sync()
        assert [module.training for module in model.modules()] == modes
        assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
        inputs = torch.tensor([[1, 2, 3]])
        model(inputs, labels=inputs).loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    finally:
        model.eval()
        model.zero_grad(set_to_none=True)
