"""Replayed experts train the same policy on one device and on two, sharded or not, in whole groups or in slices."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from run_ranks import largest_difference, run

CASE = {"router_replay": True, "policy": {"num_experts": 4, "initializer_range": 0.2}, "module": {"num_iterations": 2}}
SLICES = {
    **CASE,
    "policy": {**CASE["policy"], "gradient_checkpointing": True},
    "module": {**CASE["module"], "max_tokens_per_micro_batch": 24},
}

ULYSSES = {**CASE, "module": {**CASE["module"], "sharing": {"sequence_parallel_size": 2}}}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run(tmp_path_factory.mktemp("alone") / "run", "auto", **CASE)


@pytest.mark.parametrize(
    ("strategy", "case"),
    [
        ("ddp", CASE),
        ("fsdp2", SLICES),
        pytest.param("fsdp1", CASE, marks=pytest.mark.slow),
        pytest.param("fsdp2", ULYSSES, marks=pytest.mark.slow),
    ],
    ids=["ddp", "fsdp2, slices, checkpointing", "fsdp1", "sequence parallel"],
)
def test_two_ranks_train_as_one(tmp_path, alone, strategy, case):
    both = run(tmp_path / strategy, strategy, **case)
    assert largest_difference(both, alone) < 1e-5
    # Nearly no token has the forced experts by itself.
    assert both.steps[0]["sampling/routing_differs"] == pytest.approx(
        alone.steps[0]["sampling/routing_differs"], abs=0.1
    )


def test_without_replay_the_policy_is_another_one(tmp_path, alone):
    case = {**CASE, "router_replay": False}
    assert largest_difference(run(tmp_path / "plain", "auto", **case), alone) > 1e-3
