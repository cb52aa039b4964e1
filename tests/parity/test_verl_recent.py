"""What verl added in 2026: the numbers are what verl's own functions return for these inputs (August 2026, float64).

A group of one rollout and a group of equal rewards differ on purpose: they get exactly 0 here.
"""

import pytest
import torch

from pl_grouprl.functional.advantages import make_advantage_estimator
from pl_grouprl.functional.losses import aggregate
from pl_grouprl.functional.policy_loss import dro_policy_loss

# Two prompts with rollouts of 5, 3, 3, 2 and 4 tokens.
IDS = torch.tensor([0, 0, 0, 1, 1])
LENGTHS = torch.tensor([5, 3, 3, 2, 4])
MASK = torch.arange(5) < LENGTHS[:, None]
LOGPROBS = torch.tensor(
    [
        [-0.1, -1.2, -0.5, -2.0, -0.3],
        [-0.7, -0.2, -1.5, 0.0, 0.0],
        [-2.2, -0.9, -0.4, 0.0, 0.0],
        [-0.6, -0.1, 0.0, 0.0, 0.0],
        [-1.1, -0.8, -0.25, -0.05, 0.0],
    ],
    dtype=torch.float64,
)
SUM_PI_SQUARED = torch.tensor(
    [
        [0.83, 0.2, 0.45, 0.15, 0.6],
        [0.4, 0.7, 0.2, 0.5, 0.5],
        [0.3, 0.35, 0.5, 0.5, 0.5],
        [0.4, 0.85, 0.5, 0.5, 0.5],
        [0.25, 0.3, 0.65, 0.92, 0.5],
    ],
    dtype=torch.float64,
)
NORMS = 1 - 2 * LOGPROBS.exp() + SUM_PI_SQUARED
REWARDS = torch.zeros(5, 5, dtype=torch.float64)
REWARDS[range(5), LENGTHS - 1] = torch.tensor([1.0, 0.0, 2.0, -1.0, 3.0], dtype=torch.float64)
REWARDS[0, 1] = 0.5  # a reward in the middle
WITH_GAPS = MASK.clone()
WITH_GAPS[[0, 4, 2], [2, 1, 0]] = False

WHOLE = [
    [0.047190292, -0.038324913, -0.14315192, 1.0, 1.0],
    [-1.452809708, -1.538324913, -1.14315192, 0, 0],
    [0.547190292, 0.461675087, 0.85684808, 0, 0],
    [-2.635845046, -2.9679999, 0, 0, 0],
    [1.364154954, 1.0320001, 3.0, 3.0, 0],
]
GAPS = [
    [1.428625963, 0.268212539, 0, 1.0, 1.0],
    [-0.071374037, -1.231787461, -0.725483637, 0, 0],
    [0, 0.768212539, 1.274516363, 0, 0],
    [-2.635845046, -2.9e-08, 0, 0, 0],
    [1.364154954, 0, 3.0, 3.0, 0],
]
CLOSED = [
    [0.354572985, 0.199571918, 0, 0.449610123, 1.0],
    [-1.145427015, -1.300428082, -0.550389877, 0, 0],
    [0, 0.854572985, 0.699571918, 0, 0],
    [-2.635845046, -2.655224788, 0, 0, 0],
    [1.364154954, 0, 1.344775212, 3.0, 0],
]


def without_tail(expected, places):
    """The rewards-to-go of the longest rollouts against themselves: 0 up to verl's epsilon."""
    rows = [list(row) for row in expected]
    for row, place in places:
        rows[row][place] = 0.0
    return rows


@pytest.mark.parametrize(
    ("name", "mask", "tail", "expected"),
    [
        ("optimal_token_baseline", MASK, True, WHOLE),
        ("optimal_token_baseline", MASK, False, without_tail(WHOLE, [(0, 3), (0, 4), (4, 2), (4, 3)])),
        ("optimal_token_baseline", WITH_GAPS, True, GAPS),
        ("optimal_token_baseline", WITH_GAPS, False, without_tail(GAPS, [(0, 3), (0, 4), (4, 2), (4, 3)])),
        ("tir_optimal_token_baseline", MASK, True, WHOLE),
        ("tir_optimal_token_baseline", WITH_GAPS, True, CLOSED),
        ("tir_optimal_token_baseline", WITH_GAPS, False, without_tail(CLOSED, [(0, 4), (4, 3)])),
    ],
)
def test_optimal_token_baseline(name, mask, tail, expected):
    estimator = make_advantage_estimator(name, handle_zero_tail=tail)
    found = estimator(REWARDS, IDS, mask=mask, score_norms=NORMS)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_equal_rewards_and_single_rollouts_give_exactly_zero(name):
    rewards = torch.zeros(5, 5)
    rewards[range(5), LENGTHS - 1] = torch.tensor([0.7, 0.7, 0.7, -1.0, 3.0])
    found = make_advantage_estimator(name)(rewards, torch.tensor([0, 0, 0, 1, 2]), mask=MASK, score_norms=NORMS)
    assert not found.any()
    rewards[4] = float("nan")
    found = make_advantage_estimator(name)(rewards, torch.tensor([0, 0, 0, 1, 1]), mask=MASK, score_norms=NORMS)
    assert not found.any()


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: baseline(score_norms=NORMS[:, 1:]), "score_norms"),
        (lambda: baseline({"eps": 0.0}), "eps"),
        (lambda: make_advantage_estimator("gpg", f_norm=0.0)(REWARDS[:, 0], IDS), "f_norm"),
        (lambda: dro_policy_loss(*[REWARDS[0]] * 3, mask_N=MASK[0], dro_beta=0.0), "dro_beta"),
    ],
)
def test_refusals(call, argument):
    with pytest.raises(ValueError, match=argument):
        call()


def baseline(options=None, **data):
    estimator = make_advantage_estimator("optimal_token_baseline", **(options or {}))
    return estimator(REWARDS, IDS, **{"mask": MASK, "score_norms": NORMS, **data})


@pytest.mark.parametrize("f_norm", [1.0, 2.0])
def test_gpg(f_norm):
    """Seven rewards, four of them not 0: alpha = 7 / 4."""
    rewards = torch.tensor([0.0, 1.0, 1.0, 0.0, 2.0, -1.0, 0.0])
    ids = torch.tensor([3, 3, 3, 8, 8, 8, 8])
    expected = torch.tensor([-1.16666675, 0.58333331, 0.58333331, -0.4375, 3.0625, -2.1875, -0.4375]) / f_norm
    estimator = make_advantage_estimator("gpg", f_norm=f_norm)
    torch.testing.assert_close(estimator(rewards, ids), expected, rtol=0, atol=1e-6)
    # A rollout without a reward counts in neither number, equal rewards give 0, and there may be no reward at all.
    more = torch.tensor([float("nan"), 0.5, 0.5])
    found = estimator(torch.cat([rewards, more[:1]]), torch.cat([ids, ids[:1]]))
    torch.testing.assert_close(found, torch.cat([expected, torch.zeros(1)]), rtol=0, atol=1e-6)
    assert not estimator(more, torch.zeros(3, dtype=torch.long)).any()
    assert not estimator(torch.zeros(3), torch.zeros(3, dtype=torch.long)).any()


def test_dro():
    policy = torch.tensor([-0.5, -1.2, -0.3, -2.0, -0.1], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-0.7, -1.0, -0.3, -1.5, -0.4], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, -0.5, -2.0, 0.3], dtype=torch.float64)
    mask = torch.ones(5, dtype=torch.bool)
    loss = dro_policy_loss(policy, old, advantages, mask_N=mask, dro_beta=0.7)
    total = aggregate(loss.per_token_N, mask, torch.tensor([0, 0, 0, 1, 1]), "token-mean", num_rollouts=2)
    total.backward()
    assert total.item() == pytest.approx(-0.4546)
    assert policy.grad.tolist() == pytest.approx([-0.172, -0.228, 0.1, 0.33, -0.018])
