"""Rollouts of HFRolloutEngine, against transformers' `generate` and against scoring."""

import pytest
import torch
from helpers.rollouts import greedily, reference_logprobs
from helpers.smollm2 import QUESTIONS, prompt_ids

from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.types import SamplingConfig

CHATS = (
    "What is the capital of France?",
    "What is 17 + 25?",
    "Count from 1 to 5.",
    "Say hello in one word.",
    "Write Python code that prints the squares of 1 to 10.",
)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    def encode(text):
        chat = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)

    return [*(encode(text) for text in CHATS), *(prompt_ids(tokenizer, question) for question in QUESTIONS[:2])]


def test_greedy_equals_generate(model, tokenizer, prompts):
    sampling = SamplingConfig(max_new_tokens=24, temperature=0.0)
    groups = HFRolloutEngine(model, tokenizer).generate(prompts, sampling, num_generations=2, seed=0)
    ended = 0
    for prompt, group in zip(prompts, groups, strict=True):
        expected = greedily(model, prompt, 24)
        for rollout in group:
            assert rollout.token_ids == expected
            assert rollout.finish_reason == ("stop" if expected[-1] == tokenizer.eos_token_id else "length")
        ended += expected[-1] == tokenizer.eos_token_id
    assert 0 < ended < len(prompts)  # the end token, which is also the padding token, ends some
    assert "Paris" in groups[0][0].text


def test_log_probabilities_of_samples_are_those_of_the_policy(model, tokenizer, prompts):
    sampling = SamplingConfig(max_new_tokens=12, temperature=1.0)
    groups = HFRolloutEngine(model, tokenizer).generate(prompts[-2:], sampling, num_generations=4, seed=1)
    for prompt, group in zip(prompts[-2:], groups, strict=True):
        assert len({tuple(rollout.token_ids) for rollout in group}) > 1
        for rollout in group:
            expected = reference_logprobs(model, prompt, rollout, sampling)
            torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=1e-3, rtol=0)
