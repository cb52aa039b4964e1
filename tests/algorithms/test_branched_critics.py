"""PPO and GROUP PPO on rollouts that branch: a value and an error for each shared token, and weights of leaves."""

import pytest
import torch
from helpers.branching_engine import BranchingEngine

from pl_grouprl.algorithms import PPO, GroupPPO
from pl_grouprl.functional.advantages import BranchPaths, leaf_weights
from pl_grouprl.functional.masked import to_rows
from pl_grouprl.models import PolicyCopyCritic
from pl_grouprl.training.rewarder import episode_leaf_weights
from pl_grouprl.types import Rollout, RolloutGroup


def reward(completions, **columns):
    return [float(len(set(text))) for text in completions]


@pytest.fixture
def buffer_of(make_module, make_data, make_trainer, scripted_engine):
    def run(cls, tells, **options):
        engine = BranchingEngine(scripted_engine, tells=tells)
        critic = PolicyCopyCritic(head_std=0.5)
        module = make_module(cls, rewards=reward, engine=engine, critic=critic, whiten_advantages=False, **options)
        make_trainer(max_steps=1).fit(module, make_data())
        return module.last_rollouts

    return run


@pytest.mark.parametrize("cls", [PPO, GroupPPO])
def test_advantages_are_weighted(buffer_of, cls):
    plain, branched = (buffer_of(cls, tells) for tells in (False, True))
    rollouts = [rollout for group in branched.groups for rollout in group.rollouts]
    branches = BranchPaths([r.branch_points for r in rollouts], [r.branch_path for r in rollouts])
    mask_BT = to_rows(branched.joined("loss_mask"), branched.rollout_lengths)
    weights_B = leaf_weights(torch.arange(len(rollouts)) // 4, mask_BT, branches).float()
    assert len(set(weights_B.tolist())) > 2  # some rollouts are empty
    weights_N = weights_B.repeat_interleave(plain.rollout_lengths)
    assert plain.joined("advantages").abs().max() > 0.1
    torch.testing.assert_close(branched.joined("advantages"), plain.joined("advantages") * weights_N)
    torch.testing.assert_close(branched.joined("returns"), plain.joined("returns"))


def test_shared_tokens(buffer_of):
    """Values are equal on all rows; with lambda 0 advantages differ by nothing but the end of the shared tokens."""
    buffer = buffer_of(PPO, True, gamma=1.0, lam=0.0)
    for number, group in enumerate(buffer.groups):
        lengths = [len(rollout.token_ids) for rollout in group.rollouts]
        for name in ("values", "advantages"):
            first, second, *_ = buffer.tokens[name][number].split(lengths)
            shared = 2 if min(lengths[:2]) > 2 else 1  # a continuation of no tokens ends with its reward
            torch.testing.assert_close(first[:shared], second[:shared], rtol=1e-4, atol=1e-5)


def test_paths_that_share_no_tokens_are_refused():
    rollouts = [Rollout([4, number, 5], branch_points=(2,), branch_path=(0, number)) for number in (0, 1)]
    with pytest.raises(
        ValueError, match=r"share the first numbers of branch_path, \(0,\), but not the tokens from 0 to 2"
    ):
        episode_leaf_weights(
            [RolloutGroup([1], rollouts)], torch.ones(2, 3, dtype=torch.bool), device=torch.device("cpu")
        )
