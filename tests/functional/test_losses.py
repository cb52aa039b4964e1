"""Aggregation of losses per token, the loss of values, and that of routers, by hand and against loops."""

import math

import pytest
import torch
from helpers.ranks import on_ranks

from pl_grouprl.functional.advantages import REWARD_SCALES
from pl_grouprl.functional.losses import (
    LOSS_AGG_MODES,
    LOSS_PRESETS,
    aggregate,
    clipped_value_loss,
    explained_variance,
    load_balancing_loss,
    loss_denominator,
)
from pl_grouprl.functional.policy_loss import POLICY_LOSSES
from pl_grouprl.packing import SharedPrefixLayout

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


def _tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def _ones(n):
    return torch.ones(n, dtype=torch.bool)


# Old values 0, 0.9, 0; the range 0.5 holds the first and the third at 0.5.
PREDICTED, OLD, RETURNS = _tensor([1.0, 1.0, 0.9]), _tensor([0.0, 0.9, 0.0]), _tensor([0.8, 2.0, 0.0])


def test_clipped_value_loss_by_hand():
    """Errors 0.2 against 0.3 (held), -1 in both, 0.9 against 0.5 (held): the larger square counts."""
    values = PREDICTED.clone().requires_grad_()
    result = clipped_value_loss(values, OLD, RETURNS, mask_N=_ones(3), cliprange=0.5)
    torch.testing.assert_close(result.per_token_N, _tensor([0.045, 0.5, 0.405]))
    (gradient,) = torch.autograd.grad(result.per_token_N.sum(), values)
    torch.testing.assert_close(gradient, _tensor([0.0, -1.0, 0.9]))
    assert result.metrics == {"value/clip_ratio": 1}
    assert result.metric_count == 3


def test_value_loss_without_a_clip_range_it_is_half_the_squared_error():
    values = PREDICTED.clone().requires_grad_()
    result = clipped_value_loss(values, OLD, RETURNS, mask_N=_ones(3))
    torch.testing.assert_close(result.per_token_N, _tensor([0.02, 0.5, 0.405]))
    (gradient,) = torch.autograd.grad(result.per_token_N.sum(), values)
    torch.testing.assert_close(gradient, PREDICTED - RETURNS)
    assert result.metrics == {"value/clip_ratio": 0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cliprange", [0.2, 1.0])
def test_value_loss_against_a_loop(dtype, cliprange):
    generator = torch.Generator().manual_seed(1)
    values, old, returns = torch.randn(3, 40, generator=generator, dtype=dtype)
    mask = torch.rand(40, generator=generator) < 0.8
    values.requires_grad_()
    losses, clipped = torch.zeros(40, dtype=dtype), 0
    for i in mask.nonzero().flatten().tolist():
        held = min(max(values[i].item(), old[i].item() - cliprange), old[i].item() + cliprange)
        plain, other = (values[i].item() - returns[i].item()) ** 2, (held - returns[i].item()) ** 2
        losses[i] = max(plain, other) / 2
        clipped += other > plain
    result = clipped_value_loss(values, old, returns, mask_N=mask, cliprange=cliprange)
    torch.testing.assert_close(result.per_token_N, losses)
    assert result.metrics["value/clip_ratio"] == clipped > 0
    assert result.metric_count == mask.sum()


@pytest.mark.parametrize("cliprange", [None, 0.5])
def test_masked_values_do_not_reach_loss_or_gradient(cliprange):
    values = _tensor([1.0, math.nan, math.inf]).requires_grad_()
    junk = _tensor([0.5, math.nan, -math.inf])
    result = clipped_value_loss(values, junk, junk, mask_N=torch.tensor([True, False, False]), cliprange=cliprange)
    result.per_token_N.sum().backward()
    assert result.per_token_N[1:].tolist() == [0, 0]
    assert values.grad.tolist() == [0.5, 0.0, 0.0]


def test_explained_variance_by_hand():
    """Returns 1 and 3 have the variance 1; errors 0 and 1 have 1/4."""
    returns = _tensor([1.0, 3.0, math.nan])
    mask = torch.tensor([True, True, False])

    def explained(values):
        return explained_variance(_tensor(values), returns, mask_N=mask).item()

    assert explained([1.0, 2.0, math.nan]) == pytest.approx(0.75)
    assert explained([1.0, 3.0, 0.0]) == 1.0
    assert explained([11.0, 13.0, 0.0]) == 1.0  # a constant error is no variance
    assert explained([5.0, 5.0, 0.0]) == 0.0
    assert explained([3.0, 1.0, 0.0]) == -3.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_explained_variance_is_nan_where_returns_do_not_vary(dtype):
    returns = torch.full((1000,), 0.7, dtype=dtype)
    values = torch.linspace(0, 1, 1000, dtype=dtype)
    assert explained_variance(values, returns, mask_N=_ones(1000)).isnan()
    assert explained_variance(values, returns, mask_N=torch.zeros(1000, dtype=torch.bool)).isnan()
    assert explained_variance(values, torch.zeros(1000, dtype=dtype), mask_N=_ones(1000)).isnan()
    returns[0] = 0.701
    assert explained_variance(values, returns, mask_N=_ones(1000)).isfinite()


def test_explained_variance_far_from_zero():
    """Returns around 1e8 with a spread of 1: squares before centring would have nothing left of it."""
    assert explained_variance(1e8 + _tensor([1.0, 2.0]), 1e8 + _tensor([1.0, 3.0]), mask_N=_ones(2)) == 0.75


@pytest.mark.parametrize("reward", [0.0, 0.7, 1.0])
def test_explained_variance_of_returns_that_differ_by_rounding_alone(reward):
    values = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 0.03
    returns = (reward - values) + values  # as advantages plus values give them
    assert explained_variance(values, returns, mask_N=_ones(500)).isnan()


def test_small_returns_are_not_mistaken_for_rounding():
    returns = torch.tensor([1.0, 1.001, 1.002, 1.003])
    assert float(explained_variance(returns - 0.5, returns, mask_N=_ones(4))) == pytest.approx(1)


def random_logits(seed, tokens, experts, layers=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    made = [2 * torch.randn(tokens, experts, generator=generator, dtype=torch.float64) for _ in range(layers)]
    return tuple(logits.to(dtype).requires_grad_() for logits in made)


def loop(router_logits, top_k, copies):
    """The definition, a copy of a token at a time."""
    experts = router_logits[0].shape[1]
    fraction, probability, count = torch.zeros(experts, dtype=torch.float64), 0, 0
    for logits in router_logits:
        for row, times in zip(logits, copies, strict=True):
            for _ in range(times):
                for chosen in row.argsort(descending=True)[:top_k].tolist():
                    fraction[chosen] += 1
                probability = probability + row.exp() / row.exp().sum()
                count += 1
    return experts * (fraction / count * probability / count).sum()


def test_router_loss_by_hand():
    # Token 1 chooses expert 0 with probability 3/4, token 2 expert 1 with 3/5.
    logits = torch.tensor([[0.75, 0.25], [0.4, 0.6]], dtype=torch.float64).log()
    # f = (1/2, 1/2), P = (0.575, 0.425)
    torch.testing.assert_close(load_balancing_loss([logits], 1), torch.tensor(1.0, dtype=torch.float64))
    # Token 1 held by three sequences: f = (3/4, 1/4), P = (2.65/4, 1.35/4)
    expected = 2 * (0.75 * 2.65 / 4 + 0.25 * 1.35 / 4)
    actual = load_balancing_loss([logits], 1, torch.tensor([3, 1]))
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_router_loss_is_top_k_if_all_experts_are_used_equally(top_k):
    experts = 5
    # The five rotations of one row: each expert is chosen equally often, with the same mean probability.
    row = torch.arange(experts, dtype=torch.float64)
    logits = torch.stack([row.roll(shift) for shift in range(experts)])
    torch.testing.assert_close(load_balancing_loss([logits], top_k), torch.tensor(float(top_k), dtype=torch.float64))


@pytest.mark.parametrize(("top_k", "layers"), [(1, 1), (2, 3), (4, 2)])
def test_router_loss_a_weight_counts_copies(top_k, layers):
    logits = random_logits(0, 9, 6, layers)
    copies = [4, 4, 4, 1, 1, 0, 2, 1, 3]
    actual = load_balancing_loss(logits, top_k, torch.tensor(copies))
    close_with_gradients(actual, loop(logits, top_k, copies), logits, 1e-8)


def close_with_gradients(actual, expected, logits, tolerance):
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=tolerance, atol=0)
    for own, other in zip(torch.autograd.grad(actual, logits), torch.autograd.grad(expected, logits), strict=True):
        torch.testing.assert_close(own, other, rtol=10 * tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("module", ["mixtral", "qwen3_moe", "gpt_oss", "olmoe"])
def test_router_loss_agrees_with_transformers(module):
    theirs = pytest.importorskip(f"transformers.models.{module}.modeling_{module}").load_balancing_loss_func
    logits = random_logits(1, 12, 6)
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1], [1, 1, 1, 1]])
    for weights, arguments in ((None, {}), (mask.flatten(), {"attention_mask": mask})):
        # They count and add up in float32 whatever the logits are.
        close_with_gradients(load_balancing_loss(logits, 2, weights), theirs(logits, 6, 2, **arguments), logits, 1e-6)


def test_multiplicities_of_a_packed_row_are_transformers_loss_of_the_repeated_rows():
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    layout = SharedPrefixLayout.from_groups([(4, [2, 0, 3]), (3, [5]), (2, [1, 1])])
    logits = random_logits(2, layout.num_tokens, 5)
    index = torch.cat([layout.path(leaf) for leaf in layout.leaves])
    actual = load_balancing_loss(logits, 2, layout.multiplicity)
    close_with_gradients(actual, load_balancing_loss_func(tuple(layer[index] for layer in logits), 5, 2), logits, 1e-6)
    assert (load_balancing_loss(logits, 2) - actual).abs() > 1e-3


def test_router_loss_values_at_padding_do_not_matter():
    (logits,) = random_logits(3, 6, 4, 1)
    weights = torch.tensor([1, 1, 0, 2, 0, 1])
    changed = logits.detach().clone()
    changed[2], changed[4] = 0, 50
    found = load_balancing_loss([changed], 2, weights)
    torch.testing.assert_close(found, load_balancing_loss([logits.detach()], 2, weights))


def test_router_loss_half_precision_is_summed_in_float32():
    exact = random_logits(4, 4000, 8, dtype=torch.bfloat16)
    loss = load_balancing_loss(exact, 2)
    assert loss.dtype == torch.float32
    expected = load_balancing_loss([logits.detach().double() for logits in exact], 2)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)


def test_router_loss_no_tokens_give_zero():
    (logits,) = random_logits(5, 3, 4, 1)
    loss = load_balancing_loss([logits], 2, torch.zeros(3))
    assert loss == 0
    (gradient,) = torch.autograd.grad(loss, [logits])
    assert (gradient == 0).all()


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_by_hand(mode):
    options = {"num_rollouts": 4, "norm": _norm(mode)}
    local = 3 if mode == "token-mean" else 2
    torch.testing.assert_close(aggregate(VALUES, MASK, INDEX, mode, **options), torch.tensor(EXPECTED[mode]))
    assert loss_denominator(MASK, INDEX, 4, mode) == local
    value = aggregate(VALUES, MASK, INDEX, mode, **options, denominator=6)
    torch.testing.assert_close(value, torch.tensor(EXPECTED[mode] * local / 6))
    # A dummy without trained tokens changes nothing.
    values = torch.cat([VALUES, torch.tensor([math.nan, math.inf])]).requires_grad_()
    mask, index = torch.cat([MASK, torch.tensor([False, False])]), torch.cat([INDEX, torch.tensor([4, 4])])
    value = aggregate(values, mask, index, mode, num_rollouts=5, norm=_norm(mode))
    torch.testing.assert_close(value, torch.tensor(EXPECTED[mode]))
    (gradient,) = torch.autograd.grad(value, values)
    assert gradient.isfinite().all()
    assert gradient[~mask].tolist() == [0.0] * 4


def test_presets_name_what_exists():
    for preset in LOSS_PRESETS.values():
        assert preset.scale in REWARD_SCALES
        assert preset.loss in POLICY_LOSSES
        assert preset.aggregation in LOSS_AGG_MODES
    assert LOSS_PRESETS["dr_grpo"] == ("none", "ppo", "seq-mean-token-sum-norm")


def test_explained_variance_over_ranks_equals_one_rank():
    values, returns = 3 + torch.randn(2, 50, generator=torch.Generator().manual_seed(2))
    parts = [(values[rows], returns[rows]) for rows in (slice(0, 20), slice(20, 50), slice(50, 50))]

    def explain(part, reduce):
        return explained_variance(*part, mask_N=_ones(len(part[0])), reduce=reduce)

    for result in on_ranks(explain, parts):
        torch.testing.assert_close(result, explain((values, returns), None), atol=1e-12, rtol=1e-12)


ZEROS = torch.zeros(3)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: aggregate(VALUES, MASK, INDEX, "mean", num_rollouts=4), "loss_agg_mode"),
        (lambda: loss_denominator(MASK, INDEX, 4, "mean"), "loss_agg_mode"),
        (lambda: aggregate(VALUES, MASK, INDEX, "seq-mean-token-sum-norm", num_rollouts=4, norm=None), "norm"),
        (lambda: aggregate(VALUES, MASK, INDEX, "seq-mean-token-sum-norm", num_rollouts=4, norm=0), "norm"),
        (lambda: aggregate(VALUES, MASK, INDEX, "token-mean", num_rollouts=4, norm=8), "norm"),
        (lambda: aggregate(VALUES, MASK, INDEX[:4], "token-mean", num_rollouts=4), "rollout_index_N"),
        (lambda: aggregate(VALUES, MASK.long(), INDEX, "token-mean", num_rollouts=4), "mask_N"),
        (lambda: clipped_value_loss(ZEROS, ZEROS, ZEROS, mask_N=_ones(3), cliprange=0), "cliprange"),
        (lambda: clipped_value_loss(ZEROS, ZEROS, ZEROS[:2], mask_N=_ones(3)), "returns_N"),
        (lambda: explained_variance(ZEROS, ZEROS, mask_N=torch.ones(3)), "mask_N"),
    ],
)
def test_errors_name_the_argument(call, argument):
    with pytest.raises(ValueError, match=argument):
        call()
