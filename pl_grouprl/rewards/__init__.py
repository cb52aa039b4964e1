"""Reward functions: TRL's and verl's signatures are accepted as they are."""

from pl_grouprl.rewards.apply import Rewards, apply_rewards, check_columns, prepare_rewards
from pl_grouprl.rewards.base import FunctionFromFile, RewardFunction, Weighted
from pl_grouprl.rewards.exact_match import ExactMatch
from pl_grouprl.rewards.leading_characters import LeadingCorrectCharacters
from pl_grouprl.rewards.model_reward import ModelReward
from pl_grouprl.rewards.numeric_answer import NumericAnswer

__all__ = [
    "ExactMatch",
    "FunctionFromFile",
    "LeadingCorrectCharacters",
    "ModelReward",
    "NumericAnswer",
    "RewardFunction",
    "Rewards",
    "Weighted",
    "apply_rewards",
    "check_columns",
    "prepare_rewards",
]
