"""Groups on ranks: balanced loads for any number of groups."""

import itertools
import random
from statistics import mean

import pytest
from helpers.random_lengths import log_normal_groups

from pl_grouprl.models import ModelCost
from pl_grouprl.packing import balance, imbalance

QWEN3_0_6B = ModelCost(2 * 440e6, {None: 28 * 16 * 4 * 128}, 2 * 1024 * 151_936)


def best_imbalance(costs, num_ranks):
    """By trying all assignments."""
    return min(imbalance(costs, ranks, num_ranks) for ranks in itertools.product(range(num_ranks), repeat=len(costs)))


def test_imbalance_by_hand():
    assert imbalance([3, 1, 2], [0, 1, 1], 2) == 1
    assert imbalance([3, 1, 2], [0, 0, 1], 2) == 4 / 3
    assert imbalance([3, 1], [2, 2], 4) == 4
    assert imbalance([0, 0], [0, 0], 2) == 1
    assert imbalance([], [], 3) == 1


def test_the_costliest_first_by_hand():
    # 5 and 5, then 4 to one of them, 3 and 2 to the other: 9 and 10, which is as even as 19 can be.
    assert balance([5, 5, 4, 3, 2], 2) == [0, 1, 0, 1, 1]


def test_an_exchange_by_hand():
    # The costliest first gives 3 + 2 + 2 and 3 + 2; a 3 exchanged for a 2 makes that 2 + 2 + 2 and 3 + 3.
    assert imbalance([3, 3, 2, 2, 2], balance([3, 3, 2, 2, 2], 2), 2) == 1


@pytest.mark.parametrize(("num_groups", "num_ranks"), [(7, 2), (7, 3), (5, 4), (3, 3)])
def test_few_groups_are_close_to_the_best_assignment(num_groups, num_ranks):
    rng = random.Random(num_groups)
    for _ in range(10):
        costs = [rng.lognormvariate(0, 0.6) for _ in range(num_groups)]
        assert imbalance(costs, balance(costs, num_ranks), num_ranks) <= 1.1 * best_imbalance(costs, num_ranks)


@pytest.mark.parametrize("costs", [[1] * 9, [0] * 9, [0] * 8 + [5], [1e9, *[1] * 8], [float(n) for n in range(9)]])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 9])
def test_every_rank_has_a_group(costs, num_ranks):
    assert set(balance(costs, num_ranks)) == set(range(num_ranks))


def test_fewer_groups_than_ranks_have_a_rank_each():
    ranks = balance([2.0, 1.0, 3.0], 5)
    assert len(set(ranks)) == 3
    assert balance([], 2) == []


def test_the_search_ends_when_good_enough():
    costs = [random.Random(0).lognormvariate(0, 1) for _ in range(40)]
    assert imbalance(costs, balance(costs, 4, good_enough=2), 4) <= 2
    assert imbalance(costs, balance(costs, 4), 4) <= 1.001


def test_random_batches_are_even_over_eight_ranks():
    rng, with_balance, without = random.Random(0), [], []
    for _ in range(60):
        groups = log_normal_groups(rng)
        costs = QWEN3_0_6B.of_groups(groups)
        with_balance.append(imbalance(costs, balance(costs, 8), 8))
        without.append(imbalance(costs, [group * 8 // len(groups) for group in range(len(groups))], 8))
    assert mean(with_balance) <= 1.05
    assert mean(without) > 1.1
