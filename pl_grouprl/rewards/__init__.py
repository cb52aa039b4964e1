"""Reward functions; those with TRL's or verl's signature work unchanged.

    base.py        the signatures, weights, arguments, results and metrics of reward functions
    calls.py       calls them and writes the rewards into rollouts: `apply_rewards`
    workers.py     the same in worker processes
    answers.py     graders that compare with a reference     tests/rewards/test_grader_tables.py
    penalties.py   length, repetition                        tests/rewards/test_shaping_rewards.py
    code_tests.py  programs, run in sandbox/                 tests/rewards/test_code_tests.py, sandbox/
    models.py      reward models                             tests/rewards/test_model_reward.py
    judge.py       grades by a language model                tests/rewards/judge/

Your own reward, of tool calls for example, is a function in any of your modules, with one of the three signatures
of `base.RewardFunction`. A reward of this package becomes a class in `penalties.py` or a file of its own, is
exported here, and is tested on rollouts made by hand: `tests/helpers/episodes.py` makes episodes with tool calls, and
`tests/rewards/test_episode_rewards.py` shows what a function sees of them.
"""

from typing import TYPE_CHECKING, Any

from pl_grouprl.rewards.answers import ExactMatch, LeadingCorrectCharacters, MathVerify, NumericAnswer
from pl_grouprl.rewards.apply import PendingRewards, Rewards, apply_rewards, check_columns, prepare_rewards
from pl_grouprl.rewards.base import (
    EnvironmentReward,
    EnvironmentStepReward,
    FunctionFromFile,
    RewardConfigurationError,
    RewardFunction,
    Weighted,
)
from pl_grouprl.rewards.code_tests import CodeTests
from pl_grouprl.rewards.judge import Judge
from pl_grouprl.rewards.penalties import CosineLengthReward, OverlongPenalty, RepetitionPenalty
from pl_grouprl.rewards.sandbox import Sandbox, SandboxLimits
from pl_grouprl.rewards.workers import RewardWorkers, check_calls

if TYPE_CHECKING:
    from pl_grouprl.rewards.models import ModelReward, ProcessRewardModel

__all__ = [
    "CodeTests",
    "CosineLengthReward",
    "EnvironmentReward",
    "EnvironmentStepReward",
    "ExactMatch",
    "FunctionFromFile",
    "Judge",
    "LeadingCorrectCharacters",
    "MathVerify",
    "ModelReward",
    "NumericAnswer",
    "OverlongPenalty",
    "PendingRewards",
    "ProcessRewardModel",
    "RepetitionPenalty",
    "RewardConfigurationError",
    "RewardFunction",
    "RewardWorkers",
    "Rewards",
    "Sandbox",
    "SandboxLimits",
    "Weighted",
    "apply_rewards",
    "check_calls",
    "check_columns",
    "prepare_rewards",
]


def __getattr__(name: str) -> Any:
    """Import reward models on first use, so a reward worker starts without PyTorch unless it needs it."""
    if name in ("ModelReward", "ProcessRewardModel"):
        from pl_grouprl.rewards import models

        return getattr(models, name)
    raise AttributeError(f"module 'pl_grouprl.rewards' has no attribute {name!r}")
