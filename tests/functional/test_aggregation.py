import math

import pytest
import torch

from pl_grouprl.functional.advantages import REWARD_SCALES
from pl_grouprl.functional.losses import LOSS_AGG_MODES, LOSS_PRESETS, aggregate, loss_denominator
from pl_grouprl.functional.policy_loss import POLICY_LOSSES

# Rollouts: 0 has tokens 1, 2, 3 with the 3 masked; 1 has 10; 2 is empty; 3 has 100, all masked.
VALUES = torch.tensor([1.0, 10.0, 2.0, 3.0, 100.0])
MASK = torch.tensor([True, True, True, False, False])
INDEX = torch.tensor([0, 1, 0, 0, 3])
EXPECTED = {
    "token-mean": 13 / 3,
    "seq-mean-token-sum": (3 + 10) / 2,
    "seq-mean-token-mean": (1.5 + 10) / 2,
    "seq-mean-token-sum-norm": (3 + 10) / 8 / 2,
}


def _norm(mode):
    return 8.0 if mode.endswith("norm") else None


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_by_hand(mode):
    value = aggregate(VALUES, MASK, INDEX, mode, num_rollouts=4, norm=_norm(mode))
    torch.testing.assert_close(value, torch.tensor(EXPECTED[mode]))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_denominator_by_hand(mode):
    assert loss_denominator(MASK, INDEX, 4, mode) == (3 if mode == "token-mean" else 2)
    value = aggregate(VALUES, MASK, INDEX, mode, num_rollouts=4, norm=_norm(mode), denominator=6)
    local = 3 if mode == "token-mean" else 2
    torch.testing.assert_close(value, torch.tensor(EXPECTED[mode] * local / 6))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("cuts", [[8], [3, 5], [1, 1, 6], [1] * 8])
def test_micro_batches_add_up_to_the_whole(mode, cuts):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 1, 0, 9, 3, 2, 0, 4])
    index = torch.arange(8).repeat_interleave(lengths)
    values = torch.randn(len(index), generator=generator, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(len(index), generator=generator) < 0.7
    mask[index == 4] = False
    whole = aggregate(values, mask, index, mode, num_rollouts=8, norm=_norm(mode))

    parts = []
    last = 0
    for size in cuts:
        first, last = last, last + size
        chosen = (index >= first) & (index < last)
        parts.append((values[chosen], mask[chosen], index[chosen] - first, last - first))
    denominator = sum(loss_denominator(mask_N, index_N, number, mode) for _, mask_N, index_N, number in parts)
    total = sum(
        aggregate(values_N, mask_N, index_N, mode, num_rollouts=number, denominator=denominator, norm=_norm(mode))
        for values_N, mask_N, index_N, number in parts
    )
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(torch.autograd.grad(total, values)[0], torch.autograd.grad(whole, values)[0])


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_dummy_without_trained_tokens_changes_nothing(mode):
    index = torch.cat([INDEX, torch.tensor([4, 4])])
    values = torch.cat([VALUES, torch.tensor([math.nan, math.inf])]).requires_grad_()
    mask = torch.cat([MASK, torch.tensor([False, False])])
    value = aggregate(values, mask, index, mode, num_rollouts=5, norm=_norm(mode))
    torch.testing.assert_close(value, torch.tensor(EXPECTED[mode]))
    (gradient,) = torch.autograd.grad(value, values)
    assert gradient.isfinite().all()
    assert gradient[~mask].tolist() == [0.0] * 4


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("denominator", [None, 0, 0.0])
def test_nothing_to_train_is_zero_with_a_zero_gradient(mode, denominator):
    values = torch.randn(3, requires_grad=True)
    options = {"num_rollouts": 2, "denominator": denominator, "norm": _norm(mode)}
    value = aggregate(values, torch.zeros(3, dtype=torch.bool), torch.tensor([0, 0, 1]), mode, **options)
    value.backward()
    assert value == 0
    assert values.grad.tolist() == [0.0] * 3


def test_fractional_denominator_is_used_as_is():
    """One token over two ranks, each rank divides by 1/2 because gradients are averaged afterwards."""
    value = aggregate(
        torch.tensor([3.0]), torch.tensor([True]), torch.tensor([0]), "token-mean", num_rollouts=1, denominator=0.5
    )
    assert value == 6


def test_presets_name_what_exists():
    assert set(LOSS_PRESETS) == {"grpo", "dr_grpo", "dapo", "bnpo", "cispo", "gspo", "sapo"}
    for preset in LOSS_PRESETS.values():
        assert preset.scale in REWARD_SCALES
        assert preset.loss in POLICY_LOSSES
        assert preset.aggregation in LOSS_AGG_MODES
    assert LOSS_PRESETS["dr_grpo"] == ("none", "ppo", "seq-mean-token-sum-norm")


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="loss_agg_mode is 'mean'"):
        aggregate(VALUES, MASK, INDEX, "mean", num_rollouts=4)
    with pytest.raises(ValueError, match="loss_agg_mode is 'mean'"):
        loss_denominator(MASK, INDEX, 4, "mean")
    for mode, norm in (("seq-mean-token-sum-norm", None), ("seq-mean-token-sum-norm", 0), ("token-mean", 8)):
        with pytest.raises(ValueError, match=f"norm is {norm} for mode '{mode}'"):
            aggregate(VALUES, MASK, INDEX, mode, num_rollouts=4, norm=norm)
    with pytest.raises(ValueError, match=r"rollout_index_N has shape \(4,\)"):
        aggregate(VALUES, MASK, INDEX[:4], "token-mean", num_rollouts=4)
    with pytest.raises(ValueError, match="mask_N has dtype"):
        aggregate(VALUES, MASK.long(), INDEX, "token-mean", num_rollouts=4)
