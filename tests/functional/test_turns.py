"""Advantages per turn: by hand, and against loops over turns in plain Python."""

import math
import random
from itertools import groupby
from statistics import fmean, stdev

import pytest
import torch

from pl_grouprl.functional.advantages import (
    BranchPaths,
    gagpo_advantages,
    generalized_advantages,
    group_relative_advantages,
    leaf_weights,
    turn_advantages,
)


def unbranched(count):
    return BranchPaths([()] * count, [()] * count)


def rows(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


# Three turns of 2, 1 and 2 tokens; 7 marks what the model reads.
TURNS = rows([-1, 0, 0, -1, -1, 1, -1, 2, 2], dtype=torch.int64)
WRITTEN = TURNS >= 0
REWARDS = rows([7, 1, 1, 7, 7, 0, 7, 0, 4])  # 2, 0 and 4 per turn
VALUES = rows([9, 3, 9, 9, 9, 2, 9, 1, 9])  # 3, 2 and 1 where turns begin


def test_three_turns_by_hand():
    """delta = 2 + 2/2 - 3, 0 + 1/2 - 2, 4 + 6/2 - 1 (6 after the end), and A_k = delta_k + A_{k+1} / 4."""
    options = {"gamma": 0.5, "lam": 0.5, "bootstrap_value": rows(6)[0][None]}
    advantages, returns, starts = turn_advantages(REWARDS, VALUES, WRITTEN, TURNS, **options)
    assert advantages.tolist() == [[0, 0, 0, 0, 0, 0, 0, 6, 6]]  # 0 + 0/4, -1.5 + 6/4, 6
    assert returns.tolist() == [[0, 3, 3, 0, 0, 2, 0, 7, 7]]
    assert starts.nonzero()[:, 1].tolist() == [1, 5, 7]
    _, returns, _ = turn_advantages(REWARDS, VALUES, WRITTEN, TURNS, **options, critic_lam=0.0)
    assert returns[0, [1, 5, 7]].tolist() == [3, 0.5, 7]


def test_gamma_counts_turns_not_tokens():
    """GAE per token discounts the last reward by gamma^4, GAE per turn by gamma^2."""
    zeros, last = torch.zeros_like(VALUES), torch.zeros_like(REWARDS).index_fill(1, torch.tensor([8]), 1.0)
    per_turn, _, _ = turn_advantages(last, zeros, WRITTEN, TURNS, gamma=0.5, lam=1.0)
    per_token, _ = generalized_advantages(last, zeros, WRITTEN, gamma=0.5, lam=1.0)
    assert (per_turn[0, 1], per_token[0, 1]) == (0.25, 0.0625)


def test_a_token_per_turn_is_gae_and_one_turn_is_reward_minus_value():
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 3, 6, generator=generator, dtype=torch.float64)
    mask, turns = torch.ones(3, 6, dtype=torch.bool), torch.arange(6).expand(3, 6)
    found = turn_advantages(rewards, values, mask, turns, gamma=0.9, lam=0.7)
    torch.testing.assert_close(found[:2], generalized_advantages(rewards, values, mask, gamma=0.9, lam=0.7))
    assert found[2].all()
    found, _, starts = turn_advantages(rewards, values, mask, torch.zeros_like(turns), gamma=1.0, lam=0.7)
    torch.testing.assert_close(found, (rewards.sum(1) - values[:, 0])[:, None].expand(3, 6))
    assert starts.nonzero().tolist() == [[0, 0], [1, 0], [2, 0]]


def random_turns(generator, count):
    """Rows of turns between texts of other lengths, padded, as lists of (turn or -1) per token."""
    found = []
    for _ in range(count):
        row, turn = [-1] * generator.randint(0, 2), 0
        for turn in range(generator.randint(0, 4)):
            row += [turn] * generator.randint(1, 3) + [-1] * generator.randint(1, 2)
        found.append(row)
    width = max(map(len, found)) + 1
    return torch.tensor([row + [-1] * (width - len(row)) for row in found])


def turn_lists(rewards, turns):
    """Sum of rewards of each turn, a list per row."""
    return [
        [sum(r for r, _ in own) for turn, own in groupby(zip(*row, strict=True), lambda pair: pair[1]) if turn >= 0]
        for row in zip(rewards.tolist(), turns.tolist(), strict=True)
    ]


def scan(rewards, values, gamma, lam, after=0.0):
    """GAE of one list of steps."""
    advantage, found = 0.0, []
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * after - value + gamma * lam * advantage
        after = value
        found.append(advantage)
    return found[::-1]


@pytest.mark.parametrize("seed", range(5))
def test_equals_a_loop_over_turns(seed):
    generator = random.Random(seed)
    turns = random_turns(generator, 6)
    torch.manual_seed(seed)
    rewards, values = torch.randn(2, *turns.shape, dtype=torch.float64)
    after, lam = torch.randn(6, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
    trained = (turns >= 0) & (torch.rand(turns.shape) > 0.2)
    noise = torch.where(turns >= 0, values, torch.nan)  # what the model reads has no value
    advantages, returns, starts = turn_advantages(
        rewards, noise, trained, turns, gamma=0.9, lam=lam, bootstrap_value=after
    )
    for row, rewards_K in enumerate(turn_lists(rewards * trained, turns)):
        firsts = [int((turns[row] == turn).nonzero()[0]) for turn in range(len(rewards_K))]
        values_K = values[row, firsts].tolist()
        expected = scan(rewards_K, values_K, 0.9, lam[row].item(), after[row].item())
        for place, turn in enumerate(turns[row].tolist()):
            own = expected[turn] if trained[row, place] else 0.0
            assert advantages[row, place].item() == pytest.approx(own, abs=1e-12)
            own = expected[turn] + values_K[turn] if trained[row, place] else 0.0
            assert returns[row, place].item() == pytest.approx(own, abs=1e-12)
            assert starts[row, place] == (place in firsts and bool(trained[row, place]))


def test_trained_tokens_need_a_turn():
    with pytest.raises(ValueError, match="turns is negative at a trained token"):
        turn_advantages(REWARDS, VALUES, torch.ones_like(WRITTEN), TURNS, gamma=1.0, lam=1.0)


def test_no_rows_and_no_turns():
    for shape in ((0, 0), (2, 0), (2, 3)):
        none, turns = torch.zeros(shape), torch.full(shape, -1)
        found = turn_advantages(none, none, none.bool(), turns, gamma=1.0, lam=1.0)
        assert [tuple(part.shape) for part in found] == [shape] * 3
        ids, branches = torch.zeros(shape[0], dtype=torch.long), unbranched(shape[0])
        assert gagpo_advantages(none, ids, none.bool(), turns, turns, branches).shape == shape


# GAGPO.


def gagpo(rewards, turns, states, ids=None, branches=None, mask=None, **options):
    ids = torch.zeros(len(turns), dtype=torch.long) if ids is None else ids
    branches = unbranched(len(turns)) if branches is None else branches
    return gagpo_advantages(rewards, ids, turns >= 0 if mask is None else mask, turns, states, branches, **options)


def test_gagpo_by_hand():
    """From state 0 both; then one in state 1 with reward 1, one in state 2 with 0, both end in state 3 with 4 and 0.

    With gamma = lam = 1/2: returns 1/2 * (1 + 4/2) = 1.5, 3, 4 and 0, 0, 0, so V = 0.75, 3, 0 and 2 (the mean of 4, 0).
    delta: 3/2 - 0.75 = 0.75, 1 + 1 - 3 = -1, 4 - 2 = 2 and 0 - 0.75, 0 + 1 - 0 = 1, 0 - 2 = -2.
    A: 2, -1 + 1/2 = -0.5, 0.75 - 1/8 = 0.625 and -2, 1 - 1/2 = 0.5, -0.75 + 1/8 = -0.625; their mean is 0.
    """
    turns = torch.tensor([[0, 0, -1, 1, -1, 2], [0, -1, 1, 1, -1, 2]])
    rewards = rows([0, 0, 9, 1, 9, 4], [0, 9, 0, 0, 9, 0])
    states = torch.tensor([[0, 0, 0, 1, 0, 3], [0, 0, 2, 2, 0, 3]])
    expected = rows([0.625, 0.625, 0, -0.5, 0, 2], [-0.625, 0, 0.5, 0.5, 0, -2])
    found = gagpo(rewards, turns, states, gamma=0.5, lam=0.5, scale="none")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)
    std = math.sqrt(2 * (0.625**2 + 0.5**2 + 2**2) / 5)
    found = gagpo(rewards, turns, states, gamma=0.5, lam=0.5, eps=0.0)
    torch.testing.assert_close(found, expected / std, rtol=0, atol=1e-15)


@pytest.mark.parametrize("scale", ["group", "none"])
def test_gagpo_of_single_turns_is_grpo(scale):
    outcomes, ids = torch.tensor([1.0, 0.0, 0.0, 2.0, 2.0, math.nan, 1.0]), torch.tensor([4, 4, 4, 7, 7, 7, 9])
    turns = torch.tensor([[0, 0, -1]] * 7)
    rewards = torch.zeros(7, 3).index_copy(1, torch.tensor([1]), outcomes[:, None])
    found = gagpo(rewards, turns, torch.zeros_like(turns), ids, scale=scale)
    expected = group_relative_advantages(outcomes, ids, scale=scale)
    torch.testing.assert_close(found, expected[:, None] * (turns >= 0))
    assert not found[3:].any()  # equal rewards, no reward, a group of one


@pytest.mark.parametrize("seed", range(5))
def test_gagpo_equals_loops_over_turns(seed):
    generator = random.Random(seed)
    count, gamma, lam = 8, 0.9, 0.6
    turns, ids = random_turns(generator, count), [generator.randint(0, 1) for _ in range(count)]
    torch.manual_seed(seed)
    rewards = torch.randn(turns.shape, dtype=torch.float64)
    states = torch.randint(0, 3, turns.shape).where(turns >= 0, 99)
    rewards[0, (turns[0] >= 0).nonzero().flatten()[:1]] = torch.nan
    found = gagpo(rewards, turns, states, torch.tensor(ids), gamma=gamma, lam=lam, eps=0.0)

    sums, own_states, returns = turn_lists(rewards, turns), [], {}
    for row, steps in enumerate(sums):
        own_states.append([int(states[row, (turns[row] == turn).nonzero()[0]]) for turn in range(len(steps))])
        for turn in range(len(steps)) if row else ():
            later = sum(gamma**j * reward for j, reward in enumerate(steps[turn:]))
            returns.setdefault((ids[row], own_states[row][turn]), []).append(later)
    raw = {
        row: scan(steps, [fmean(returns[ids[row], state]) for state in own_states[row]], gamma, lam)
        for row, steps in enumerate(sums)
        if row
    }
    for row in range(count):
        of_group = [value for other, values in raw.items() if ids[other] == ids[row] for value in values]
        center, spread = (fmean(of_group), stdev(of_group)) if len(of_group) > 1 else (0.0, 0.0)
        spread = spread if spread > 1e-12 else math.inf  # a rollout alone in its group
        for place, turn in enumerate(turns[row].tolist()):
            own = (raw[row][turn] - center) / spread if turn >= 0 and row else 0.0
            assert found[row, place].item() == pytest.approx(own, abs=1e-8)


def test_gagpo_counts_a_shared_turn_once():
    """Two leaves share their first turn; a third rollout does not. V(0) is the mean over the two first turns."""
    turns = torch.tensor([[0, -1, 1]] * 3)
    states = torch.tensor([[0, 0, 1], [0, 0, 1], [0, 0, 2]])
    rewards = rows([0, 0, 1], [0, 0, 0], [0, 0, 2])
    branches = BranchPaths([(2,), (2,), ()], [(0, 0), (0, 1), (1,)])
    found = gagpo(rewards, turns, states, branches=branches, lam=0.0, scale="none")
    values = {0: (0.5 + 2) / 2, 1: 0.5, 2: 2.0}
    raw = [[values[1] - values[0], 1 - values[1]], [values[1] - values[0], 0 - values[1]], [2 - values[0], 0.0]]
    mean = fmean(value for row in raw for value in row)
    weights = leaf_weights([0, 0, 0], turns >= 0, branches)
    assert weights.tolist() == [0.75, 0.75, 1.5]
    for row in range(3):
        expected = [(value - mean) * weights[row].item() for value in raw[row]]
        assert found[row, [0, 2]].tolist() == pytest.approx(expected, abs=1e-12)
    assert found[0, 0] == found[1, 0]  # with lam = 0, a shared turn has one advantage


def test_gagpo_ignores_untrained_rewards_and_checks_its_options():
    turns = torch.tensor([[0, -1, 1]] * 2)
    rewards, states = rows([0, 5, 1], [0, 7, 0]), torch.tensor([[0, 0, 1]] * 2)
    found = gagpo(rewards, turns, states)
    torch.testing.assert_close(found, gagpo(rewards * (turns >= 0), turns, states))
    assert gagpo(rewards.float(), turns, states).dtype == torch.float32
    for options, name in (({"scale": "batch"}, "scale"), ({"lam": 2.0}, "lam"), ({"gamma": -1.0}, "gamma")):
        with pytest.raises(ValueError, match=name):
            gagpo(rewards, turns, states, **options)
