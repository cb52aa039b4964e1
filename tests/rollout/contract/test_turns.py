"""What the turns of episodes need of an engine: limits per prompt, and prompts that continue earlier rollouts."""

from contextlib import nullcontext

import pytest
import torch
from helpers.engines import on
from helpers.rollouts import PROMPTS, assert_same, changed, ids, reference_logprobs, shortened

from pl_grouprl.rollout.engine import declares
from pl_grouprl.types import SamplingConfig

LONG = [[(7 * place + first) % 24 for place in range(150)] for first in (1, 2)]
"""Beyond the 128 tokens of a block of vLLM's cache on CPUs."""

RESULT = [7, 8, 9]
"""What the model reads between two turns."""

TURNS = ("takes_limits", "takes_prompt_indices")


@on("qwen3", needs=("takes_limits",))
def test_each_prompt_has_its_limit(subject):
    """`max_new_tokens` of the sampling options, smaller than some, is not read then."""
    options = {"seed": 1, "stop_token_ids": (4,)}
    whole = subject.sample(PROMPTS, 3, max_new_tokens=16, **options)
    assert {len(tokens) for group in ids(whole) for tokens in group} - {16}  # some stop earlier
    for limits in ([16] * 5, [1] * 5, [3, 16, 1, 8, 5]):
        assert_same(subject.sample(PROMPTS, 3, limits=limits, max_new_tokens=4, **options), shortened(whole, limits))


@on("letters", needs=("takes_limits",))
def test_limits_and_stop_strings(subject):
    options = {"seed": 2, "temperature": 2.0, "stop": ("a", "f", "q")}
    whole, limits = subject.sample(PROMPTS, 10, max_new_tokens=12, **options), [12, 2, 1, 7, 4]
    assert {rollout.finish_reason for group in whole for rollout in group} == {"stop", "length"}
    assert_same(subject.sample(PROMPTS, 10, limits=limits, **options), shortened(whole, limits))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ([4, 0], r"max_new_tokens\[1\] is 0"),
        ([250, 7], r"prompts\[1\].*max_new_tokens=7"),
    ],
)
@on("qwen3", needs=("takes_limits",))
def test_limits_that_cannot_be_served(subject, limits, message):
    with pytest.raises(ValueError, match=message):
        subject.sample([[1], [1] * 250], limits=limits, max_new_tokens=1)
    lengths = {250: 6, 255: 1, 1: 255}  # goes on serving, the longest sequences together
    groups = subject.sample([[1] * length for length in lengths], 2, limits=list(lengths.values()))
    assert [[len(found) for found in group] for group in ids(groups)] == [[limit, limit] for limit in lengths.values()]


def keeping_caches(engine):
    """In this context, engines that can do so keep their caches between the calls."""
    return engine.keep_caches() if declares(engine, "keeps_caches") else nullcontext()


def continued(prompts, groups):
    """The prompts of the next turn, one for each rollout."""
    return [
        [*prompt, *rollout.token_ids, *RESULT]
        for prompt, group in zip(prompts, groups, strict=True)
        for rollout in group
    ]


def assert_sampled_from(model, prompts, groups):
    """Log-probabilities are those of a fresh forward over everything."""
    for prompt, (rollout,) in zip(prompts, groups, strict=True):
        expected = reference_logprobs(model, prompt, rollout, SamplingConfig())
        torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=1e-4, rtol=0)


@on("qwen3", needs=TURNS)
def test_turns_continue_rollouts(subject):
    """Three turns, some episodes of which have ended before."""
    prompts, limits = [*PROMPTS[:2], *LONG], [6, 20, 30, 3]
    with keeping_caches(subject.engine):
        assert subject.sample([], seed=5, prompt_indices=[], limits=[]) == []
        histories = continued(prompts, subject.sample(prompts, 3, seed=3, limits=limits))
        for turn, indices in ((1, [0, 1, 2, 4, 6, 7, 8, 10]), (2, [7, 1, 10])):
            chosen = [histories[index] for index in indices]
            limits = [1 + index for index in indices]
            groups = subject.sample(chosen, seed=100 + turn, prompt_indices=indices, limits=limits)
            assert_sampled_from(subject.model, chosen, groups)
            for index, history in zip(indices, continued(chosen, groups), strict=True):
                histories[index] = history


@on("qwen3", needs=TURNS)
def test_any_episodes_in_any_order_sample_the_same(subject):
    histories = continued(PROMPTS, subject.sample(PROMPTS, 2, max_new_tokens=6, stop_token_ids=(4,)))
    limits = [3 + index for index in range(10)]

    def turn(indices):
        return subject.sample(
            [histories[index] for index in indices],
            seed=5,
            prompt_indices=indices,
            limits=[limits[index] for index in indices],
            stop_token_ids=(4,),
        )

    whole = turn(list(range(10)))
    for indices in ([9, 3, 0, 5], [6], [8, 7, 6, 5, 4, 3, 2, 1, 0, 9]):
        assert_same(turn(indices), [whole[index] for index in indices])


@on("qwen3")
def test_new_weights_encode_the_history_again(subject):
    """Keys and values that the old weights made of it are cached no longer."""
    histories = continued(LONG, subject.sample(LONG, max_new_tokens=20))
    assert_sampled_from(subject.model, histories, subject.sample(histories, max_new_tokens=8))
    with changed(subject.model.model.layers[0].self_attn.v_proj.weight, lambda weight: weight.mul_(-2), subject.sync):
        assert_sampled_from(subject.model, histories, subject.sample(histories, max_new_tokens=8))


@on("qwen3", needs=("takes_prompt_indices",))
def test_branches_continue_beginnings_of_rollouts(subject):
    """A prompt that ends inside a rollout of the call before, once per branch; streams are named by their index."""
    with keeping_caches(subject.engine):
        groups = subject.sample([*PROMPTS[:2], *LONG], 1, seed=3, max_new_tokens=10)
        beginnings = [
            [*prompt, *rollout.token_ids[:place]]
            for prompt, (rollout,) in zip([*PROMPTS[:2], *LONG], groups, strict=True)
            for place in (9, 4, 4)
        ]
        branches = subject.sample(beginnings, seed=4, prompt_indices=list(range(12)), max_new_tokens=6)
        assert_sampled_from(subject.model, beginnings, branches)
    alone = subject.sample(beginnings[2:5], seed=4, prompt_indices=[2, 3, 4], max_new_tokens=6)
    assert_same(alone, branches[2:5])
    assert all(first != second for first, second in zip(ids(branches)[1::3], ids(branches)[2::3], strict=True))
