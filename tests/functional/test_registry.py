"""User-defined losses and estimators: registration, options, what a function gets."""

import copy
import pickle
from dataclasses import FrozenInstanceError

import pytest
import torch

from pl_grouprl.functional import policy_loss as loss_registry
from pl_grouprl.functional.advantages import BranchPaths, make_advantage_estimator, register_advantage_estimator
from pl_grouprl.functional.advantages import base as estimator_registry
from pl_grouprl.functional.policy_loss import PolicyLoss, make_policy_loss, register_policy_loss
from pl_grouprl.functional.registry import describe


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    """Whatever a test registers is forgotten after it."""
    monkeypatch.setattr(loss_registry, "POLICY_LOSSES", dict(loss_registry.POLICY_LOSSES))
    monkeypatch.setattr(estimator_registry, "ADVANTAGE_ESTIMATORS", dict(estimator_registry.ADVANTAGE_ESTIMATORS))


def scaled(policy_logprobs_N, old_logprobs_N, advantages_N, *, mask_N, scale: float = 1.0, signs: str = "both"):
    return PolicyLoss(-scale * advantages_N * policy_logprobs_N * mask_N, {}, mask_N.sum())


def centered(rewards, group_ids, *, shift: float = 0.0):
    return rewards - rewards.mean() + shift


def test_a_registered_loss_is_the_function_with_options():
    assert register_policy_loss("scaled", compares_tokens=True)(scaled) is scaled
    loss = make_policy_loss("scaled", scale=2)
    assert (loss.name, loss.function, loss.options) == ("scaled", scaled, {"scale": 2, "signs": "both"})
    assert loss.compares_tokens
    assert not loss.uses_rollouts
    assert describe(loss) == repr(loss) == "scaled(scale=2, signs='both')"
    x_N = torch.tensor([1.0, 2.0])
    result = loss(x_N, x_N, x_N, mask_N=x_N > 0, rollout_index_N=x_N.long(), num_rollouts=3)
    assert result.per_token_N.tolist() == [-2.0, -8.0]
    with pytest.raises(FrozenInstanceError):
        loss.name = "other"
    for other in (pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss)):
        assert other == loss


def test_a_loss_of_rollouts_gets_them():
    @register_policy_loss("rollouts")
    def of_rollouts(policy_logprobs_N, old_logprobs_N, advantages_N, *, mask_N, rollout_index_N, num_rollouts):
        return PolicyLoss(rollout_index_N + num_rollouts, {}, mask_N.sum())

    x_N = torch.zeros(2)
    loss = make_policy_loss("rollouts")
    assert loss.uses_rollouts
    data = {"mask_N": x_N == 0, "rollout_index_N": torch.tensor([0, 1]), "num_rollouts": 2}
    assert loss(x_N, x_N, x_N, **data).per_token_N.tolist() == [2, 3]
    with pytest.raises(ValueError, match="rollout_index_N"):
        loss(x_N, x_N, x_N, mask_N=x_N == 0)


@pytest.mark.parametrize("name", ["mask_N", "scael"])
def test_an_unknown_option_is_an_error(name):
    register_policy_loss("scaled")(scaled)
    with pytest.raises(ValueError, match=name):
        make_policy_loss("scaled", **{name: None})


def test_the_last_function_registered_under_a_name_counts():
    register_advantage_estimator("grpo")(centered)
    assert make_advantage_estimator("grpo", shift=1.0)(torch.tensor([1.0, 3.0]), [0, 0]).tolist() == [0.0, 2.0]


def test_an_estimator_gets_what_it_takes():
    @register_advantage_estimator("short")
    def short(rewards, lengths, *, weight: float = 1.0):
        return rewards - weight * lengths

    @register_advantage_estimator("tokens", per_token=True, takes_token_rewards=True)
    def tokens(rewards, mask, reduce):
        return rewards * mask if reduce is None else reduce(rewards * mask)

    estimator, rewards = make_advantage_estimator("short", weight=2.0), torch.tensor([5.0, 9.0])
    assert estimator(rewards, [0, 0], lengths=torch.tensor([1, 2])).tolist() == [3.0, 5.0]
    with pytest.raises(ValueError, match="lengths"):
        estimator(rewards, [0, 0])
    assert [estimator.compares_rollouts, estimator.needs_greedy, estimator.per_token] == [False] * 3
    rows, mask = torch.tensor([[1.0, 2.0]]), torch.tensor([[True, False]])
    assert make_advantage_estimator("tokens")(rows, [0], mask=mask).tolist() == [[1, 0]]
    assert make_advantage_estimator("tokens")(rows, [0], mask=mask, reduce=lambda sums: 2 * sums).tolist() == [[2, 0]]


def test_an_estimator_can_take_branches():
    @register_advantage_estimator("last_segment", per_token=True)
    def last_segment(rewards, mask, branches, *, share: float = 1.0):
        starts_B = torch.tensor([points[-1] if points else 0 for points in branches.points])
        return share * rewards[:, None] * (mask & (torch.arange(mask.shape[1]) >= starts_B[:, None]))

    branches = BranchPaths([(2,), (2,), (), ()], [(0, 0), (0, 1), (1,), (0,)])
    rewards, mask = torch.tensor([0.0, 1.0, 4.0, 2.0]), torch.ones(4, 3, dtype=torch.bool)
    found = make_advantage_estimator("last_segment", share=0.5)(rewards, [0, 0, 0, 1], mask=mask, branches=branches)
    assert found.tolist() == [[0, 0, 0], [0, 0, 0.5], [2, 2, 2], [1, 1, 1]]


def test_an_option_that_is_a_function_is_recorded_by_its_name():
    @register_advantage_estimator("shaped")
    def shaped(rewards, group_ids, *, shape=centered):
        return shape(rewards, group_ids)

    record = describe(make_advantage_estimator("shaped"))
    assert "centered" in record
    assert " at 0x" not in record


def test_a_loss_that_is_no_loss_per_token_is_refused():
    """A sum would broadcast over the weights of tokens."""

    @register_policy_loss("summed")
    def summed(policy_logprobs_N, old_logprobs_N, advantages_N, *, mask_N):
        return PolicyLoss(-(advantages_N * policy_logprobs_N).sum(), {}, mask_N.sum())

    tokens = torch.zeros(3)
    with pytest.raises(ValueError, match="per_token_N"):
        make_policy_loss("summed")(tokens, tokens, tokens, mask_N=torch.ones(3, dtype=torch.bool))


def test_a_word_is_no_switch():
    with pytest.raises(ValueError, match="leave_one_out"):
        make_advantage_estimator("tree", leave_one_out="false")
