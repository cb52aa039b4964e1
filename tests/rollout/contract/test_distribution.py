"""Tokens are drawn from the policy's own distribution, and log-probabilities are those of it."""

import itertools

import pytest
import torch
from helpers.engines import FAMILIES, on
from helpers.rollouts import PROMPTS, changed, greedily, reference_logprobs

from pl_grouprl.types import SamplingConfig


@on(*FAMILIES)
def test_greedy_equals_generate(subject):
    groups = subject.sample(PROMPTS, 2, max_new_tokens=24, temperature=0.0)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        assert [rollout.token_ids for rollout in group] == 2 * [greedily(subject.model, prompt, 24)]
    ((rollout,),) = subject.sample([[1, 2]], max_new_tokens=200, temperature=0.0)
    assert rollout.token_ids == greedily(subject.model, [1, 2], 200)


OPTIONS = {
    "plain": {},
    "cold": {"temperature": 0.7},
    "top-k": {"temperature": 1.3, "top_k": 5},
    "top-p": {"temperature": 1.3, "top_p": 0.8},
    "min-p": {"temperature": 1.3, "min_p": 0.05},
    "top-k top-p": {"top_k": 12, "top_p": 0.9},
    "all": {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
    "penalty": {"temperature": 1.3, "repetition_penalty": 1.4},
    "penalty and filters": {"top_k": 12, "top_p": 0.9, "repetition_penalty": 0.6},
    "greedy": {"temperature": 0.0},
    "greedy with penalty": {"temperature": 0.0, "repetition_penalty": 1.4},
    "greedy with filters": {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1},
}


def assert_logprobs_of_a_fresh_forward(subject, **options):
    sampling = {"max_new_tokens": 20, "stop_token_ids": (4, 9), **options}
    groups = subject.sample(PROMPTS, 4, seed=5, **sampling)
    is_hf = subject.engine_name == "hf"
    whole = SamplingConfig(
        temperature=sampling.get("temperature", 1.0), repetition_penalty=sampling.get("repetition_penalty", 1.0)
    )
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for rollout in group:
            own = SamplingConfig(**sampling)
            drawn = reference_logprobs(subject.model, prompt, rollout, own, min_p_first=not is_hf)  # as documented
            assert drawn.isfinite().all()
            expected = reference_logprobs(subject.model, prompt, rollout, whole) if is_hf else drawn
            torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@on("qwen3")
def test_logprobs_equal_a_fresh_forward(subject, options):
    assert_logprobs_of_a_fresh_forward(subject, **options)


@on(*[family for family in FAMILIES if family != "qwen3"])
def test_logprobs_of_other_families_equal_a_fresh_forward(subject):
    for options in ({}, OPTIONS["top-k top-p"]):
        assert_logprobs_of_a_fresh_forward(subject, **options)


@on("qwen3")
def test_long_prompts_with_the_same_prefix(subject):
    """Longer than a block of a prefix cache; asked for twice."""
    beginning = [(7 * place) % 24 for place in range(150)]
    prompts = [beginning, [*beginning, 1, 2, 3], [*beginning, *beginning[:70]], beginning[:-1]]
    for seed in (0, 1):
        for prompt, group in zip(prompts, subject.sample(prompts, 3, seed=seed, max_new_tokens=8), strict=True):
            for rollout in group:
                expected = reference_logprobs(subject.model, prompt, rollout, SamplingConfig())
                torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=1e-4, rtol=0)


@on("qwen3")
def test_first_tokens_follow_the_model(subject):
    count = 4000
    (group,) = subject.sample([[5, 6]], count, seed=8, max_new_tokens=1, temperature=2.0, top_k=6)
    with torch.no_grad():
        logits = subject.model(torch.tensor([[5, 6]])).logits[0, -1] / 2.0
    kept = logits.topk(6)
    expected = count * kept.values.softmax(dim=-1)
    seen = torch.bincount(torch.tensor([rollout.token_ids[0] for rollout in group]), minlength=len(logits))
    assert seen[kept.indices].sum() == count
    assert ((seen[kept.indices] - expected) ** 2 / expected).sum() < 20.5  # 0.999 quantile, 5 degrees of freedom


@on("qwen3")
def test_later_tokens_are_independent_of_earlier_draws(subject):
    """Pairs of tokens: a stream that begins anew at each step draws the same quantile twice."""
    count = 4000
    (group,) = subject.sample([[5, 6]], count, seed=9, max_new_tokens=2, temperature=2.0, top_k=2)
    pairs = [tuple(rollout.token_ids) for rollout in group]
    with torch.no_grad():
        firsts = subject.model(torch.tensor([[5, 6]])).logits[0, -1].div(2).topk(2)
        expected = {}
        for first, share in zip(firsts.indices.tolist(), firsts.values.softmax(-1).tolist(), strict=True):
            seconds = subject.model(torch.tensor([[5, 6, first]])).logits[0, -1].div(2).topk(2)
            for second, rest in zip(seconds.indices.tolist(), seconds.values.softmax(-1).tolist(), strict=True):
                expected[first, second] = count * share * rest
    assert set(pairs) <= set(expected)
    assert sum((pairs.count(pair) - mean) ** 2 / mean for pair, mean in expected.items()) < 16.3  # 0.999, 3 degrees


@on("qwen3")
def test_changed_weights_are_seen(subject):
    ((before,),) = subject.sample([[1, 2]], max_new_tokens=6)
    with changed(subject.model.model.layers[0].mlp.down_proj.weight, lambda weight: weight.mul_(-2), subject.sync):
        ((after,),) = subject.sample([[1, 2]], max_new_tokens=6)
        assert before.logprobs != after.logprobs
        expected = reference_logprobs(subject.model, [1, 2], after, SamplingConfig())
        torch.testing.assert_close(torch.tensor(after.logprobs), expected, atol=1e-4, rtol=0)
    ((again,),) = subject.sample([[1, 2]], max_new_tokens=6)
    assert (again.token_ids, again.logprobs) == (before.token_ids, before.logprobs)


@on("qwen3")
def test_values_are_plain_numbers(subject):
    for rollout in itertools.chain(*subject.sample(PROMPTS, 2, max_new_tokens=3)):
        assert {type(token) for token in rollout.token_ids} == {int}
        assert {type(value) for value in rollout.logprobs} == {float}
        assert max(rollout.logprobs) <= 0
        assert (rollout.text, rollout.reward, rollout.loss_mask, rollout.finish_reason) == (None, None, None, "length")
