"""Reward functions that change what they are handed: training, data and other functions see the originals."""

import copy
import time

import pytest
from helpers import worker_rewards as functions

from pl_grouprl.rewards import (
    CosineLengthReward,
    FunctionFromFile,
    RewardWorkers,
    Weighted,
    apply_rewards,
    prepare_rewards,
)
from pl_grouprl.types import Rollout, RolloutGroup

ROW = {
    "answer": "right",
    "tests": [{"input": "1", "tags": ["a"]}],
    "extra_info": {"levels": [1, 2], "nested": {"deep": [3]}},
    "reward_model": {"ground_truth": ["x", "y"]},
}


def make_groups(number=2):
    return [
        RolloutGroup(
            [1, 2],
            [Rollout([7, 8], logprobs=[-1.0, -2.0], loss_mask=[1, 1], text="right"), Rollout([9], text="wrong")],
            index,
            copy.deepcopy(ROW),
            [{"role": "user", "content": "hi"}],
            "source",
        )
        for index in range(number)
    ]


def trained(groups):
    """Everything but what rewards write."""
    kept = copy.deepcopy(groups)
    for rollout in (rollout for group in kept for rollout in group.rollouts):
        rollout.reward, rollout.rewards = None, {}
    return kept


@pytest.fixture(params=["in_process", "workers"])
def run(request):
    """Applies rewards, here or in workers."""
    made = []

    def apply(groups, rewards, **options):
        workers = None
        if request.param == "workers":
            workers = RewardWorkers(prepare_rewards(rewards), 1)
            made.append(workers)
        return apply_rewards(groups, rewards, workers=workers, **options)

    yield apply
    for workers in made:
        workers.close()


VANDALS = [functions.vandal_trl, functions.vandal_verl, functions.vandal_groups]


@pytest.mark.parametrize("function", VANDALS, ids=lambda function: function.__name__)
def test_training_sees_the_originals(run, function):
    groups = make_groups()
    before = copy.deepcopy(groups)
    run(groups, function)
    assert trained(groups) == before
    assert all(rollout.reward == 1.0 for group in groups for rollout in group.rollouts)


def test_async_functions_get_copies_too():
    groups = make_groups()
    before = copy.deepcopy(groups)
    apply_rewards(groups, functions.vandal_async)
    assert trained(groups) == before


@pytest.mark.parametrize("first", [*VANDALS, functions.vandal_async], ids=lambda function: function.__name__)
def test_another_function_and_another_call_see_the_originals(first):
    groups = make_groups()
    seen = []

    def sees(prompts, completions, completion_ids, **columns):
        seen.append(copy.deepcopy((prompts, completion_ids, columns)))
        return [1.0 for _ in completions]

    def sees_each(solution_str, ground_truth, extra_info):
        seen.append(copy.deepcopy((ground_truth, extra_info)))
        return 1.0

    rewards = [first, sees, sees_each]
    apply_rewards(groups, rewards)
    apply_rewards(groups, rewards)
    columns = {name: [value] * 4 for name, value in ROW.items()}
    whole = ([[{"role": "user", "content": "hi"}]] * 4, [[7, 8], [9]] * 2, columns)
    each = (["x", "y"], ROW["extra_info"])
    assert seen == [whole, *[each] * 4] * 2


def test_rollouts_of_one_group_share_no_row():
    """As in TRL, each completion has a row of its own: emptying one leaves the next one whole."""

    def empties(completions, extra_info):
        return [float(len(row.pop("levels"))) for row in extra_info]

    groups = make_groups(1)
    apply_rewards(groups, empties)
    assert [rollout.reward for rollout in groups[0].rollouts] == [2.0, 2.0]


def test_a_repeated_call_gets_the_originals():
    calls = []

    def fails_once(completion_ids, completions):
        calls.append(copy.deepcopy(completion_ids))
        completion_ids.clear()
        if len(calls) == 1:
            raise OSError("first time")
        return [1.0 for _ in completions]

    apply_rewards(make_groups(1), fails_once)
    assert calls == [[[7, 8], [9]]] * 2


def test_a_function_inside_another_gets_copies():
    groups = make_groups(1)
    before = copy.deepcopy(groups)
    rewards = [
        CosineLengthReward(functions.vandal_verl, max_len=4),
        Weighted(FunctionFromFile(functions.__file__, "vandal_trl"), 0.0),
    ]
    apply_rewards(groups, rewards)
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
