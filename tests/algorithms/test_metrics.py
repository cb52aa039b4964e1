from __future__ import annotations

import math

import pytest

from pl_grouprl.training.evaluation import evaluation_metrics
from pl_grouprl.training.metrics import count_tokens, merge_reward_metrics, rollout_metrics, summarize
from pl_grouprl.types import Rollout, RolloutGroup


def group(rewards, texts=None, source="default", prompt=(1, 2, 3)):
    texts = texts or ["x"] * len(rewards)
    rollouts = [
        Rollout([4] * (i + 1), reward=reward, rewards={"f": reward}, text=text, finish_reason="length" if i else "stop")
        for i, (reward, text) in enumerate(zip(rewards, texts, strict=True))
    ]
    return RolloutGroup(list(prompt), rollouts, data_source=source)


def test_rollout_metrics_by_hand():
    records = summarize([group([1.0, 3.0]), group([2.0, 2.0]), group([5.0, None])])
    metrics = rollout_metrics(records)
    assert metrics["reward"] == pytest.approx(13 / 5)
    assert metrics["reward_std"] == pytest.approx(math.sqrt(2) / 3)  # sqrt(2), 0 and, of one reward alone, 0
    assert metrics["frac_reward_zero_std"] == pytest.approx(2 / 3)
    assert metrics["rewards/f/mean"] == pytest.approx(13 / 5)
    assert metrics["rewards/f/std"] == pytest.approx(math.sqrt((1.6**2 + 0.4**2 + 0.6**2 * 2 + 2.4**2) / 4))
    assert [metrics[f"completions/{name}_length"] for name in ("mean", "min", "max")] == [1.5, 1, 2]
    assert metrics["completions/clipped_ratio"] == 0.5
    assert count_tokens(records) == 3 * (2 * 3 + 1 + 2)


def test_ranks_are_joined():
    calls = [
        (6, {"rewards/f/extra": 1.0, "rewards/f/none": 2.0}),
        (2, {"rewards/f/extra": 2.0, "rewards/f/none": 3.0}),
        (8, {"rewards/g/invalid": 1.0}),
    ]
    # (6 * 1 + 2 * 2) / 8: the third call did not see the extra.
    assert merge_reward_metrics(calls) == {"rewards/f/extra": 1.25, "rewards/f/none": 5.0, "rewards/g/invalid": 1.0}
    assert merge_reward_metrics([]) == {}


def test_evaluation_by_hand():
    records = summarize(
        [
            group([1.0, 0.0, 1.0], ["a", "b", " a"], source="math"),
            group([0.0, 0.0, 1.0], ["b", "b ", "c"], source="math"),
            group([0.5, None, 0.5], source="code"),
        ]
    )
    metrics = evaluation_metrics(records, "val")
    assert metrics == pytest.approx(
        {
            "val/reward": (2 / 3 + 1 / 3 + 1 / 2) / 3,
            "val/rewards/f/mean": 4 / 8,
            "val/math/mean@3": 1 / 2,
            "val/math/best@3": 1.0,
            "val/math/maj@3": 1 / 2,
            "val/code/mean@2": 1 / 2,
            "val/code/best@2": 1 / 2,
            "val/code/maj@2": 1 / 2,
        }
    )


def test_an_evaluation_without_rewards_is_not_a_number():
    assert math.isnan(evaluation_metrics(summarize([group([None])]), "test")["test/reward"])
