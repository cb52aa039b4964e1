"""The policy losses by name, as a configuration chooses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pl_grouprl.functional.policy_loss.base import PolicyLossFunction
from pl_grouprl.functional.policy_loss.clipped import ClippedPolicyLoss
from pl_grouprl.functional.policy_loss.covariance import ClipCovPolicyLoss, KLCovPolicyLoss
from pl_grouprl.functional.policy_loss.divergence import DPPOKLPolicyLoss, DPPOTVPolicyLoss
from pl_grouprl.functional.policy_loss.sapo import SAPOPolicyLoss
from pl_grouprl.functional.policy_loss.sequence import GMPOPolicyLoss, GSPOPolicyLoss, GSPOTokenPolicyLoss
from pl_grouprl.functional.policy_loss.weighted import CISPOPolicyLoss, GPGPolicyLoss
from pl_grouprl.functional.registry import build

POLICY_LOSSES: dict[str, Callable[..., PolicyLossFunction]] = {
    "ppo": ClippedPolicyLoss,
    "gspo": GSPOPolicyLoss,
    "gspo_token": GSPOTokenPolicyLoss,
    "gmpo": GMPOPolicyLoss,
    "cispo": CISPOPolicyLoss,
    "gpg": GPGPolicyLoss,
    "sapo": SAPOPolicyLoss,
    "clip_cov": ClipCovPolicyLoss,
    "kl_cov": KLCovPolicyLoss,
    "dppo_tv": DPPOTVPolicyLoss,
    "dppo_kl": DPPOKLPolicyLoss,
}


def make_policy_loss(name: str, /, **options: Any) -> PolicyLossFunction:
    """Build the loss registered as `name`; an option that it does not take is a ValueError."""
    return build(POLICY_LOSSES, "policy_loss", name, options)
