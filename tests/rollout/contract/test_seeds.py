"""The seed decides, and nothing but a rollout's own place has a part in its random numbers."""

import random

import numpy as np
import pytest
import torch
from helpers.engines import on
from helpers.rollouts import PROMPTS, assert_same, ids


@on("qwen3")
def test_seed_decides(subject):
    """Numbers such as seed + index would give the second rollout of seed 0 to the first one of seed 1."""
    prompts = [*PROMPTS, PROMPTS[1], PROMPTS[1]]
    first, again = (subject.sample(prompts, 3, seed=1, max_new_tokens=12) for _ in range(2))
    assert_same(first, again)
    others = [subject.sample(prompts, 3, seed=seed, max_new_tokens=12) for seed in (0, 2, 3, 2**31 - 1, 2**40 + 1)]
    everything = [tuple(tokens) for groups in (first, *others) for group in ids(groups) for tokens in group]
    assert len(set(everything)) == len(everything)


@on("qwen3")
def test_other_prompts_and_rollouts_change_nothing(subject):
    options = {"seed": 1, "max_new_tokens": 16, "stop_token_ids": (4,)}
    whole = subject.sample(PROMPTS, 4, **options)
    fewer = subject.sample(PROMPTS[:2], 3, **options)
    assert_same([group[:3] for group in whole[:2]], fewer)
    alone = subject.sample(PROMPTS[:1], 1, **options)
    assert_same([whole[0][:1]], alone)


@on("qwen3", needs=("takes_prompt_indices",))
def test_prompt_indices_name_the_random_numbers(subject):
    options = {"seed": 1, "max_new_tokens": 16, "stop_token_ids": (4,)}
    whole = subject.sample(PROMPTS, 3, **options)
    some = [4, 1, 2]
    assert_same(
        [whole[index] for index in some],
        subject.sample([PROMPTS[index] for index in some], 3, prompt_indices=some, **options),
    )
    assert ids(subject.sample(PROMPTS, 3, prompt_indices=[7, 8, 9, 10, 11], **options)) != ids(whole)


@on("qwen3")
def test_a_repeated_prompt_gives_different_rollouts(subject):
    groups = subject.sample([PROMPTS[0], PROMPTS[4], PROMPTS[0]], 4, max_new_tokens=30)
    assert len({tuple(tokens) for tokens in ids(groups)[0] + ids(groups)[2]}) == 8
    greedy = subject.sample([PROMPTS[0], PROMPTS[4], PROMPTS[0]], 2, max_new_tokens=30, temperature=0.0)
    assert ids(greedy)[0] == ids(greedy)[2]


@on("qwen3")
def test_the_seed_counts_for_all_kinds_of_sampling(subject):
    for options in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.01}, {"temperature": 2.0}):
        first, again, other = (
            subject.sample(PROMPTS, 2, seed=seed, max_new_tokens=16, **options) for seed in (4, 4, 5)
        )
        assert ids(first) == ids(again)
        assert ids(first) != ids(other)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@on("qwen3")
def test_global_random_state_and_gradient_modes_change_nothing(subject, mode):
    """Nor is the state written: `test_the_process_is_left_as_it_was`."""
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    expected = subject.sample(PROMPTS, 2, seed=3, max_new_tokens=4)
    torch.manual_seed(99), np.random.seed(99), random.seed(99)
    with mode():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        assert_same(expected, subject.sample(PROMPTS, 2, seed=3, max_new_tokens=4))
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
