"""Former policy loss and advantage estimator classes, with the names of the registered functions that replaced them."""

POLICY_LOSS_CLASSES = {
    "ClippedPolicyLoss": "ppo",
    "GSPOPolicyLoss": "gspo",
    "GSPOTokenPolicyLoss": "gspo_token",
    "GMPOPolicyLoss": "gmpo",
    "CISPOPolicyLoss": "cispo",
    "GPGPolicyLoss": "gpg",
    "SAPOPolicyLoss": "sapo",
    "ClipCovPolicyLoss": "clip_cov",
    "KLCovPolicyLoss": "kl_cov",
    "DPPOTVPolicyLoss": "dppo_tv",
    "DPPOKLPolicyLoss": "dppo_kl",
}
ESTIMATOR_CLASSES = {
    "GroupRelativeAdvantage": "grpo",
    "PassKAdvantage": "grpo_passk",
    "RLOOAdvantage": "rloo",
    "OPOAdvantage": "opo",
    "ReMaxAdvantage": "remax",
    "ReinforcePlusPlusAdvantage": "reinforce_plus_plus",
    "ReinforcePlusPlusBaselineAdvantage": "reinforce_plus_plus_baseline",
}
