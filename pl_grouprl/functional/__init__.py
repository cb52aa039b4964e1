"""Mathematics on tensors, without models, trainers or padding: pure functions and thin classes over them."""

from pl_grouprl.functional.advantages import (
    ADVANTAGE_ESTIMATORS,
    GroupRelativeAdvantage,
    RLOOAdvantage,
    group_relative_advantages,
    make_advantage_estimator,
    rloo_advantages,
)
from pl_grouprl.functional.aggregation import LOSS_AGG_MODES, LOSS_PRESETS, LossPreset, aggregate, loss_denominator
from pl_grouprl.functional.kl import KL_KINDS, kl_estimate
from pl_grouprl.functional.logprobs import TokenScores, token_scores
from pl_grouprl.functional.masked import masked_mean, masked_sum, sum_per_rollout
from pl_grouprl.functional.policy_loss import (
    POLICY_LOSSES,
    CISPOPolicyLoss,
    ClippedPolicyLoss,
    GSPOPolicyLoss,
    PolicyLoss,
    cispo_policy_loss,
    clipped_policy_loss,
    gspo_policy_loss,
    make_policy_loss,
)
from pl_grouprl.functional.validation import best_at_k, majority_at_k, mean_at_k
