"""Advantages of branched rollouts: numbers worked out by hand, and expectations by enumeration of all trees."""

import itertools

import pytest
import torch
from helpers.peak_memory import Peak

from benchmarks.credit import TabularPolicy, all_groups, estimates, main, regular
from pl_grouprl.functional.advantages import (
    BranchPaths,
    generalized_advantages,
    leaf_weights,
    make_advantage_estimator,
    rloo_advantages,
    td_errors,
    tree_advantages,
    vine_advantages,
)

NAN = float("nan")
ALL = torch.ones(4, 3, dtype=torch.bool)
ONE_GROUP = torch.zeros(4, dtype=torch.long)
BRANCHES = BranchPaths([(1,), (1,), (), (2,)], [(0, 0), (0, 1), (1,), (2, 0)])
"""Three continuations of the prompt: one that splits in two after a token, one that ends early, one with one child."""
REWARDS = torch.tensor([1.0, 0.0, 2.0, 5.0])
# Values 0.5, 2 and 5 at depth 1. Weights: 1/6, 1/6, 1/3, 1/3 of the prompt, times 4 leaves.
WEIGHTS = torch.tensor([2 / 3, 2 / 3, 4 / 3, 4 / 3])
TREE = torch.tensor([[-3.0, 1, 1], [-3.0, -1, -1], [-0.75, -0.75, -0.75], [3.75, 3.75, 3.75]])


def test_tree_by_hand():
    found = tree_advantages(REWARDS, ONE_GROUP, ALL, BRANCHES)
    torch.testing.assert_close(found, TREE * WEIGHTS[:, None])
    # The baseline with the segment itself: (w - 1) / w, 1/2 after the branch point and 2/3 before it.
    factors = torch.tensor([[2 / 3, 1 / 2, 1 / 2]] * 2 + [[2 / 3] * 3] * 2)
    found = tree_advantages(REWARDS, ONE_GROUP, ALL, BRANCHES, leave_one_out=False)
    torch.testing.assert_close(found, TREE * factors * WEIGHTS[:, None])
    # Unbiased variance of the rewards: mean 2, (1 + 4 + 0 + 9) / 3.
    found = tree_advantages(REWARDS, ONE_GROUP, ALL, BRANCHES, scale="group", eps=0.5)
    torch.testing.assert_close(found, TREE * WEIGHTS[:, None] / ((14 / 3) ** 0.5 + 0.5))


def test_vine_by_hand():
    """The trunk of the first continuation is rollout 0: the value after its first token is rollout 1's reward."""
    expected = torch.tensor([[0 - 3.5, 1 - 0, 1 - 0], [0.0, 0, 0], [-0.75] * 3, [3.75] * 3])
    found = vine_advantages(REWARDS, ONE_GROUP, ALL, BRANCHES)
    torch.testing.assert_close(found, expected * 4 / 3)


def test_a_comb_of_hundreds_of_branches():
    """Two tokens per segment; at every branch point, one of two continuations ends."""
    depth = 300
    paths = [(0,) * level + (1,) for level in range(1, depth + 1)] + [(0,) * (depth + 1)]
    points = [tuple(range(2, 2 * len(path) - 1, 2)) for path in paths]
    mask = torch.arange(2 * depth + 2) < torch.tensor([2 * len(path) for path in paths])[:, None]
    rewards = torch.rand(depth + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids = torch.zeros(depth + 1, dtype=torch.long)
    with Peak() as memory:
        found = tree_advantages(rewards, ids, mask, BranchPaths(points, paths))
    value = rewards[-1]
    for level in reversed(range(depth)):  # the two continuations of a branch point, whose weight is 2 ** -(level + 1)
        own = (rewards[level] - value) * (depth + 1) * 0.5 ** (level + 1)
        torch.testing.assert_close(found[level, 2 * level + 2 :], own * mask[level, 2 * level + 2 :])
        value = (rewards[level] + value) / 2
    assert memory.peak < 100 * mask.numel()  # and not tokens times branch points


def test_leaf_weights_by_hand():
    torch.testing.assert_close(leaf_weights(ONE_GROUP, ALL, BRANCHES), WEIGHTS.double())
    # A second prompt with two rollouts: 6 rollouts of 2 prompts, so 3 for each prompt.
    ids, mask = torch.tensor([7, 7, 7, 7, -1, -1]), torch.ones(6, 3, dtype=torch.bool)
    both = BranchPaths([*BRANCHES.points, (), ()], [*BRANCHES.paths, (), ()])
    expected = torch.tensor([3 / 6, 3 / 6, 3 / 3, 3 / 3, 3 / 2, 3 / 2], dtype=torch.float64)
    torch.testing.assert_close(leaf_weights(ids, mask, both), expected)
    order = [4, 2, 0, 5, 3, 1]
    shuffled = BranchPaths(*([rows[i] for i in order] for rows in both))
    torch.testing.assert_close(leaf_weights(ids[order], mask, shuffled), expected[order])


def test_rollouts_without_a_reward_count_nowhere():
    rewards, mask = torch.tensor([1.0, NAN, 2.0, 5.0]), ALL.clone()
    mask[1] = False
    # Rollout 0 is an only child then: value 1 against the mean of 2 and 5. Three rows, each with a third of the prompt.
    expected = torch.tensor([[-2.5] * 3, [0.0] * 3, [2.0 - 3] * 3, [5 - 1.5] * 3])
    for estimator in (tree_advantages, vine_advantages):
        torch.testing.assert_close(estimator(rewards, ONE_GROUP, mask, BRANCHES), expected)


@pytest.mark.parametrize("estimator", [tree_advantages, vine_advantages])
def test_equal_rewards_give_exactly_zero(estimator):
    paths = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    branches = BranchPaths([(1,)] * 5, paths)
    ids, mask = torch.zeros(5, dtype=torch.long), torch.ones(5, 2, dtype=torch.bool)
    assert not estimator(torch.full((5,), 0.7), ids, mask, branches).any()
    found = estimator(torch.tensor([0.7, 0.7, 0.7, 0.1, 0.1]), ids, mask, branches)
    assert not found[:, 1].any()
    assert found[0, 0] > 0.1


@pytest.mark.parametrize("estimator", [tree_advantages, vine_advantages])
@pytest.mark.parametrize("paths", [[()] * 7, [(0,), (1,), (2,), (0,), (1,), (0,), (1,)]])
def test_without_branches_it_is_rloo(estimator, paths):
    rewards = torch.tensor([1.0, 0.5, 3.0, 0.0, 2.0, 4.0, NAN])
    ids = torch.tensor([5, 5, 5, 2, 2, 9, 9])
    mask = torch.ones(7, 2, dtype=torch.bool) & ~rewards.isnan()[:, None]
    found = estimator(rewards, ids, mask, BranchPaths([()] * 7, paths))
    torch.testing.assert_close(found, rloo_advantages(rewards, ids)[:, None].expand(7, 2))


def test_zero_outside_the_mask():
    mask = torch.tensor([[True, False, True]]).expand(4, 3)
    found = tree_advantages(REWARDS, ONE_GROUP, mask, BRANCHES)
    assert not found[:, 1].any()
    torch.testing.assert_close(found[:, ::2], (TREE * WEIGHTS[:, None])[:, ::2])


def test_prompts_on_two_ranks_weigh_the_same_as_on_one():
    ids, mask = torch.tensor([0, 0, 0, 0, 1, 1]), torch.ones(6, 3, dtype=torch.bool)
    rewards = torch.tensor([1.0, 0.0, 2.0, 5.0, 1.0, 4.0])
    both = BranchPaths([*BRANCHES.points, (), ()], [*BRANCHES.paths, (), ()])
    parts = [slice(0, 4), slice(4, 6)]
    seen = []

    def on_rank(part, reduce):
        own = BranchPaths(both.points[part], both.paths[part])
        return tree_advantages(rewards[part], ids[part], mask[part], own, reduce=reduce)

    for part in parts:
        on_rank(part, lambda counts: seen.append(counts) or counts)
    found = [on_rank(part, lambda counts: sum(seen)) for part in parts]
    torch.testing.assert_close(torch.cat(found), tree_advantages(rewards, ids, mask, both))


@pytest.mark.parametrize(
    ("points", "paths", "message"),
    [
        ([(1,), (2,)], [(0, 0), (0, 1)], "rollouts 0 and 1"),
        ([(), (2,)], [(0,), (0, 1)], "rollouts 0 and 1"),
        ([(), ()], [(0,), (0,)], "rollouts 0 and 1"),
        ([(1,), (1,)], [(0,), (0, 1)], "rollout 0 .* branch_path"),
        ([(2, 1), ()], [(0, 0, 0), (1,)], "rollout 0 has branch_points"),
        ([(), ()], [(0,), (-1,)], "rollout 1 .* branch_path"),
        ([()], [(0,), (1,)], "zip"),
    ],
)
def test_contradictions_are_refused(points, paths, message):
    with pytest.raises(ValueError, match=message):
        tree_advantages(REWARDS[:2], ONE_GROUP[:2], ALL[:2], BranchPaths(points, paths))


@pytest.mark.parametrize("estimator", ["tree", "vine"])
def test_options_out_of_range(estimator):
    data = {"mask": ALL[:2], "branches": BranchPaths([(), ()], [(0,), (1,)])}
    for options in ({"scale": "batch"}, {"eps": -1.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            make_advantage_estimator(estimator, **options)(REWARDS[:2], ONE_GROUP[:2], **data)


# Expectations. Every group that can be sampled, weighted with its probability.


def uneven(tokens):
    """Two continuations of the prompt; two after the token 1, three after 2: it depends on what was sampled."""
    return {(): 2, (1,): 2, (2,): 3}.get(tokens, 1)


CASES = {
    "two levels": (TabularPolicy(2, 3, 1), regular(2, 1, 2)),
    "three and two": (TabularPolicy(2, 3, 2), lambda tokens: {(): 3, (1,): 2}.get(tokens, 1)),
    "by what was sampled": (TabularPolicy(3, 2, 3), uneven),
    "late": (TabularPolicy(2, 4, 4), regular(2, 3)),
}


def expected_gradient(policy, widths, estimator, **options):
    probs, groups = zip(*all_groups(policy, widths), strict=True)
    assert sum(probs) == pytest.approx(1)
    assert len({len(group) for group in groups}) > 1  # some branches end early
    found = estimates(policy, groups, estimator, **options)
    return (torch.tensor(probs, dtype=torch.float64)[:, None, None] * found).sum(0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("estimator", ["tree", "vine"])
def test_unbiased(case, estimator):
    policy, widths = CASES[case]
    torch.testing.assert_close(expected_gradient(policy, widths, estimator), policy.gradient(), rtol=0, atol=1e-6)


def test_unbiased_over_prompts_with_different_numbers_of_leaves():
    """Both prompts of a batch are this policy's; the loss divides by the leaves of both."""
    policy = TabularPolicy(2, 2, 5)
    outcomes = list(all_groups(policy, regular(2, 1)))
    total = torch.zeros_like(policy.probs_SV)
    for a, b in itertools.combinations_with_replacement(range(len(outcomes)), 2):
        prob = outcomes[a][0] * outcomes[b][0] * (1 if a == b else 2)
        total += prob * estimates(policy, [outcomes[a][1], outcomes[b][1]], "tree").mean(0)
    torch.testing.assert_close(total, policy.gradient(), rtol=0, atol=1e-6)


def test_the_biases_that_are_named():
    policy, widths = CASES["two levels"]
    exact = policy.gradient()
    half = expected_gradient(policy, widths, "tree", leave_one_out=False)
    torch.testing.assert_close(half, exact / 2, rtol=0, atol=1e-6)  # every family has two members
    leaves = expected_gradient(policy, widths, "rloo")  # takes leaves for independent rollouts
    assert (leaves - exact).norm() > 0.2 * exact.norm()


def test_tree_is_the_mean_of_vine_over_all_trunks():
    paths = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    points, ids, mask = [(1,)] * 5, torch.zeros(5, dtype=torch.long), torch.ones(5, 2, dtype=torch.bool)
    rewards = torch.tensor([1.0, 4.0, 0.0, 2.0, 7.0], dtype=torch.float64)
    orders = [
        [(0, a) for a in first] + [(1, b) for b in second]
        for first in itertools.permutations(range(2))
        for second in itertools.permutations(range(3))
    ]
    vines = torch.stack([vine_advantages(rewards, ids, mask, BranchPaths(points, order)) for order in orders]).mean(0)
    trees = tree_advantages(rewards, ids, mask, BranchPaths(points, paths))
    torch.testing.assert_close(vines[:, 1], trees[:, 1])
    for rows in (slice(0, 2), slice(2, 5)):  # a shared segment's rows add up
        torch.testing.assert_close(vines[rows, 0].sum(), trees[rows, 0].sum())


def test_the_benchmark(tmp_path, capsys):
    rows = main(["--groups", "30", "--policies", "1", "--output", str(tmp_path / "credit")])["rows"]
    assert (tmp_path / "credit.json").exists()
    assert rows[0]["variance"] == 1
    assert all(0 < row["bias"] < 3 for row in rows)
    assert rows[2]["tokens"] < rows[1]["tokens"] == pytest.approx(2 * rows[0]["tokens"], rel=0.1)
    assert "8, each split in 2 after 4 tokens" in capsys.readouterr().out


# With a critic.


def test_gae_of_shared_tokens():
    """Equal errors on all rows; with lambda 1 the leaves' mean is their mean return, with lambda 0 all are equal."""
    rewards = torch.tensor([[0.0, 0, 0, 1], [0.0, 0, 0, 5], [0.0, 0, 2, 0]])
    values = torch.tensor([[1.0, 2, 3, 4], [1.0, 2, 3, 1], [0.5, 1, 1, 0]])  # rows 0 and 1 share two tokens
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]]) > 0
    errors = td_errors(rewards, values, mask, gamma=1.0)
    assert torch.equal(errors[0, :2], errors[1, :2])
    last, _ = generalized_advantages(rewards, values, mask, gamma=1.0, lam=0.0)
    assert torch.equal(last[0, :2], last[1, :2])
    whole, _ = generalized_advantages(rewards, values, mask, gamma=1.0, lam=1.0)
    assert (whole[0, :2] != whole[1, :2]).all()
    torch.testing.assert_close(whole[:2, :2].mean(0), torch.tensor([3.0 - 1, 3 - 2]))
