"""Options that cannot work are refused in the constructor, by name, value and remedy."""

from __future__ import annotations

import pytest

from pl_grouprl.algorithms import OptimizerConfig
from pl_grouprl.types import SamplingConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_generations": 1}, "num_generations is 1; grpo compares"),
        ({"num_generations": 1, "advantage_estimator": "rloo"}, "num_generations is 1; rloo compares"),
        ({"num_generations": 0}, "num_generations is 0; it must be at least 1"),
        ({"num_iterations": 0}, "num_iterations is 0"),
        ({"num_mini_batches": 0}, "num_mini_batches is 0"),
        ({"beta": -0.1}, "beta is -0.1; it must be 0"),
        ({"entropy_coef": -1.0}, "entropy_coef is -1.0"),
        ({"loss_type": "dpo"}, "loss_type is 'dpo'; it must be one of grpo, dr_grpo"),
        ({"policy_loss": "dpo"}, "policy_loss is 'dpo'"),
        ({"loss_agg_mode": "mean"}, "loss_agg_mode is 'mean'; it must be one of token-mean"),
        ({"scale_rewards": "group", "advantage_estimator": "rloo"}, "does not use scale"),
        ({"advantage_estimator": "gae"}, "advantage_estimator is 'gae'"),
        ({"kl": {"type": "k9"}}, "kl.type is 'k9'"),
        ({"loss_type": "gspo", "policy_loss": {"delta": 3.0}}, "policy_loss='gspo' does not use delta"),
        ({"policy_loss": {"epsilon_max": 5.0}}, "policy_loss='ppo' does not use epsilon_max"),
        ({"sharing": {"mode": "both"}}, "sharing.mode is 'both'"),
        ({"guards": {"max_nonfinite_steps": 0}}, "guards.max_nonfinite_steps is 0"),
        ({"sampling": SamplingConfig(temperature=0)}, "sampling.temperature is 0"),
        ({"rewards": []}, "rewards"),
    ],
)
def test_refused(make_module, options, message):
    with pytest.raises(ValueError, match=message):
        make_module(**options)


def test_presets_and_single_options(make_module):
    module = make_module(loss_type="dr_grpo")
    assert module.advantage_estimator.options["scale"] == "none"
    assert module.objective.loss_agg_mode == "seq-mean-token-sum-norm"
    module = make_module(loss_type="dr_grpo", loss_agg_mode="token-mean", scale_rewards="batch", policy_loss="cispo")
    assert module.advantage_estimator.options["scale"] == "batch"
    assert module.objective.loss_agg_mode == "token-mean"
    assert module.objective.policy_loss.name == "cispo"
    assert make_module(num_iterations=3, num_mini_batches=2).updates_per_rollout == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": -1.0}, "OptimizerConfig.learning_rate is -1.0"),
        ({"warmup_steps": -1}, "OptimizerConfig.warmup_steps is -1"),
        ({"schedule": "sqrt"}, "OptimizerConfig.schedule is 'sqrt'"),
        ({"final_fraction": 2.0}, "OptimizerConfig.final_fraction is 2.0"),
        ({"final_fraction": 0.1}, "final_fraction is 0.1 with schedule 'constant', which never falls"),
    ],
)
def test_refused_by_the_optimizer(options, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**options)
