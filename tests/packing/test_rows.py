"""Groups in rows of a token budget: each once, within the budget, in few rows, with the gradients of one at a time."""

import random
from statistics import mean

import pytest
import torch
from helpers.random_lengths import log_normal_groups
from helpers.tiny_models import gradients, random_groups, tiny_model, worst_gradient_error

from pl_grouprl.attention import shared_prefix
from pl_grouprl.models.score import score
from pl_grouprl.packing import RowPlan, SplitGroup, pack, plan_repeated_rows, plan_rows
from pl_grouprl.types import RolloutGroup


def fewest_bins(sizes, capacity):
    """By trying each item in each bin."""

    def fits(remaining, rooms):
        if not remaining:
            return True
        first, *others = remaining
        tried = {room: place for place, room in enumerate(rooms) if room >= first}
        return any(
            fits(others, [room - first * (number == place) for number, room in enumerate(rooms)])
            for place in tried.values()
        )

    return next(n for n in range(len(sizes) + 1) if fits(sorted(sizes, reverse=True), [capacity] * n))


def test_best_fit_by_hand():
    # Shared sizes 3, 7, 2, 4 and 6 with a budget of 10: 7 + 3, 6 + 4, 2.
    groups = [(1, [1, 1]), (2, [5]), (1, [1]), (2, [2]), (3, [0, 3])]
    assert plan_rows(groups, 10) == RowPlan(((0, 1), (3, 4), (2,)), ())


def test_where_best_fit_needs_one_row_too_many():
    # Best fit: 5 + 4, 4 + 3 + 2, 2. All 20 tokens fit into two rows of 10.
    plan = plan_rows([(1, [size - 1]) for size in (5, 4, 4, 3, 2, 2)], 10)
    assert sorted(sum((5, 4, 4, 3, 2, 2)[group] for group in row) for row in plan.rows) == [10, 10]


def test_without_a_budget_there_is_one_row():
    groups = [(100, [50]), (1, [1])]
    assert plan_rows(groups, None) == RowPlan(((0, 1),), ())
    assert plan_repeated_rows([(5, [2, 9]), (1, [1])], None) == (((0, (0, 1)), (1, (0,))),)
    for plan in (plan_rows([(3, [])], None), plan_rows([], 5)):
        assert plan == RowPlan((), ())
    assert plan_repeated_rows([(3, [])], None) == ()


def test_groups_without_rollouts_are_skipped():
    assert plan_rows([(9, []), (2, [3]), (1, [])], 5) == RowPlan(((1,),), ())
    assert plan_repeated_rows([(9, []), (2, [3])], 5) == (((1, (0,)),),)


def test_a_group_larger_than_the_budget_by_hand():
    # 4 + 12 tokens with a budget of 8: rollouts of 5 + 3 and 4 in slices; the prompt is not counted there.
    assert plan_rows([(2, [2]), (4, [3, 4, 5, 0])], 8) == RowPlan(((0,),), (SplitGroup(1, ((0, 2, 3), (1,))),))


def test_repeated_rows_by_hand():
    # Whole lengths 6, 3 and 5, 4: two of at most 6, then two of at most 4 in a budget of 12.
    assert plan_repeated_rows([(2, [4, 1]), (3, [2, 1])], 12) == (((0, (0,)), (1, (0,))), ((0, (1,)), (1, (1,))))


@pytest.mark.parametrize(
    ("plan", "groups", "message"),
    [
        (plan_rows, [(1, [1]), (9, [1])], "max_tokens is 8, but the prompt of group 1"),
        (plan_rows, [(4, [2, 9])], "max_tokens is 8, but rollout 1 of group 0"),
        (plan_repeated_rows, [(1, [1]), (7, [2])], "max_tokens is 8, but group 1 with its rollout 0"),
    ],
)
def test_sequences_beyond_the_budget_are_refused(plan, groups, message):
    with pytest.raises(ValueError, match=message):
        plan(groups, 8)


@pytest.mark.parametrize("seed", range(12))
def test_few_groups_need_as_few_rows_as_the_best_plan(seed):
    rng = random.Random(seed)
    sizes = [rng.randint(2, 12) for _ in range(9)]
    assert len(plan_rows([(1, [size - 1]) for size in sizes], 20).rows) == fewest_bins(sizes, 20)


@pytest.mark.parametrize("budget", [8192, 12_288, 16_384])
def test_every_group_once_and_within_the_budget(budget):
    rng = random.Random(1)
    for number in range(10):
        groups = log_normal_groups(rng, groups=3 + 9 * number)
        plan = plan_rows(groups, budget)
        planned = [g for row in plan.rows for g in row] + [s.group for s in plan.splits]
        assert sorted(planned) == list(range(len(groups)))
        sizes = [sum(groups[g][0] + sum(groups[g][1]) for g in row) for row in plan.rows]
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) <= budget
        for split in plan.splits:
            rollouts = groups[split.group][1]
            assert sorted(r for part in split.slices for r in part) == list(range(len(rollouts)))
            assert groups[split.group][0] + sum(rollouts) > budget
            assert all(sum(rollouts[r] for r in part) <= budget for part in split.slices)
        repeated = plan_repeated_rows(groups, budget)
        units = [(g, r) for batch in repeated for g, part in batch for r in part]
        assert sorted(units) == [(g, r) for g, (_, rollouts) in enumerate(groups) for r in range(len(rollouts))]
        for batch in repeated:
            lengths = [groups[g][0] + groups[g][1][r] for g, part in batch for r in part]
            assert len(lengths) * max(lengths) <= budget


def test_rows_use_the_budget():
    # 64 groups of 8, about 280,000 tokens: no plan could use more than 97.3 % of whole rows on average.
    rng, used = random.Random(0), []
    for _ in range(60):
        groups = log_normal_groups(rng)
        rows = plan_rows(groups, 16_384).rows
        assert sum(len(row) for row in rows) == len(groups)
        used.append(sum(prompt + sum(rollouts) for prompt, rollouts in groups) / (len(rows) * 16_384))
    assert mean(used) >= 0.95


def summed_gradients(model, batches, num_tokens):
    """Of the mean of all log-probabilities, weighted by the tokens, through one pass per batch."""
    model.zero_grad()
    with shared_prefix(model):
        for batch in batches:
            weights_N = torch.sin(batch.targets_N.to(torch.float64))
            (score(model, batch).logprobs_N @ weights_N / num_tokens).backward()
    return gradients(model)


@pytest.mark.parametrize("seed", range(2))
def test_gradients_are_those_of_one_group_at_a_time(seed):
    model = tiny_model("qwen3", dtype=torch.float64)
    shapes = log_normal_groups(random.Random(seed), groups=6, rollouts=3, prompt=8, rollout=6)
    groups = random_groups(seed, shapes)
    num_tokens = sum(sum(rollouts) for _, rollouts in shapes)
    expected = summed_gradients(model, [pack([group]) for group in groups], num_tokens)
    rows = plan_rows(shapes, 80).rows
    assert 1 < len(rows) < len(groups)
    packed = [pack([groups[g] for g in row]) for row in rows]
    assert all(batch.padding_fraction == 0 for batch in packed)
    assert worst_gradient_error(summed_gradients(model, packed, num_tokens), expected) < 1e-6
    parts = [
        [RolloutGroup(groups[g].prompt_ids, [groups[g].rollouts[r] for r in part]) for g, part in batch]
        for batch in plan_repeated_rows(shapes, 80)
    ]
    padded = [pack(part, "repeated") for part in parts]
    assert len(padded) > 1
    assert worst_gradient_error(summed_gradients(model, padded, num_tokens), expected) < 1e-6
