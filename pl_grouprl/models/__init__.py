"""Policies and critics: their sources, and scoring rollouts with them."""

from pl_grouprl.models.adapters import LoRAAdapter
from pl_grouprl.models.cost import ModelCost
from pl_grouprl.models.critic import Critic, ValueHead, check_critic_parity
from pl_grouprl.models.critic_sources import CriticSource, PolicyCopyCritic, PretrainedCritic, SharedTrunkCritic
from pl_grouprl.models.lora_critic import LoRACritic
from pl_grouprl.models.policy import PolicySource, PretrainedPolicy
from pl_grouprl.models.prefix_pass import PrefixPass
from pl_grouprl.models.quantization import FourBit
from pl_grouprl.models.score import hidden_states, rollout_logprobs, score

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
