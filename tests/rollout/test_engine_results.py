"""What an engine returns is checked once per batch, and the error names the engine."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from pl_grouprl.rollout.engine import SampleRequest, checked_rollouts
from pl_grouprl.types import NOT_SAMPLED, Rollout, SamplingConfig

SAMPLING = SamplingConfig(max_new_tokens=4)


class Scripted:
    version = 3

    def __init__(self, result):
        self.result = result

    def bind(self, model, tokenizer=None):
        pass

    def generate(self, prompts, sampling, *, num_generations, seed):
        return self.result


def groups(**changes):
    """Two rollouts of each of two prompts, all different; `changes` are made to the first."""
    made = [[Rollout([1, 2 + place, number], [-0.5, -1.0, -0.1]) for place in range(2)] for number in range(2)]
    for name, value in changes.items():  # as an engine might, after the checks of the constructor
        setattr(made[0][0], name, value)
    return made


def check(result):
    requests = [SampleRequest([1], 2, 0, 4), SampleRequest([1, 2], 2, 1, 4)]
    return checked_rollouts(Scripted(result), requests, SAMPLING, vocab_size=10, seed=0)


def same(rollout):
    return [[rollout, rollout], groups()[1]]


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, "no list of 2 groups"),
        (iter(groups()), "no list of 2 groups"),
        (groups()[:1], "no list of 2 groups"),
        ([[{"token_ids": [1]}] * 2] * 2, "something else than Rollouts"),
        ([group[:1] for group in groups()], "1 different rollouts of prompt 0"),
        ([[], []], "0 different rollouts of prompt 0"),
        ([None, None], "something else than Rollouts"),
        ([group * 2 for group in groups()], "the same Rollout object twice"),
        ([groups()[0]] * 2, "the same Rollout object twice"),
        (same(Rollout([1])), "1 different rollouts of prompt 0"),
        (groups(token_ids=[1.7, 2.0, 3.0]), "'float' object"),
        (groups(token_ids=["1", "2", "3"]), "'str' object"),
        (groups(token_ids=[1, 2, 10]), "vocab_size"),
        (groups(token_ids=[1, 2, -1]), "token ids from -1"),
        (groups(token_ids=[1, 2, 3, 4, 5], logprobs=None), "max_new_tokens"),
        (groups(logprobs=[-1.0, -1.0]), "logprobs"),
        (groups(logprobs=[-1.0, -1.0, 0.5]), "logprobs from"),
        (groups(logprobs=[-1.0, math.nan, -1.0]), "logprobs from"),
        (groups(logprobs=[-1.0, -math.inf, -1.0]), "logprobs from"),
        (groups(loss_mask=[1, 1]), "loss_mask"),
        (groups(loss_mask=[1, 2, 0]), "loss_mask"),
        (groups(loss_mask=[0.5, 1, 1]), "'float' object"),
        (groups(weight_versions=[3, 3, 10**9]), "weight_versions"),
        (groups(weight_versions=[3]), "weight_versions"),
        (groups(finish_reason="banana"), "finish_reason is 'banana'"),
        (groups(text=b"\xff"), "text is a bytes"),
        ([[Rollout([1], loss_mask=[0]), Rollout([], loss_mask=[])] for _ in "ab"], "zeros"),
    ],
)
def test_what_cannot_have_been_sampled_is_refused(result, words):
    with pytest.raises((TypeError, ValueError), match=f"^Scripted.generate returned .*{words}"):
        check(result)


def test_what_can_be_is_converted_to_plain_numbers():
    tokens = torch.tensor([1, 2, 3])
    changes = {
        "token_ids": tokens,
        "logprobs": np.array([-1, 1e-3, -2]),
        "weight_versions": np.array([3, NOT_SAMPLED, 1]),
    }
    first = check(groups(loss_mask=[True, False, True], **changes))[0][0]
    assert first.token_ids == [1, 2, 3]
    assert first.logprobs == [-1.0, 1e-3, -2.0]
    assert {type(value) for value in (*first.token_ids, *first.loss_mask, *first.weight_versions)} == {int}


@pytest.mark.parametrize(
    "result",
    [
        groups(loss_mask=[0, 0, 0]),  # of one rollout among several
        groups(logprobs=[-1.0, math.nan, -1.0], loss_mask=[1, 0, 1]),  # a token of a tool has no log-probability
        groups(token_ids=[1, 2, 3, 4, 5], loss_mask=[1, 1, 1, 1, 0], logprobs=None),  # nor does it count
        groups(token_ids=[], logprobs=[]),
        groups(finish_reason="length", text="a"),
        [[Rollout([]), Rollout([])] for _ in "ab"],  # as those of an engine that leaves out the end token
        [
            [Rollout([1], episode=0), Rollout([2], episode=0), Rollout([3], episode=1)],
            groups()[1],
        ],  # rows of an episode
    ],
)
def test_what_is_unusual_passes(result):
    assert check(result) == result


def test_the_same_rollout_for_everybody_is_told():
    alike = [[replace(group[0]) for _ in "ab"] for group in groups()]
    with pytest.warns(UserWarning, match="Scripted.generate returned the same rollout 2 times for every prompt"):
        check(alike)
