import pytest
import torch

from pl_grouprl.rollout.hf.prefill import NextTokenLogits, PromptEncoder, left_padding_mask, plan_prefill, prefill
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


def test_padding_mask():
    cpu = torch.device("cpu")
    assert left_padding_mask([2, 2], 2, cpu) is None
    assert left_padding_mask([1, 3], 3, cpu).tolist() == [[0, 0, 1], [1, 1, 1]]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["qwen3", "gpt2", "qwen2_window", "qwen3_moe"])
@torch.no_grad()
def test_padded_prompts_equal_single_prompts(make_model, family, attention):
    model = make_model(family, attn_implementation=attention)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12], [13]]
    logits = NextTokenLogits(model)
    together = prefill(logits, [Prompt(prompt) for prompt in prompts])
    assert together.width == 9
    for row, prompt in enumerate(prompts):
        alone = model(torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(together.logits_PV[row], alone, atol=1e-5, rtol=1e-5)


def test_encoder_prefills_once_and_forgets(qwen3):
    calls = []

    class Recorder(NextTokenLogits):
        def __call__(self, input_ids_BS, *rest):
            calls.append(input_ids_BS.tolist())
            return super().__call__(input_ids_BS, *rest)

    encoder = PromptEncoder(Recorder(qwen3), [Prompt([1]), Prompt([2]), Prompt([3, 4])], max_tokens=2)
    (first, rows), (second, more) = encoder.select([0, 1, 1, 2], needed_later=2)
    assert (rows, more) == ([0, 1, 1], [0])
    assert (first.lengths, second.lengths) == ([1, 1], [2])
    assert calls == [[[1], [2]], [[3, 4]]]
    ((again, rows),) = encoder.select([2, 2], needed_later=3)
    assert again is second
    assert rows == [0, 0]
    assert len(calls) == 2
    assert encoder._ready == {}
