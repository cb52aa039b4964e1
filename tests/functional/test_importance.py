import math

import pytest
import torch

from pl_grouprl.functional.importance import (
    IMPORTANCE_KINDS,
    REJECTION_KINDS,
    importance_weights,
    off_policy_sequence_mask,
    rejection_mask,
)

DIFFERENCE = "sampling/sampling_logp_difference"
RATIO = "sampling/importance_sampling_ratio"

# Ratios 2 and 1/4 in rollout 0, product 1/2; 4 and 1 in rollout 1, product 4, and a masked token; rollout 2 is empty.
ROLLOUTS = torch.tensor([0, 0, 1, 1, 1])
MASK = torch.tensor([True, True, True, False, True])
ROLLOUT_LOGPROBS = torch.tensor([-3.0, -1.0, -2.5, math.nan, -0.5], dtype=torch.float64)
OLD_LOGPROBS = ROLLOUT_LOGPROBS + torch.tensor([2.0, 0.25, 4.0, 1.0, 1.0], dtype=torch.float64).log()


def _weights(kind, chosen=slice(None), **bounds):
    options = {"mask_N": MASK[chosen], "rollout_index_N": ROLLOUTS[chosen], "num_rollouts": 3}
    return importance_weights(OLD_LOGPROBS[chosen], ROLLOUT_LOGPROBS[chosen], kind=kind, **options, **bounds)


@pytest.mark.parametrize(
    ("kind", "bounds", "weights", "kept", "ratio_sum", "count", "most", "least"),
    [
        ("none", {}, [1, 1, 1, 0, 1], [0, 1, 2, 4], 7.25, 4, 4, 0.25),
        ("token_truncate", {"low": 0.5}, [2, 0.5, 3, 0, 1], [0, 1, 2, 4], 6.5, 4, 3, 0.5),
        ("token_truncate", {"low": None}, [2, 0.25, 3, 0, 1], [0, 1, 2, 4], 6.25, 4, 3, 0.25),
        ("token_mask", {"low": 0.5}, [2, 0, 0, 0, 1], [0, 4], 3, 4, 2, 0),
        ("token_mask", {"low": 0.5, "high": None}, [2, 0, 4, 0, 1], [0, 2, 4], 7, 4, 4, 0),
        ("sequence_truncate", {"low": 0.6}, [0.6, 0.6, 3, 0, 3], [0, 1, 2, 4], 3.6, 2, 3, 0.6),
        ("sequence_mask", {}, [0.5, 0.5, 0, 0, 0], [0, 1], 0.5, 2, 0.5, 0),
        ("sequence_mask", {"low": 0.6, "high": 5.0}, [0, 0, 4, 0, 4], [2, 4], 4, 2, 4, 0),
    ],
)
def test_by_hand(kind, bounds, weights, kept, ratio_sum, count, most, least):
    result = _weights(kind, **bounds)
    torch.testing.assert_close(result.weights_N, torch.tensor(weights, dtype=torch.float64))
    assert result.mask_N.nonzero().flatten().tolist() == kept
    total, number = result.metrics[f"{RATIO}/mean"]
    assert float(total) == pytest.approx(ratio_sum)
    assert number == count
    assert float(result.extremes[f"{RATIO}/max"]) == pytest.approx(most)
    assert float(result.extremes[f"{RATIO}/min"]) == pytest.approx(least)
    total, number = result.metrics[f"{DIFFERENCE}/mean"]
    assert float(total) == pytest.approx(5 * math.log(2))  # |ln 2| + |ln 1/4| + |ln 4| + |ln 1|
    assert number == 4
    assert float(result.extremes[f"{DIFFERENCE}/max"]) == pytest.approx(2 * math.log(2))


# What `compute_rollout_rejection_mask` of verl 0.9.1 keeps of four rollouts of 6, 4, 5 and 1 tokens, one masked.
REJECTION = {
    "token_k1": (1.4, [0, 10, 13, 15]),
    "token_k2": (0.1, [0, 1, 5, 6, 10, 13, 14, 15]),
    "token_k3": (0.1, [0, 1, 5, 7, 10, 13, 14, 15]),
    "seq_sum_k1": (2.0, [6, 7, 8, 9, 15]),
    "seq_sum_k2": (0.5, [6, 7, 8, 9, 15]),
    "seq_sum_k3": (0.5, [6, 7, 8, 9, 15]),
    "seq_mean_k1": (1.2, [6, 7, 8, 9, 15]),
    "seq_mean_k2": (0.1, [15]),
    "seq_mean_k3": (0.1, [15]),
    "seq_max_k2": (0.2, [6, 7, 8, 9, 15]),
    "seq_max_k3": (0.2, [6, 7, 8, 9, 15]),
}


@pytest.mark.parametrize("kind", REJECTION_KINDS)
def test_rejection_keeps_what_verl_keeps(kind):
    threshold, kept = REJECTION[kind]
    place = torch.arange(24, dtype=torch.float64).reshape(4, 6)
    shift = torch.tensor([[0.3], [0.0], [-0.2], [0.1]], dtype=torch.float64)
    log_ratio = 0.5 * (2.9 * place + 2).cos() + shift * (place % 5)
    rollouts = torch.arange(4).repeat_interleave(torch.tensor([6, 4, 5, 1]))
    response = torch.arange(6) < torch.tensor([6, 4, 5, 1])[:, None]
    mask = torch.arange(16) != 2
    log_ratio_N = log_ratio[response].masked_fill(~mask, math.nan)
    inputs = log_ratio_N - 2, torch.full((16,), -2.0, dtype=torch.float64)
    axis = {"mask_N": mask, "rollout_index_N": rollouts, "num_rollouts": 5}
    found = rejection_mask(*inputs, kind=kind, threshold=threshold, **axis)
    assert found.nonzero().flatten().tolist() == kept


def test_the_off_policy_mask_by_hand():
    """Mean log(q / p): -ln 2 / 2 in rollout 0, -ln 2 in rollout 1 (without the masked token), 0 in rollout 2."""
    rollouts = torch.tensor([0, 0, 1, 1, 1, 2])
    mask = torch.tensor([True, True, True, False, True, True])
    difference = torch.tensor([1.0, -2.0, -1.0, math.nan, -1.0, 0.0], dtype=torch.float64) * math.log(2)
    axis = {"mask_N": mask, "rollout_index_N": rollouts, "num_rollouts": 3}
    for advantages, threshold, kept in [
        ([-1.0] * 6, -0.1, [0, 1, 2, 4]),
        ([-1.0] * 6, -0.5, [2, 4]),
        ([-1.0] * 6, 0.0, [0, 1, 2, 4, 5]),
        ([0.0, -1.0, -1.0, -1.0, 1.0, -1.0], -1.0, [0, 4]),
    ]:
        inputs = -difference, torch.zeros(6, dtype=torch.float64), torch.tensor(advantages)
        assert off_policy_sequence_mask(*inputs, threshold=threshold, **axis).nonzero().flatten().tolist() == kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", IMPORTANCE_KINDS[1:])
def test_against_a_loop_over_padded_rows(kind, dtype):
    """TRL's formulas, one rollout after another; our tokens are in random order."""
    generator = torch.Generator().manual_seed(0)
    old, rollout = -2 * torch.rand(2, 6, 8, generator=generator, dtype=dtype)
    mask = torch.rand(6, 8, generator=generator) < 0.7
    low, high = 0.6, 1.5
    expected = torch.zeros(6, 8, dtype=dtype)
    for i in range(6):
        sequence = math.exp(sum(float(old[i, t] - rollout[i, t]) for t in range(8) if mask[i, t]))
        for t in range(8):
            ratio = sequence if kind.startswith("sequence") else math.exp(float(old[i, t] - rollout[i, t]))
            is_inside = low <= ratio <= high
            bounded = min(max(ratio, low), high) if kind.endswith("truncate") else (ratio if is_inside else 0.0)
            expected[i, t] = bounded if mask[i, t] else 0.0
    order = torch.randperm(48, generator=generator)
    rows = {"rollout_index_N": torch.arange(6).repeat_interleave(8)[order], "num_rollouts": 6, "low": low, "high": high}
    old, rollout, shuffled = (numbers.flatten()[order] for numbers in (old, rollout, mask))
    result = importance_weights(old, rollout, kind=kind, mask_N=shuffled, **rows)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(result.weights_N, expected.flatten()[order], atol=tolerance, rtol=tolerance)
    assert 0 < result.mask_N.sum() <= mask.sum()
    if kind.endswith("mask"):
        assert torch.equal(result.mask_N, result.weights_N > 0)


@pytest.mark.parametrize("kind", IMPORTANCE_KINDS)
def test_parts_reduce_to_the_whole(kind):
    """Two ranks, of which one has the rollouts 0 and 2 and the other rollout 1, and a third one without a token."""
    whole = _weights(kind)
    parts = [_weights(kind, rollout == ROLLOUTS) for rollout in range(3)]
    for name, pair in whole.metrics.items():
        summed = [sum(float(part.metrics[name][i]) for part in parts) for i in (0, 1)]
        assert summed == pytest.approx([float(value) for value in pair])
    for name, value in whole.extremes.items():
        reduce = max if name.endswith("max") else min
        assert reduce(float(part.extremes[name]) for part in parts) == float(value)


def test_weights_have_no_gradient_and_stay_finite():
    old = torch.tensor([500.0, -500.0], requires_grad=True)
    options = {"mask_N": torch.ones(2, dtype=torch.bool), "rollout_index_N": torch.tensor([0, 1]), "num_rollouts": 2}
    for kind in IMPORTANCE_KINDS:
        bounds = {} if kind == "none" else {"low": 0.0, "high": None}
        result = importance_weights(old, torch.zeros(2), kind=kind, **options, **bounds)
        assert not result.weights_N.requires_grad
        assert result.weights_N.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "bounds", "argument"),
    [
        ("tis", {}, "importance_sampling"),
        ("none", {"low": 0.5}, "low"),
        ("token_mask", {"high": None}, "low.*high"),
        ("token_mask", {"low": -1}, "low"),
        ("token_truncate", {"low": 2.0, "high": 1.0}, "high"),
    ],
)
def test_errors_name_the_argument(kind, bounds, argument):
    with pytest.raises(ValueError, match=argument):
        _weights(kind, **bounds)
