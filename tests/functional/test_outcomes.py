"""Advantages of whole rollouts, by hand: within groups, of several rewards, of steps; estimators by name."""

import math
import random
import statistics
from functools import partial

import pytest
import torch

from pl_grouprl.functional.advantages import (
    ADVANTAGE_ESTIMATORS,
    combine_rewards,
    gpg_advantages,
    group_relative_advantages,
    grpo_passk_advantages,
    make_advantage_estimator,
    multi_reward_advantages,
    opo_advantages,
    process_supervision_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    rloo_advantages,
)

NAN, INF = math.nan, math.inf
SCALES = ("group", "batch", "none")
EXACT = partial(group_relative_advantages, eps=0.0)
UNSCALED = partial(group_relative_advantages, scale="none")
BEST = partial(grpo_passk_advantages, scale="none")
SUM, EACH = "sum_then_normalize", "normalize_then_sum"
ROOT = math.sqrt(0.5)
LENGTHS_4 = torch.tensor([2, 1, 6, 3])


@pytest.mark.parametrize(
    ("estimate", "rewards", "group_ids", "expected"),
    [
        # Group 5: rewards 1, 3: mean 2, variance (1 + 1) / 1. Group -2: 0, 0, 3: mean 1, variance (1 + 1 + 4) / 2.
        (EXACT, [0, 1, 0, 3, 3], [-2, 5, -2, 5, -2], [-1 / 3**0.5, -ROOT, -1 / 3**0.5, ROOT, 2 / 3**0.5]),
        (partial(EXACT, eps=0.5), [1, 3], [0, 0], [-1 / (2**0.5 + 0.5), 1 / (2**0.5 + 0.5)]),
        # All rewards 1, 3, 2, 6: mean 3, squares 4 + 0 + 1 + 9 = 14, std sqrt(14 / 3).
        (partial(EXACT, scale="batch"), [1, 3, 2, 6], [0, 0, 1, 1], [x / (14 / 3) ** 0.5 for x in (-1, 1, -2, 2)]),
        (UNSCALED, [1, 3, 2, 6], [0, 0, 1, 1], [-1, 1, -2, 2]),
        # Group 7: 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2. Group 0: 4 - 5, 5 - 4.
        (rloo_advantages, [1, 4, 2, 5, 6], [7, 0, 7, 0, 7], [-3, -1, -1.5, 1, 4.5]),
        # Group 4: 1, 5, 2: the best leads by 3; mean 8/3, squares (25 + 49 + 4) / 9, variance 13 / 3. Group 9: 0, 2.
        (BEST, [1, 0, 5, 2, 2], [4, 9, 4, 9, 4], [0, 0, 3, 2, 0]),
        (
            partial(BEST, scale="group", eps=0.0),
            [1, 0, 5, 2, 2],
            [4, 9, 4, 9, 4],
            [0, 0, 3 / (13 / 3) ** 0.5, 2**0.5, 0],
        ),
        (BEST, [-4, NAN, -1, -3], [0, 0, 0, 0], [0, 0, 2, 0]),
        # Group 1: baseline (1 * 2 + 4 * 6) / 8 = 3.25. Group 0: (2 * 1 + 0 * 3) / 4 = 0.5.
        (partial(opo_advantages, lengths=LENGTHS_4), [1, 2, 4, 0], [1, 0, 1, 0], [-2.25, 1.5, 0.75, -0.5]),
        (
            partial(opo_advantages, lengths=torch.tensor([2, 100, 6, 3, 5, 4])),
            [1, NAN, 4, 0.7, 0.7, 9],
            [0, 0, 0, 1, 1, 2],
            [-2.25, 0, 0.75, 0, 0, 0],
        ),
    ],
)  # fmt: skip
def test_by_hand(estimate, rewards, group_ids, expected):
    found = estimate(torch.tensor(rewards, dtype=torch.float32), torch.tensor(group_ids))
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32))


def test_remax_by_hand():
    found = remax_advantages(torch.tensor([1.0, 0.25, NAN, 1.0]), torch.tensor([0.0, 0.5, 1.0, NAN]))
    assert found.tolist() == [1.0, -0.25, 0.0, 0.0]
    assert remax_advantages(torch.full((3,), 0.7), torch.full((3,), 0.7)).tolist() == [0.0] * 3


def test_opo_without_any_token_is_finite():
    assert opo_advantages(torch.tensor([1.0, 2.0]), [0, 0], torch.tensor([0, 0])).isfinite().all()


def test_equal_rewards_give_exactly_zero():
    estimates = [rloo_advantages, *(partial(group_relative_advantages, scale=scale, eps=1e-9) for scale in SCALES)]
    for estimate in estimates:
        for size in (2, 3, 7, 16):
            rewards = torch.cat([torch.full((size,), 0.7), torch.tensor([0.1, 0.2])])
            advantages = estimate(rewards, torch.tensor([3] * size + [4, 4]))
            assert advantages[:size].tolist() == [0.0] * size
            assert advantages[size:].abs().min() > 0
        alone = estimate(torch.tensor([0.3, 0.3, 0.9, NAN, NAN]), torch.tensor([0, 0, 1, 1, 2]))
        assert alone.tolist() == [0.0] * 5
    # Two best rewards, all equal, one, one and a missing one, all missing.
    rewards = torch.tensor([3.0, 1.0, 3.0, 0.7, 0.7, 0.7, 4.0, 5.0, NAN, NAN, NAN])
    for estimate in (BEST, grpo_passk_advantages):
        assert estimate(rewards, torch.tensor([0, 0, 0, 1, 1, 1, 2, 3, 3, 4, 4])).tolist() == [0.0] * 11


@pytest.mark.parametrize("estimate", [group_relative_advantages, rloo_advantages])
def test_missing_rewards_are_left_out(estimate):
    rewards = torch.tensor([1.0, NAN, 3.0, 2.0, 5.0, 8.0, NAN, 5.0, 2.0, NAN])
    group_ids = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 3, 3])
    present = ~rewards.isnan()
    advantages = estimate(rewards, group_ids)
    torch.testing.assert_close(advantages[present], estimate(rewards[present], group_ids[present]))
    assert advantages[~present].tolist() == advantages[-3:].tolist() == [0.0] * 3  # groups of one are zero, too


@pytest.mark.parametrize("scale", SCALES)
def test_order_of_rollouts_does_not_matter(scale):
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(40, generator=generator)
    group_ids = torch.randint(-5, 5, (40,), generator=generator) * 1_000_003
    order = torch.randperm(40, generator=generator)
    shuffled = group_relative_advantages(rewards[order], group_ids[order], scale=scale)
    assert torch.equal(shuffled, group_relative_advantages(rewards, group_ids, scale=scale)[order])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_results_are_at_least_float32_and_without_gradient(dtype):
    rewards = torch.tensor([0, 1, 1, 0]).to(dtype)
    if rewards.is_floating_point():
        rewards.requires_grad_()
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    advantages = group_relative_advantages(rewards, [0, 0, 1, 1])
    torch.testing.assert_close(advantages, torch.tensor([-ROOT, ROOT, ROOT, -ROOT], dtype=expected), atol=2e-6, rtol=0)
    others = (
        BEST(rewards, [0] * 4),
        opo_advantages(rewards, [0] * 4, torch.ones(4)),
        remax_advantages(rewards, 0 * rewards),
    )
    for found in (advantages, *others):
        assert found.dtype == expected
        assert not found.requires_grad


def test_inputs_are_not_modified_and_empty_batches_work():
    rewards = torch.tensor([1.0, NAN])
    group_relative_advantages(rewards, torch.tensor([0, 0]))
    assert rewards[0] == 1
    assert rewards[1].isnan()
    empty = torch.zeros(0)
    for estimate in (rloo_advantages, partial(group_relative_advantages, scale="batch"), BEST):
        assert estimate(empty, []).shape == (0,)
    assert opo_advantages(empty, [], empty).shape == remax_advantages(empty, empty).shape == (0,)
    assert process_supervision_advantages(empty, torch.zeros(0, dtype=torch.long), []).shape == (0,)


# Several rewards per rollout, added up before or after the comparison within the group.


def test_combine_by_hand():
    combined = combine_rewards(torch.tensor([[1.0, 2.0], [NAN, 3.0], [NAN, NAN]]), [0.5, 2.0])
    assert combined[:2].tolist() == [4.5, 6.0]
    assert combined[2].isnan()


@pytest.mark.parametrize(
    ("aggregation", "rewards", "weights", "group_ids", "expected"),
    [
        # Sums with weights 1 and 2: 1, 5 (mean 3, std 2 sqrt 2); in the other group 3 and a rollout without reward.
        (SUM, [[1, 0], [3, NAN], [1, 2], [NAN, NAN]], [1, 2], [6, 2, 6, 2], [-ROOT, 0, ROOT, 0]),
        # 0.1 + 0.2 and 0.3 differ in the last bit of float64.
        (SUM, [[0.1, 0.2], [0.3, 0]], [1, 1], [0, 0], [0, 0]),
        # First function, group 0: 0, 2 gives -s, s with s = sqrt(1/2); group 1: 0, 10 gives -s, s.
        # Second function, group 0: 5, 3 gives s, -s; group 1: equal, 0. With weights 2 and 1 the sums are -s, s, -2s,
        # 2s: mean 0, variance (1 + 1 + 4 + 4) / 2 / 3 = 5 / 3.
        (
            EACH,
            [[0, 5], [2, 3], [0, 0.7], [10, 0.7]],
            [2, 1],
            [0, 0, 1, 1],
            [x * ROOT / (5 / 3) ** 0.5 for x in (-1, 1, -2, 2)],
        ),
    ],
)
def test_several_rewards_by_hand(aggregation, rewards, weights, group_ids, expected):
    rewards, expected = (torch.tensor(numbers, dtype=torch.float32) for numbers in (rewards, expected))
    options = {"estimator": EXACT, "aggregation": aggregation, "eps": 0.0}
    found = multi_reward_advantages(rewards, torch.tensor(weights), torch.tensor(group_ids), **options)
    torch.testing.assert_close(found, expected, atol=0 if not expected.any() else 1e-5, rtol=1e-5)


@pytest.mark.parametrize("aggregation", [SUM, EACH])
@pytest.mark.parametrize("name", ["grpo", "rloo", "grpo_passk"])
def test_several_equal_rewards_give_exactly_zero(aggregation, name):
    rewards = torch.tensor([[0.7, 0.1]] * 3 + [[0.2, 0.3], [0.9, 0.3], [0.4, 0.6]])
    options = {"estimator": make_advantage_estimator(name), "aggregation": aggregation}
    advantages = multi_reward_advantages(rewards, [1.0, 1.0], [5, 5, 5, 6, 6, 6], **options)
    assert advantages[:3].tolist() == [0.0] * 3
    assert advantages[3:].abs().max() > 0
    assert multi_reward_advantages(rewards[:3], [1.0, 1.0], [5, 5, 5], **options).tolist() == [0.0] * 3


@pytest.mark.parametrize("aggregation", [SUM, EACH])
def test_rollout_to_which_no_function_applies_changes_nothing(aggregation):
    rewards = torch.tensor([[1.0, NAN], [NAN, NAN], [3.0, 0.5], [0.0, 0.0], [2.0, 1.0]])
    group_ids, present = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 2, 3, 4])
    options = {"estimator": EXACT, "aggregation": aggregation}
    advantages = multi_reward_advantages(rewards, [1.0, 3.0], group_ids, **options)
    expected = multi_reward_advantages(rewards[present], [1.0, 3.0], group_ids[present], **options)
    torch.testing.assert_close(advantages[present], expected)
    assert advantages[1] == 0


def test_lengths_and_greedy_rewards_reach_the_estimator():
    rewards = torch.tensor([[1.0, 0.0], [4.0, 2.0]])
    opo = {"estimator": make_advantage_estimator("opo"), "lengths": torch.tensor([3, 1])}
    # Sums 1 and 8, baseline (3 * 1 + 1 * 8) / 4.
    assert multi_reward_advantages(rewards, [1.0, 2.0], [0, 0], **opo).tolist() == [1 - 2.75, 8 - 2.75]
    greedy = torch.tensor([[1.0, 1.0], [0.0, NAN]])
    remax = {"estimator": make_advantage_estimator("remax"), "greedy_rewards": greedy}
    assert multi_reward_advantages(rewards, [1.0, 2.0], [0, 0], **remax).tolist() == [-2.0, 8.0]
    # Each by itself: 0, -1 and 4, missing; weighted sums -2 and 4: mean 1, std 3 sqrt 2.
    each = multi_reward_advantages(rewards, [1.0, 2.0], [0, 0], aggregation=EACH, eps=0.0, **remax)
    torch.testing.assert_close(each, torch.tensor([-ROOT, ROOT]))


# Rewards of steps: the definition of arXiv:2402.03300, section 4.1.3.


def test_steps_of_two_rollouts_by_hand():
    # Steps of the first rollout end at tokens 1 and 3 with rewards 1 and 3, those of the second at token 0 with 2. The
    # mean of {1, 3, 2} is 2 and their standard deviation 1, so the normalized rewards are -1, 1 and 0.
    token_rewards, lengths = torch.tensor([NAN, 1.0, NAN, 3.0, NAN, 2.0, NAN]), torch.tensor([5, 2])
    for factor, estimator in ((1, EXACT), (2, UNSCALED)):
        found = process_supervision_advantages(factor * token_rewards, lengths, [7, 7], estimator=estimator)
        assert found.tolist() == [0.0, 0.0, factor, factor, 0.0, 0.0, 0.0]


def test_steps_of_many_rollouts_against_a_plain_loop():
    dice = random.Random(0)
    rollouts = [[dice.choice((None, dice.gauss(0, 1))) for _ in range(dice.randrange(9))] for _ in range(24)]
    groups = [dice.randrange(3) for _ in rollouts]
    expected = []
    for rewards, group in zip(rollouts, groups, strict=True):
        steps = [r for own, g in zip(rollouts, groups, strict=True) if g == group for r in own if r is not None]
        mean, std = statistics.fmean(steps), statistics.stdev(steps)
        normalized = [0.0 if r is None else (r - mean) / (std + 1e-6) for r in rewards]
        expected += [sum(normalized[t:]) for t in range(len(rewards))]
    values = torch.tensor([NAN if r is None else r for own in rollouts for r in own], dtype=torch.float64)
    advantages = process_supervision_advantages(values, torch.tensor([len(own) for own in rollouts]), groups)
    assert advantages.dtype == torch.float64
    assert advantages.tolist() == pytest.approx(expected, abs=1e-12)


def test_one_step_at_the_end_is_the_outcome():
    rewards, lengths, groups = torch.tensor([1.0, 0.0, 0.5, 4.0]), torch.tensor([1, 3, 2, 2]), [0, 0, 0, 1]
    token_rewards = torch.full((8,), NAN)
    token_rewards[lengths.cumsum(0) - 1] = rewards
    for scale in SCALES:
        estimator = partial(group_relative_advantages, scale=scale)
        advantages = process_supervision_advantages(token_rewards, lengths, groups, estimator=estimator)
        assert torch.equal(advantages, estimator(rewards, groups).repeat_interleave(lengths))


def test_steps_that_do_not_differ_give_exactly_zero():
    # Equal rewards that no binary fraction holds; a group of one step; one without any; a rollout without tokens.
    token_rewards = torch.tensor([0.1, 0.1, NAN, 0.1, NAN, 5.0, NAN, NAN])
    assert not process_supervision_advantages(token_rewards, torch.tensor([3, 1, 2, 0, 2]), [0, 0, 1, 1, 2]).any()


# Estimators by name.

REWARDS, GROUP_IDS = torch.tensor([0.0, 1.0, 4.0, 2.0]), torch.tensor([0, 0, 0, 1])
LENGTHS, GREEDY = torch.tensor([1, 2, 3, 4]), torch.tensor([1.0, 1.0, 1.0, 0.0])
WITH_NORMS = {"optimal_token_baseline", "tir_optimal_token_baseline"}
PER_TOKEN = {"gagpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "tree", "vine"} | WITH_NORMS


def test_names_and_kinds():
    kinds = {name: make_advantage_estimator(name) for name in ADVANTAGE_ESTIMATORS}

    def having(attribute):
        return {name for name, estimator in kinds.items() if getattr(estimator, attribute)}

    assert set(kinds) == {"grpo", "rloo", "opo", "gpg", "grpo_passk", "remax"} | PER_TOKEN
    assert having("per_token") == PER_TOKEN
    assert having("takes_token_rewards") == {"gagpo", "reinforce_plus_plus"} | WITH_NORMS
    assert having("needs_score_norms") == WITH_NORMS
    assert having("needs_greedy") == {"remax"}
    assert set(kinds) - having("compares_rollouts") == {"remax", "reinforce_plus_plus"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", group_relative_advantages(REWARDS, GROUP_IDS)),
        ("rloo", rloo_advantages(REWARDS, GROUP_IDS)),
        ("gpg", gpg_advantages(REWARDS, GROUP_IDS)),
        ("opo", opo_advantages(REWARDS, GROUP_IDS, LENGTHS)),
        ("grpo_passk", grpo_passk_advantages(REWARDS, GROUP_IDS)),
        ("remax", remax_advantages(REWARDS, GREEDY)),
    ],
)
def test_rollout_level_estimators_take_the_same_arguments(name, expected):
    estimator = make_advantage_estimator(name)
    assert torch.equal(estimator(REWARDS, GROUP_IDS, lengths=LENGTHS, greedy_rewards=GREEDY), expected)


def test_token_level_estimators_take_the_same_arguments():
    mask = torch.ones(4, 4, dtype=torch.bool)
    plain = make_advantage_estimator("reinforce_plus_plus", gamma=0.5)
    rewards = torch.diag(REWARDS)  # of tokens; the other one takes those of rollouts
    assert torch.equal(plain(rewards, GROUP_IDS, mask=mask), reinforce_plus_plus_advantages(rewards, mask, gamma=0.5))
    baseline = make_advantage_estimator("reinforce_plus_plus_baseline")
    expected = reinforce_plus_plus_baseline_advantages(REWARDS, GROUP_IDS, mask, reduce=lambda sums: 3 * sums)
    assert torch.equal(baseline(REWARDS, GROUP_IDS, mask=mask, reduce=lambda sums: 3 * sums), expected)


X, TWO = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2, 1])
MANY = partial(multi_reward_advantages, torch.zeros(2, 3), group_ids=[0, 0], estimator=EXACT)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: rloo_advantages(X[:, None], [0, 0, 0]), "rewards"),
        (lambda: group_relative_advantages(torch.tensor([0.0, -INF]), [0, 0]), r"rewards is infinite .* \[1\]"),
        (lambda: group_relative_advantages(X, [0, 0, 0], scale="std"), "scale"),
        (lambda: grpo_passk_advantages(X, [0, 0, 0], scale="batch"), "scale"),
        (lambda: opo_advantages(X, [0, 0, 0], TWO), "lengths"),
        (lambda: remax_advantages(X, torch.zeros(2)), "greedy_rewards"),
        (lambda: remax_advantages(X, torch.zeros(3, 1)), "greedy_rewards"),
        (lambda: remax_advantages(X, torch.tensor([0.0, INF, 0.0])), r"greedy_rewards is infinite .* \[1\]"),
        (lambda: MANY([1.0] * 3, aggregation="sum"), "aggregation"),
        (lambda: MANY([1.0, 2.0]), "weights"),
        (lambda: MANY([1.0] * 3, greedy_rewards=torch.zeros(2)), "greedy_rewards"),
        (lambda: combine_rewards(X, [1.0]), "rewards"),
        (lambda: combine_rewards(X[None], [1.0, INF, 0.0]), "weights"),
        # A weight of 0 does not hide it, and two of opposite sign do not cancel to "no reward".
        (lambda: combine_rewards(torch.tensor([[0.0, 0.0], [INF, -INF]]), [0.0, 1.0]), "rewards is infinite"),
        (lambda: process_supervision_advantages(torch.tensor([0.0, INF, 1.0]), TWO, [0, 0]), "rewards is infinite"),
        (lambda: make_advantage_estimator("gea"), "gea"),
        (lambda: make_advantage_estimator("rloo", scale="none"), "scale"),
        (lambda: make_advantage_estimator("grpo_passk", **{"name": "x", "registry": 1}), "name, registry"),
        (lambda: make_advantage_estimator("opo")(REWARDS, GROUP_IDS), "lengths"),
        (lambda: make_advantage_estimator("remax")(REWARDS, GROUP_IDS), "greedy_rewards"),
    ],
)
def test_errors_name_the_argument(call, argument):
    with pytest.raises(ValueError, match=argument):
        call()
