"""Advantages per token group against literal sums, token-level GAE and GRPO."""

import pytest
import torch

from pl_grouprl.functional.advantages import group_relative_advantages
from pl_grouprl.functional.advantages.temporal import generalized_advantages, td_errors
from pl_grouprl.functional.losses import clipped_value_loss
from pl_grouprl.functional.token_groups import TokenGroups, find_token_groups, token_group_advantages

GAMMA, LAM = 0.93, 0.85
ONES = torch.ones(2, 4)
ALL = find_token_groups(ONES, ONES, ONES.bool())


def random_case(seed=0, rows=7, length=19, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, rows, length, generator=generator, dtype=torch.float64).to(dtype).unbind(0)
    norms = torch.rand(rows, length, generator=generator, dtype=torch.float64).to(dtype)
    mask = torch.rand(rows, length, generator=generator) < 0.8
    mask[0] = False
    mask[1] = True
    bootstrap = torch.randn(rows, generator=generator, dtype=torch.float64).to(dtype) * (torch.arange(rows) % 2)
    return rewards, values, mask, bootstrap, norms


def cut(rewards, values, mask, bootstrap, norms, **options):
    errors = td_errors(rewards, values, mask, gamma=GAMMA, bootstrap_value=bootstrap)
    return find_token_groups(errors, norms, mask, **{"threshold": 2.5, **options})


def sums_over_groups(rewards, values, groups, mask, bootstrap, lam):
    """A_g from its definition, group by group from the last one on: per row a list of (tokens, A_g, V_b)."""
    result = []
    for b in range(len(mask)):
        tokens = [t for t in range(mask.shape[1]) if mask[b, t]]
        runs = [[t for t in tokens if groups.group_index[b, t] == g] for g in range(int(groups.starts[b].sum()))]
        later, after, row = 0.0, bootstrap[b].item(), []
        for run in reversed(runs):
            n, baseline = len(run), values[b, run[0]].item()
            gained = sum(GAMMA**j * rewards[b, t].item() for j, t in enumerate(run))
            later = gained + GAMMA**n * after - baseline + GAMMA**n * lam * later
            after = baseline
            row.append((run, later, baseline))
        result.append(row)
    return result


@pytest.mark.parametrize("seed", range(4))
def test_semi_mdp_advantage_is_the_sum_over_groups(seed):
    rewards, values, mask, bootstrap, norms = random_case(seed)
    groups = cut(rewards, values, mask, bootstrap, norms)
    options = {"gamma": GAMMA, "lam": LAM, "critic_lam": 0.97, "bootstrap_value": bootstrap}
    broadcast, returns = token_group_advantages(rewards, values, groups, mask, **options)
    endpoint, _ = token_group_advantages(rewards, values, groups, mask, mode="endpoint", **options)
    variable, same_returns = token_group_advantages(rewards, values, groups, mask, mode="variable_lambda", **options)
    assert torch.equal(returns, same_returns)
    expected, at_ends, targets = torch.zeros(3, *mask.shape, dtype=torch.float64).unbind(0)
    for b, row in enumerate(sums_over_groups(rewards, values, groups, mask, bootstrap, LAM)):
        for run, advantage, _ in row:
            expected[b, run], at_ends[b, run[-1]] = advantage, advantage
    for b, row in enumerate(sums_over_groups(rewards, values, groups, mask, bootstrap, 0.97)):
        for run, advantage, baseline in row:
            targets[b, run[0]] = advantage + baseline
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(broadcast, expected, **close)
    torch.testing.assert_close(endpoint, at_ends, **close)
    torch.testing.assert_close(variable[groups.starts], expected[groups.starts], **close)
    torch.testing.assert_close(returns[groups.starts], targets[groups.starts], **close)
    for result in (broadcast, endpoint, variable, returns):
        assert (result[~mask] == 0).all()


def test_variable_lambda_is_token_gae_with_lambda_1_inside_groups():
    rewards, values, mask, bootstrap, norms = random_case(5)
    groups = cut(rewards, values, mask, bootstrap, norms)
    options = {"gamma": GAMMA, "lam": LAM, "bootstrap_value": bootstrap, "mode": "variable_lambda"}
    actual, returns = token_group_advantages(rewards, values, groups, mask, **options)
    errors = td_errors(rewards, values, mask, gamma=GAMMA, bootstrap_value=bootstrap)
    expected = torch.zeros_like(errors)
    for b in range(len(mask)):
        later = 0.0
        for t in reversed(range(mask.shape[1])):
            if mask[b, t]:
                later = errors[b, t] + GAMMA * (LAM if groups.ends[b, t] else 1.0) * later
                expected[b, t] = later
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(returns, (expected + values) * mask, rtol=1e-12, atol=1e-12)
    broadcast, _ = token_group_advantages(rewards, values, groups, mask, **{**options, "mode": "broadcast"})
    assert torch.equal(actual[groups.starts], broadcast[groups.starts])


@pytest.mark.parametrize("mode", ["broadcast", "endpoint", "variable_lambda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_groups_of_one_token_are_token_gae(mode, dtype):
    rewards, values, mask, bootstrap, norms = random_case(6, dtype=dtype)
    groups = cut(rewards, values, mask, bootstrap, norms, max_size=1)
    assert torch.equal(groups.starts, mask)
    assert torch.equal(groups.ends, mask)
    options = {"gamma": GAMMA, "lam": LAM, "critic_lam": 0.99, "bootstrap_value": bootstrap}
    actual = token_group_advantages(rewards, values, groups, mask, mode=mode, **options)
    expected = generalized_advantages(rewards, values, mask, **options)
    for left, right in zip(actual, expected, strict=True):
        assert left.dtype == dtype
        torch.testing.assert_close(left, right)


def test_one_group_with_the_prompts_mean_as_value_is_unnormalized_grpo():
    # Two prompts, interleaved; the reward is at the last token, and V_0 is the mean reward of the prompt.
    lengths, prompts = torch.tensor([3, 5, 1, 4, 2]), torch.tensor([0, 1, 0, 1, 0])
    outcomes = torch.tensor([1.0, 0.0, 0.25, 2.0, 0.5], dtype=torch.float64)
    mask = torch.arange(5) < lengths[:, None]
    rewards = torch.zeros(5, 5, dtype=torch.float64).scatter_(1, lengths[:, None] - 1, outcomes[:, None])
    values = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for prompt in (0, 1):
        values[prompts == prompt, 0] = outcomes[prompts == prompt].mean()
    groups = find_token_groups(torch.zeros(5, 5), torch.ones(5, 5), mask, max_size=99)
    assert groups.starts.sum() == 5
    advantages, _ = token_group_advantages(rewards, values, groups, mask, gamma=1.0, lam=0.3)
    expected = group_relative_advantages(outcomes, prompts, scale="none")[:, None] * mask
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-12)


def test_gaps_and_their_contents_change_nothing():
    rewards, values, _, bootstrap, norms = random_case(2, length=10)
    mask = torch.ones(7, 10, dtype=torch.bool)
    places = [0, 2, 3, 7, 8, 9, 12, 13, 15, 16]
    wide = [torch.full((7, 18), torch.nan, dtype=torch.float64).index_copy(1, torch.tensor(places), x)
            for x in (rewards, values, norms)]  # fmt: skip
    wide_mask = torch.zeros(7, 18, dtype=torch.bool)
    wide_mask[:, places] = True
    options = {"gamma": GAMMA, "lam": LAM, "bootstrap_value": bootstrap}
    expected = token_group_advantages(rewards, values, cut(rewards, values, mask, bootstrap, norms), mask, **options)
    groups = cut(wide[0], wide[1], wide_mask, bootstrap, wide[2])
    found = token_group_advantages(wide[0], wide[1], groups, wide_mask, **options)
    assert all(torch.equal(left[:, places], right) for left, right in zip(found, expected, strict=True))


def test_rollouts_cut_off_are_bootstrapped_by_their_value():
    mask = torch.ones(2, 2, dtype=torch.bool)
    groups = TokenGroups(*(torch.tensor([[a, b]] * 2) for a, b in ((True, False), (False, True), (0, 0))))
    rewards, values = torch.tensor([[1.0, 2.0]] * 2), torch.tensor([[0.5, 9.0]] * 2)
    advantages, returns = token_group_advantages(
        rewards, values, groups, mask, gamma=0.5, lam=1.0, bootstrap_value=torch.tensor([0.0, 8.0])
    )
    # 1 + 0.5 * 2 - 0.5 = 1.5, and 0.25 * 8 more; the return of the second token: 2, and 0.5 * 8 more.
    assert advantages.tolist() == [[1.5, 1.5], [3.5, 3.5]]
    assert returns.tolist() == [[2.0, 2.0], [4.0, 6.0]]


def test_one_lambda_per_rollout():
    rewards, values, mask, bootstrap, norms = random_case(3)
    groups = cut(rewards, values, mask, bootstrap, norms)
    lams = torch.linspace(0, 1, len(mask), dtype=torch.float64)
    together = token_group_advantages(rewards, values, groups, mask, gamma=GAMMA, lam=lams, critic_lam=1 - lams)
    for b, lam in enumerate(lams.tolist()):
        alone = token_group_advantages(rewards, values, groups, mask, gamma=GAMMA, lam=lam, critic_lam=1 - lam)
        for left, right in zip(together, alone, strict=True):
            torch.testing.assert_close(left[b], right[b])


def test_value_loss_at_starts_has_no_gradient_elsewhere():
    rewards, values, mask, bootstrap, norms = random_case(8)
    groups = cut(rewards, values, mask, bootstrap, norms)
    _, returns = token_group_advantages(rewards, values, groups, mask, gamma=GAMMA, lam=LAM, bootstrap_value=bootstrap)
    trained = (values + 0.1).requires_grad_()
    loss = clipped_value_loss(
        trained[mask], values[mask], returns[mask], mask_N=groups.starts[mask], cliprange=None
    ).per_token_N.sum()
    (gradient,) = torch.autograd.grad(loss, trained)
    assert (gradient[~groups.starts] == 0).all()
    torch.testing.assert_close(gradient[groups.starts], (trained - returns)[groups.starts].detach())
    assert (gradient[groups.starts] != 0).all()
    assert groups.starts.sum() < mask.sum()


def test_bfloat16_is_computed_in_float32_and_no_rows_are_fine():
    rewards, values, mask, bootstrap, norms = random_case(1)
    groups = cut(rewards, values, mask, bootstrap, norms)
    results = token_group_advantages(rewards.bfloat16(), values.bfloat16(), groups, mask, gamma=1.0, lam=1.0)
    assert {result.dtype for result in results} == {torch.float32}
    empty = torch.zeros(0, 4)
    groups = find_token_groups(empty, empty, empty.bool())
    assert token_group_advantages(empty, empty, groups, empty.bool(), gamma=1.0, lam=1.0)[0].shape == (0, 4)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"mode": "mean"}, "mode"),
        ({"lam": 1.5}, "lam"),
        ({"lam": torch.tensor([0.5, 1.5])}, "lam"),
        ({"critic_lam": torch.ones(3)}, "critic_lam"),
        ({"gamma": -0.1}, "gamma"),
        ({"values": torch.ones(2, 3)}, "values"),
        ({"mask": torch.tensor([[True] * 4, [True] * 3 + [False]])}, "groups"),
        ({"groups": TokenGroups(*(x[:1] for x in ALL))}, "groups"),
    ],
)
def test_errors_name_the_argument(change, argument):
    arguments = {"rewards": ONES, "values": ONES, "groups": ALL, "mask": ONES.bool(), "gamma": 1.0, "lam": 1.0}
    with pytest.raises(ValueError, match=argument):
        token_group_advantages(**{**arguments, **change})


@pytest.mark.parametrize("ends_turns", [False, True])
def test_advantages_around_a_result_by_hand(ends_turns):
    """Tokens 0-2 call a tool, 3 and 4 are its result, 5 and 6 answer; pairs of tokens are groups.

    Groups 0 1 | 2 5 | 6:  A = 10 - 5 = 5,  (2 + 5 - 3) + 5/2 = 6.5,  (3 - 1) + 6.5/2 = 5.25.
    Groups 0 1 | 2 | 5 6:  A = 10 - 4 = 6,  (2 + 4 - 3) + 6/2 = 6,    (3 - 1) + 6/2 = 5.
    """
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1]]).bool()
    rewards = torch.tensor([[0, 0, 2, 99.0, 99, 0, 10]])
    values = torch.tensor([[1, 2, 3, torch.nan, torch.nan, 4, 5]])
    ends = torch.tensor([[0, 0, 1, 0, 0, 0, 1]]).bool() if ends_turns else None
    groups = find_token_groups(torch.ones(1, 7), torch.ones(1, 7), mask, threshold=2.0, forced_ends=ends)
    advantages, returns = token_group_advantages(rewards, values, groups, mask, gamma=1.0, lam=0.5)
    assert advantages.tolist() == [[5, 5, 6, 0, 0, 6, 6] if ends_turns else [5.25, 5.25, 6.5, 0, 0, 6.5, 5]]
    starts = [0, 2, 5] if ends_turns else [0, 2, 6]
    assert returns[0, starts].tolist() == ([6, 9, 10] if ends_turns else [6.25, 9.5, 10])
    at_ends, _ = token_group_advantages(rewards, values, groups, mask, gamma=1.0, lam=0.5, mode="endpoint")
    assert at_ends.tolist() == [[0, 5, 6, 0, 0, 0, 6] if ends_turns else [0, 5.25, 0, 0, 0, 6.5, 5]]
