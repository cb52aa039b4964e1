"""The engine's prefill, copies and batches against forwards of single sequences without a cache."""

import pytest
from helpers.sampling_oracle import FAMILIES, assert_sampled, tiny_decoder

from pl_grouprl.rollout import HFRolloutEngine
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


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_equals_a_forward_over_everything(family, temperature):
    model = tiny_decoder(family)
    sampling = SamplingConfig(max_new_tokens=12, temperature=temperature, stop_token_ids=(0, 6, 10, 14, 20))
    engine = HFRolloutEngine(model, max_sequences=5)
    groups = engine.generate(PROMPTS, sampling, num_generations=2, seed=3)
    for index, (prompt, group) in enumerate(zip(PROMPTS, groups, strict=True)):
        for generation, rollout in enumerate(group):
            assert_sampled(model, prompt, rollout, sampling, name=(index, generation), seed=3)
    lengths = {len(rollout.token_ids) for group in groups for rollout in group}
    assert len(lengths) > 1 or temperature == 0.0  # sequences leave the batch
