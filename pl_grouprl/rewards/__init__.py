"""Reward functions; those with TRL's or verl's signature work unchanged."""

from typing import TYPE_CHECKING, Any

from pl_grouprl.rewards.apply import (
    PendingRewards,
    Rewards,
    apply_rewards,
    check_columns,
    check_stoppable,
    check_time_limits,
    prepare_rewards,
    start_rewards,
)
from pl_grouprl.rewards.base import FunctionFromFile, RewardConfigurationError, RewardFunction, Weighted
from pl_grouprl.rewards.code_tests import CodeTests
from pl_grouprl.rewards.conventions import check_environments
from pl_grouprl.rewards.cosine_length import CosineLengthReward
from pl_grouprl.rewards.environment import EnvironmentReward
from pl_grouprl.rewards.exact_match import ExactMatch
from pl_grouprl.rewards.judge import Judge
from pl_grouprl.rewards.leading_characters import LeadingCorrectCharacters
from pl_grouprl.rewards.math_verify import MathVerify
from pl_grouprl.rewards.numeric_answer import NumericAnswer
from pl_grouprl.rewards.overlong import OverlongPenalty
from pl_grouprl.rewards.repetition import RepetitionPenalty
from pl_grouprl.rewards.sandbox import Sandbox, SandboxLimits
from pl_grouprl.rewards.workers import RewardWorkers

if TYPE_CHECKING:
    from pl_grouprl.rewards.model_reward import ModelReward
    from pl_grouprl.rewards.process_reward_model import ProcessRewardModel

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
        from pl_grouprl.rewards.model_reward import ModelReward

        return ModelReward
    if name == "ProcessRewardModel":
        from pl_grouprl.rewards.process_reward_model import ProcessRewardModel

        return ProcessRewardModel
    raise AttributeError(f"module 'pl_grouprl.rewards' has no attribute {name!r}")
