"""The advantages of TRL and verl, stated again as plain loops over rollouts and tokens, against ours.

The oracles follow the published definitions and what the two libraries compute (TRL and verl of 2026), written down
independently and kept slow, in Python's float64. Inputs are random: groups in any order and of any size from two up,
masks with gaps where the peer reads gaps as we do.
Legend: B rollouts, T length of the longest row, F reward functions.
"""

import math
import random

import pytest
import torch

from pl_grouprl.functional.advantages import (
    make_advantage_estimator,
    multi_reward_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
)

DTYPES = [(torch.float32, 2e-5), (torch.float64, 1e-10)]
VERL_EPS, TRL_EPS = 1e-6, 1e-4


class Batch:
    """Rewards that tie here and there, rollouts in random order, and rows of tokens with or without gaps."""

    def __init__(self, seed, dtype, gaps=True):
        dice = random.Random(seed)
        sizes = [dice.randint(2, 6) for _ in range(6)]
        self.group_ids = [1000 * group - 7 for group, size in enumerate(sizes) for _ in range(size)]
        dice.shuffle(self.group_ids)
        self.dtype, self.num = dtype, len(self.group_ids)
        self.rewards = self.round([dice.choice([dice.gauss(0, 2), 1.0, 0.25]) for _ in range(self.num)])
        self.greedy = self.round([dice.gauss(0, 1) for _ in range(self.num)])
        width = 12
        lengths = [dice.randint(1, width) for _ in range(self.num)]
        lengths[0] = width
        self.mask = [
            [int(t < length and not (gaps and 0 < t < length - 1 and dice.random() < 0.3)) for t in range(width)]
            for length in lengths
        ]
        self.lengths = [sum(row) for row in self.mask]
        self.values = [self.round([dice.gauss(0, 1) for _ in range(width)]) for _ in range(self.num)]
        self.token_rewards = [self.round([dice.gauss(0, 1) for _ in range(width)]) for _ in range(self.num)]

    def round(self, numbers):
        return torch.tensor(numbers, dtype=self.dtype).tolist()

    def tensor(self, numbers):
        return torch.tensor(numbers, dtype=self.dtype)

    def of_group(self, rollout):
        return [i for i in range(self.num) if self.group_ids[i] == self.group_ids[rollout]]

    def valid(self, row):
        return [t for t, inside in enumerate(self.mask[row]) if inside]


def mean(numbers):
    return math.fsum(numbers) / len(numbers)


def std(numbers):
    return math.sqrt(math.fsum((x - mean(numbers)) ** 2 for x in numbers) / (len(numbers) - 1))


def whitened(batch, rows):
    """Whiten the valid entries of rows; 0 elsewhere."""
    flat = [rows[i][t] for i in range(batch.num) for t in batch.valid(i)]
    centre, scale = mean(flat), math.sqrt(std(flat) ** 2 + 1e-8)
    return [[(row[t] - centre) / scale * inside for t, inside in enumerate(mask)] for row, mask in pairs(rows, batch)]


def pairs(rows, batch):
    return zip(rows, batch.mask, strict=True)


def equal_in_group(batch, rollout):
    return len({batch.rewards[i] for i in batch.of_group(rollout)}) == 1


def verl_grpo(batch, i):
    group = [batch.rewards[j] for j in batch.of_group(i)]
    return (batch.rewards[i] - mean(group)) / (std(group) + VERL_EPS)


def verl_rloo(batch, i):
    return batch.rewards[i] - mean([batch.rewards[j] for j in batch.of_group(i) if j != i])


def verl_opo(batch, i):
    group = batch.of_group(i)
    weighted = math.fsum(batch.lengths[j] * batch.rewards[j] for j in group)
    return batch.rewards[i] - weighted / sum(batch.lengths[j] for j in group)


def verl_passk(batch, i, normalise=True):
    group = [batch.rewards[j] for j in batch.of_group(i)]
    second, first = sorted(group)[-2:]
    if batch.rewards[i] < first:
        return 0.0
    return (first - second) / (std(group) + VERL_EPS if normalise else 1.0)


def verl_remax(batch, i):
    return batch.rewards[i] - batch.greedy[i]


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("name", "options", "oracle"),
    [
        ("grpo", {}, verl_grpo),
        ("rloo", {}, verl_rloo),
        ("opo", {}, verl_opo),
        ("grpo_passk", {}, verl_passk),
        ("grpo_passk", {"scale": "none"}, lambda batch, i: verl_passk(batch, i, normalise=False)),
        ("remax", {}, verl_remax),
    ],
)
def test_rollout_level_estimators_of_verl(name, options, oracle, seed, dtype, tolerance):
    batch = Batch(seed, dtype)
    ours = make_advantage_estimator(name, **options)(
        batch.tensor(batch.rewards),
        torch.tensor(batch.group_ids),
        lengths=torch.tensor(batch.lengths),
        greedy_rewards=batch.tensor(batch.greedy),
    )
    assert ours.dtype == dtype
    expected = [0.0 if name != "remax" and equal_in_group(batch, i) else oracle(batch, i) for i in range(batch.num)]
    torch.testing.assert_close(ours, batch.tensor(expected), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(("gamma", "gaps"), [(1.0, False), (0.9, True)])
def test_reinforce_plus_plus_of_verl(gamma, gaps, dtype, tolerance):
    batch = Batch(6, dtype, gaps)
    returns = [[0.0] * 12 for _ in range(batch.num)]
    for i in range(batch.num):
        to_go = 0.0
        for t in reversed(batch.valid(i)):
            to_go = returns[i][t] = batch.token_rewards[i][t] + gamma * to_go
    ours = reinforce_plus_plus_advantages(batch.tensor(batch.token_rewards), torch.tensor(batch.mask), gamma=gamma)
    torch.testing.assert_close(ours, batch.tensor(whitened(batch, returns)), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_reinforce_plus_plus_baseline_of_verl(dtype, tolerance):
    batch = Batch(7, dtype)
    equal = batch.of_group(3)  # verl's whitening moves such a group off 0, ours does not
    for i in equal:
        batch.rewards[i] = batch.rewards[3]
    centred = [batch.rewards[i] - mean([batch.rewards[j] for j in batch.of_group(i)]) for i in range(batch.num)]
    expected = whitened(batch, [[x] * 12 for x in centred])
    for i in range(batch.num):
        if equal_in_group(batch, i):
            expected[i] = [0.0] * 12
    ours = reinforce_plus_plus_baseline_advantages(
        batch.tensor(batch.rewards), torch.tensor(batch.group_ids), torch.tensor(batch.mask)
    )
    torch.testing.assert_close(ours, batch.tensor(expected), atol=tolerance, rtol=tolerance)


def several_rewards(batch, seed):
    """Three functions that skip some rollouts; every rollout but the last has one that applies."""
    dice = random.Random(seed)
    rows = []
    for _ in range(batch.num):
        row = [math.nan if dice.random() < 0.15 else dice.gauss(0, 2) for _ in range(2)]
        rows.append([*row, float(dice.randint(0, 1))])
    rows[-1] = [math.nan] * 3
    return [batch.round(row) for row in rows]


def present(numbers):
    return [x for x in numbers if not math.isnan(x)]


def weighted_sums(rows, weights):
    return [
        math.fsum(w * x for w, x in zip(weights, row, strict=True) if not math.isnan(x)) if present(row) else math.nan
        for row in rows
    ]


def standard(number, among, eps=TRL_EPS):
    among = present(among)
    if math.isnan(number) or len(set(among)) < 2:
        return 0.0
    return (number - mean(among)) / (std(among) + eps)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_several_rewards_of_trl(aggregation, seed, dtype, tolerance):
    batch, weights = Batch(seed, dtype), [1.0, 0.5, 2.0]
    rows = several_rewards(batch, seed)
    if aggregation == "sum_then_normalize":
        sums = batch.round(weighted_sums(rows, weights))
        expected = [standard(sums[i], [sums[j] for j in batch.of_group(i)]) for i in range(batch.num)]
    else:

        def among(i, f, x):
            return math.nan if math.isnan(x) else standard(x, [rows[j][f] for j in batch.of_group(i)])

        each = [[among(i, f, x) for f, x in enumerate(rows[i])] for i in range(batch.num)]
        sums = weighted_sums(each, weights)
        expected = [standard(x, sums) for x in sums]
    options = {"estimator": make_advantage_estimator("grpo", eps=TRL_EPS), "aggregation": aggregation, "eps": TRL_EPS}
    ours = multi_reward_advantages(batch.tensor(rows), weights, torch.tensor(batch.group_ids), **options)
    torch.testing.assert_close(ours, batch.tensor(expected), atol=tolerance, rtol=tolerance)
