from __future__ import annotations

import math

import pytest
from torch import nn

from pl_grouprl.training.optimizer import OptimizerConfig, build_optimizer


def test_schedules_by_hand():
    linear = OptimizerConfig(warmup_steps=1, schedule="linear", final_fraction=0.2)
    # Half the rate in the one step of warm-up, then from 1 to 0.2 over the 4 steps that are left.
    factors = [linear.learning_rate_factor(step, 5) for step in range(7)]
    assert factors == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = OptimizerConfig(schedule="cosine")
    assert [cosine.learning_rate_factor(step, 4) for step in (0, 2, 4)] == pytest.approx([1.0, 0.5, 0.0])
    assert OptimizerConfig().learning_rate_factor(10**6, math.inf) == 1.0


def test_groups_have_names_rates_and_decay():
    policy, critic = nn.Linear(2, 2), nn.Linear(2, 1, bias=False)
    made = build_optimizer(
        {"policy": (policy, OptimizerConfig(1e-3, weight_decay=0.1)), "critic": (critic, OptimizerConfig(1e-2))},
        lambda: pytest.fail("no schedule needs the length of the run"),
    )
    groups = {g["name"]: (g["params"], g["initial_lr"], g["weight_decay"]) for g in made["optimizer"].param_groups}
    assert groups == {
        "policy": ([policy.weight], 1e-3, 0.1),
        "policy_no_decay": ([policy.bias], 1e-3, 0.0),
        "critic": ([critic.weight], 1e-2, 0.0),
    }
    assert made["lr_scheduler"]["interval"] == "step"


def test_each_part_has_its_schedule():
    parts = {
        "policy": (nn.Linear(1, 1), OptimizerConfig(1.0, schedule="linear")),
        "critic": (nn.Linear(1, 1), OptimizerConfig(1.0)),
    }
    made = build_optimizer(parts, lambda: 4)
    made["optimizer"].step()
    made["lr_scheduler"]["scheduler"].step()
    assert [group["lr"] for group in made["optimizer"].param_groups] == [0.75, 1.0]


def test_a_schedule_needs_an_end():
    with pytest.raises(ValueError, match="the run has no end; set max_steps or max_epochs"):
        build_optimizer({"policy": (nn.Linear(1, 1), OptimizerConfig(schedule="cosine"))}, lambda: math.inf)


@pytest.mark.parametrize(
    "options", [{"betas": (0.9, 1.0)}, {"eps": -1e-8}, {"learning_rate": float("inf")}, {"max_grad_norm": 0.0}]
)
def test_options_out_of_range(options):
    (name,) = options
    with pytest.raises(ValueError, match=rf"OptimizerConfig\.{name} is .*; it must be "):
        OptimizerConfig(**options)
