import torch

from pl_grouprl.rollout.hf.prefill import plan_prefill
from pl_grouprl.types import Prompt


def test_plan_cuts_at_the_token_budget_and_at_uneven_lengths():
    def cut(lengths, budget, **options):
        return [list(batch) for batch in plan_prefill([Prompt([1] * n) for n in lengths], budget, **options)]

    assert cut([], 10) == []
    assert cut([4, 4, 4, 4, 4], 8) == [[0, 1], [2, 3], [4]]
    assert cut([8, 9, 9, 10], 100) == [[0, 1, 2], [3]]  # 10 exceeds 8 by more than an eighth
    assert cut([50, 60], 10) == [[0], [1]]
    assert cut([16, 18], 35) == [[0], [1]]  # 36 tokens with padding
    assert cut([8, 8, 9, 9], 100, max_padding=0.0) == [[0, 1], [2, 3]]


def test_plan_leaves_prompts_with_media_alone():
    prompts = [Prompt([1, 2], media=media) for media in ({}, {}, {"pixel_values": torch.zeros(1)}, {}, {})]
    assert [list(batch) for batch in plan_prefill(prompts, 100)] == [[0, 1], [2], [3, 4]]
