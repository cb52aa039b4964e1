"""The engine's prefill, copies and batches against forwards of single sequences without a cache."""

import pytest
from helpers.sampling_oracle import FAMILIES, assert_sampled, tiny_decoder

from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.rollout.hf.prefill import counts_padding
from pl_grouprl.types import SamplingConfig

PROMPTS = [
    [5, 9, 13, 2, 8, 11, 4, 7, 1, 3, 6],
    [1, 2, 3],
    [4, 8, 15, 16, 23, 2, 1, 7, 7, 3],
    [7],
    [5, 9, 13, 2, 8, 11, 4, 7, 1, 3, 6],
    [3, 2, 1],
]
"""One twice, two of equal length, two that share a padded batch, one beyond every window, one of a single token."""


def check(model, prompts, sampling, num_generations, **options):
    groups = HFRolloutEngine(model, **options).generate(prompts, sampling, num_generations=num_generations, seed=3)
    for index, (prompt, group) in enumerate(zip(prompts, groups, strict=True)):
        for generation, rollout in enumerate(group):
            assert_sampled(model, prompt, rollout, sampling, name=(index, generation), seed=3)
    return [rollout for group in groups for rollout in group]


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_equals_a_full_forward(family):
    model = tiny_decoder(family)
    sampling = SamplingConfig(max_new_tokens=9, temperature=2.0, stop_token_ids=(0, 6, 10, 14, 20))
    rollouts = check(model, PROMPTS, sampling, 2, max_sequences=5)
    assert len({len(rollout.token_ids) for rollout in rollouts}) > 1  # sequences leave the batch
    check(model, PROMPTS[:4], SamplingConfig(max_new_tokens=9, temperature=0.0), 1)


def test_queries_scaled_by_the_column_keep_prompts_of_other_lengths_apart():
    model = tiny_decoder("llama4_text", floor_scale=4, attn_scale=2.0)
    for max_sequences in (None, 3):
        check(model, PROMPTS, SamplingConfig(max_new_tokens=6), 2, max_sequences=max_sequences)
    assert counts_padding(model, 4)
    assert not counts_padding(model, 3)
    assert not counts_padding(tiny_decoder("llama4_text", attn_temperature_tuning=False), 100)
    assert not counts_padding(tiny_decoder("gpt2"), 100)
