"""Estimators by name: what each takes and needs."""

import pytest
import torch

from pl_grouprl.functional.advantages import (
    ADVANTAGE_ESTIMATORS,
    gpg_advantages,
    grpo_passk_advantages,
    make_advantage_estimator,
    opo_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    rloo_advantages,
)

REWARDS, GROUP_IDS = torch.tensor([0.0, 1.0, 4.0, 2.0]), torch.tensor([0, 0, 0, 1])
LENGTHS, GREEDY = torch.tensor([1, 2, 3, 4]), torch.tensor([1.0, 1.0, 1.0, 0.0])
PER_TOKEN = {"reinforce_plus_plus", "reinforce_plus_plus_baseline", "tree", "vine"}
WITH_NORMS = {"optimal_token_baseline", "tir_optimal_token_baseline"}
PER_TOKEN |= WITH_NORMS


def test_names_and_kinds():
    kinds = {name: make_advantage_estimator(name) for name in ADVANTAGE_ESTIMATORS}
    assert set(kinds) == {"grpo", "rloo", "opo", "gpg", "grpo_passk", "remax"} | PER_TOKEN
    assert {name for name, estimator in kinds.items() if estimator.per_token} == PER_TOKEN
    assert {name for name, estimator in kinds.items() if estimator.takes_token_rewards} == {
        "reinforce_plus_plus",
        *WITH_NORMS,
    }
    assert {name for name, estimator in kinds.items() if estimator.needs_score_norms} == WITH_NORMS
    assert {name for name, estimator in kinds.items() if estimator.needs_greedy} == {"remax"}
    alone = {name for name, estimator in kinds.items() if not estimator.compares_rollouts}
    assert alone == {"remax", "reinforce_plus_plus"}


@pytest.mark.parametrize("name", sorted(set(ADVANTAGE_ESTIMATORS) - PER_TOKEN))
def test_rollout_level_estimators_take_the_same_arguments(name):
    estimator = make_advantage_estimator(name)
    expected = {
        "grpo": lambda: make_advantage_estimator("grpo")(REWARDS, GROUP_IDS),
        "rloo": lambda: rloo_advantages(REWARDS, GROUP_IDS),
        "gpg": lambda: gpg_advantages(REWARDS, GROUP_IDS),
        "opo": lambda: opo_advantages(REWARDS, GROUP_IDS, LENGTHS),
        "grpo_passk": lambda: grpo_passk_advantages(REWARDS, GROUP_IDS),
        "remax": lambda: remax_advantages(REWARDS, GREEDY),
    }[name]()
    assert torch.equal(estimator(REWARDS, GROUP_IDS, lengths=LENGTHS, greedy_rewards=GREEDY), expected)


def test_token_level_estimators_take_the_same_arguments():
    mask = torch.ones(4, 4, dtype=torch.bool)
    plain = make_advantage_estimator("reinforce_plus_plus", gamma=0.5)
    rewards = torch.diag(REWARDS)  # of tokens; the other one takes those of rollouts
    assert torch.equal(plain(rewards, GROUP_IDS, mask=mask), reinforce_plus_plus_advantages(rewards, mask, gamma=0.5))
    baseline = make_advantage_estimator("reinforce_plus_plus_baseline")
    expected = reinforce_plus_plus_baseline_advantages(REWARDS, GROUP_IDS, mask, reduce=lambda sums: 3 * sums)
    assert torch.equal(baseline(REWARDS, GROUP_IDS, mask=mask, reduce=lambda sums: 3 * sums), expected)


def test_options():
    passk = make_advantage_estimator("grpo_passk", scale="none")
    assert passk(REWARDS, GROUP_IDS).tolist() == [0.0, 0.0, 3.0, 0.0]
    with pytest.raises(ValueError, match="advantage_estimator='opo' does not use gamma; it takes no options"):
        make_advantage_estimator("opo", gamma=1.0)
    with pytest.raises(ValueError, match="'grpo_passk' does not use name, registry; it takes scale"):
        make_advantage_estimator("grpo_passk", **{"name": "x", "registry": 1})


def test_missing_data_is_an_error():
    for name, data in (("opo", "lengths"), ("remax", "greedy_rewards")):
        with pytest.raises(ValueError, match=f"{data} is None"):
            make_advantage_estimator(name)(REWARDS, GROUP_IDS)
