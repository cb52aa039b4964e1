"""Reward functions; those with TRL's or verl's signature work unchanged."""

from typing import TYPE_CHECKING, Any

from pl_grouprl.rewards.answers import ExactMatch, LeadingCorrectCharacters, MathVerify, NumericAnswer
from pl_grouprl.rewards.base import (
    EnvironmentReward,
    FunctionFromFile,
    RewardConfigurationError,
    RewardFunction,
    Weighted,
    check_environments,
)
from pl_grouprl.rewards.calls import (
    PendingRewards,
    Rewards,
    apply_rewards,
    check_columns,
    check_stoppable,
    check_time_limits,
    prepare_rewards,
    start_rewards,
)
from pl_grouprl.rewards.code_tests import CodeTests
from pl_grouprl.rewards.judge import Judge
from pl_grouprl.rewards.penalties import CosineLengthReward, OverlongPenalty, RepetitionPenalty
from pl_grouprl.rewards.sandbox import Sandbox, SandboxLimits
from pl_grouprl.rewards.workers import RewardWorkers

if TYPE_CHECKING:
    from pl_grouprl.rewards.models import ModelReward, ProcessRewardModel

__all__ = [
    "CodeTests",
    "CosineLengthReward",
    "EnvironmentReward",
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
    "check_columns",
    "check_environments",
    "check_stoppable",
    "check_time_limits",
    "prepare_rewards",
    "start_rewards",
]


def __getattr__(name: str) -> Any:
    """Import reward models on first use, so a reward worker starts without PyTorch unless it needs it."""
    if name == "ModelReward":
        from pl_grouprl.rewards.models import ModelReward

        return ModelReward
    if name == "ProcessRewardModel":
        from pl_grouprl.rewards.models import ProcessRewardModel

        return ProcessRewardModel
    raise AttributeError(f"module 'pl_grouprl.rewards' has no attribute {name!r}")
