"""Reward functions that change what they are handed: training, data and other functions see the originals."""

import copy
import time

import pytest
from helpers import worker_rewards as functions
from helpers.rewards import rewards_of

from pl_grouprl.rewards import CosineLengthReward, FunctionFromFile, Weighted, apply_rewards
from pl_grouprl.types import Rollout, RolloutGroup

ROW = {
    "answer": "right",
    "tests": [{"input": "1", "tags": ["a"]}],
    "extra_info": {"levels": [1, 2], "nested": {"deep": [3]}},
    "reward_model": {"ground_truth": ["x", "y"]},
}
VANDALS = [functions.vandal_trl, functions.vandal_verl, functions.vandal_groups, functions.vandal_async]


def make_groups(number=2):
    right, wrong = ([7, 8], [-1.0, -2.0], "right"), ([9], None, "wrong")
    rollouts = [Rollout(ids, logprobs=logprobs, text=text) for ids, logprobs, text in (right, wrong)]
    prompt = [{"role": "user", "content": "hi"}]
    return copy.deepcopy([RolloutGroup([1, 2], rollouts, i, ROW, prompt, "source") for i in range(number)])


def trained(groups):
    """Everything but what rewards write."""
    kept = copy.deepcopy(groups)
    for rollout in (rollout for group in kept for rollout in group.rollouts):
        rollout.reward, rollout.rewards = None, {}
    return kept


@pytest.mark.parametrize("in_workers", [False, True])
def test_training_sees_the_originals(make_workers, in_workers):
    functions_here = VANDALS[:3] if in_workers else VANDALS
    workers = make_workers(functions_here) if in_workers else None
    for function in functions_here:
        groups = make_groups()
        before = copy.deepcopy(groups)
        apply_rewards(groups, function, workers=workers)
        assert trained(groups) == before, function
        assert rewards_of(*groups) == [1.0] * 4


@pytest.mark.parametrize("first", VANDALS, ids=lambda function: function.__name__)
def test_another_function_and_another_call_see_the_originals(first):
    groups = make_groups()
    seen = []

    def sees(prompts, completions, completion_ids, **columns):
        seen.append(copy.deepcopy((prompts, completion_ids, columns)))
        return [1.0 for _ in completions]

    def sees_each(solution_str, ground_truth, extra_info):
        seen.append(copy.deepcopy((ground_truth, extra_info)))
        return 1.0

    for _ in range(2):
        apply_rewards(groups, [first, sees, sees_each])
    columns = {name: [value] * 4 for name, value in ROW.items()}
    whole = ([[{"role": "user", "content": "hi"}]] * 4, [[7, 8], [9]] * 2, columns)
    each = (["x", "y"], ROW["extra_info"])
    assert seen == [whole, *[each] * 4] * 2


def test_rollouts_of_one_group_share_no_row_and_a_repeated_call_gets_the_originals():
    """As in TRL, each completion has a row of its own: emptying one leaves the next one whole."""
    calls = []

    def empties(completions, completion_ids, extra_info):
        calls.append(copy.deepcopy(completion_ids))
        completion_ids.clear()
        rewards = [float(len(row.pop("levels"))) for row in extra_info]
        if len(calls) == 1:
            raise OSError("first time")
        return rewards

    groups = make_groups(1)
    apply_rewards(groups, empties)
    assert rewards_of(*groups) == [2.0, 2.0]
    assert calls == [[[7, 8], [9]]] * 2


def test_a_function_inside_another_gets_copies():
    groups = make_groups(1)
    before = copy.deepcopy(groups)
    from_file = Weighted(FunctionFromFile(functions.__file__, "vandal_trl"), 0.0)
    apply_rewards(groups, [CosineLengthReward(functions.vandal_verl, max_len=4), from_file])
    assert trained(groups) == before


def test_copies_of_a_large_batch(record_property):
    groups = [RolloutGroup([1] * 500, [Rollout([5] * 1000, text="t") for _ in range(8)], i, ROW) for i in range(64)]
    handed = []

    def keeps(completion_ids, completions, **columns):
        handed.extend(completion_ids)
        return [1.0 for _ in completions]

    start = time.perf_counter()
    apply_rewards(groups, keeps)
    seconds = time.perf_counter() - start
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert all(own is not rollout.token_ids for own, rollout in zip(handed, rollouts, strict=True))
    record_property("figure", f"512 rollouts of 1000 tokens rewarded with copies in {1000 * seconds:.0f} ms")
