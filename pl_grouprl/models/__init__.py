"""Policies and critics: their sources, and scoring rollouts with them."""

from pl_grouprl.models.adapters import FourBit, LoRAAdapter
from pl_grouprl.models.cost import ModelCost
from pl_grouprl.models.critic import (
    Critic,
    CriticSource,
    LoRACritic,
    PolicyCopyCritic,
    PretrainedCritic,
    SharedTrunkCritic,
    ValueHead,
    check_critic_parity,
)
from pl_grouprl.models.policy import PolicySource, PretrainedPolicy
from pl_grouprl.models.score import PrefixPass, hidden_states, rollout_logprobs, score

__all__ = [
    "Critic",
    "CriticSource",
    "FourBit",
    "LoRAAdapter",
    "LoRACritic",
    "ModelCost",
    "PolicyCopyCritic",
    "PolicySource",
    "PrefixPass",
    "PretrainedCritic",
    "PretrainedPolicy",
    "SharedTrunkCritic",
    "ValueHead",
    "check_critic_parity",
    "hidden_states",
    "rollout_logprobs",
    "score",
]
