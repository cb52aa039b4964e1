"""MathVerify gives the rewards of TRL's `accuracy_reward`, which runs unchanged in reward workers.

`trl_accuracy_reward.json` has what TRL gave, with its version; where TRL is installed, it runs again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pl_grouprl.rewards import MathVerify, RewardWorkers, apply_rewards, prepare_rewards
from pl_grouprl.types import Rollout, RolloutGroup

pytest.importorskip("math_verify")
CASES = json.loads(Path(__file__).with_name("trl_accuracy_reward.json").read_text(encoding="utf-8"))["cases"]


def rewards_in_a_worker(reward: Any) -> list[float | None]:
    groups = [
        RolloutGroup(
            [1],
            [Rollout([7], text=case["completion"])],
            prompt=[{"role": "user", "content": "?"}],
            columns={"solution": case["solution"]},
        )
        for case in CASES
    ]
    workers = RewardWorkers(prepare_rewards(reward), 1, timeout=60.0)
    try:
        apply_rewards(groups, reward, workers=workers)
    finally:
        workers.close()
    return [group.rollouts[0].reward for group in groups]


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_rewards_are_those_recorded_from_trl() -> None:
    recorded = [case["reward"] for case in CASES]
    assert set(recorded) == {0.0, 1.0, None}
    assert rewards_in_a_worker(MathVerify(reference="solution", column="solution")) == recorded


def test_the_installed_trl_runs_unchanged_in_a_worker() -> None:
    pytest.importorskip("trl")
    from trl.rewards import accuracy_reward

    assert rewards_in_a_worker(accuracy_reward) == [case["reward"] for case in CASES]
