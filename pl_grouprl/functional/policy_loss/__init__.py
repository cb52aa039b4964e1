"""Policy losses per token, from log-probabilities and advantages on the flat token axis.

p is a token's probability under the policy, r the ratio of p to the probability before the update, A the token's
advantage, and s the ratio of its sequence, the geometric mean of the tokens' r:

| name | loss of a token | TRL | verl |
|---|---|---|---|
| `ppo` | -min(r A, clip(r) A), see `clipped_policy_loss` | `grpo`, `dr_grpo`, `dapo`, `bnpo` | `vanilla` |
| `gspo` | -min(s A, clip(s) A), see `gspo_policy_loss` | sequence level (below) | |
| `gspo_token` | the same value, a gradient per token, see `gspo_token_policy_loss` | | `gspo` |
| `gmpo` | -A times the geometric mean of clipped ratios, see `gmpo_policy_loss` | experimental | `geo_mean` |
| `cispo` | -clip(r) A log p, see `cispo_policy_loss` | `cispo` | `cispo` |
| `gpg` | -A log p, see `gpg_policy_loss` | | `gpg` |
| `dro` | -A log p + (log r)^2 dro_beta / 2, see `dro_policy_loss` | | `dro` |
| `sapo` | -A gate(r), see `sapo_policy_loss` | `sapo` | `sapo` |
| `clip_cov` | `ppo`, but 0 for a few tokens, see `clip_cov_policy_loss` | | `clip_cov` |
| `kl_cov` | -r A and a penalty for a few tokens, see `kl_cov_policy_loss` | | `kl_cov` |
| `dppo_tv`, `dppo_kl` | -min(r, c) A log p up to a divergence, see `dppo_tv_policy_loss` | | same names |

TRL's sequence level is `importance_sampling_level="sequence"`.

Log-ratios are clamped to [-20, 20] before `exp` (to at most 10 in `gspo` and `gspo_token`), as in most of verl's
losses; TRL does not clamp them. Within these limits all three agree. Tokens outside the mask have a loss of exactly 0
and no gradient, whatever their inputs.
"""

from pl_grouprl.functional.aggregation import aggregate
from pl_grouprl.functional.policy_loss.base import MAX_LOG_RATIO, PolicyLoss
from pl_grouprl.functional.policy_loss.clipped import clipped_policy_loss
from pl_grouprl.functional.policy_loss.covariance import clip_cov_policy_loss, kl_cov_policy_loss
from pl_grouprl.functional.policy_loss.divergence import dppo_kl_policy_loss, dppo_tv_policy_loss
from pl_grouprl.functional.policy_loss.registry import (
    POLICY_LOSSES,
    PolicyLossFunction,
    make_policy_loss,
    register_policy_loss,
)
from pl_grouprl.functional.policy_loss.sapo import sapo_policy_loss
from pl_grouprl.functional.policy_loss.sequence import (
    MAX_SEQUENCE_LOG_RATIO,
    gmpo_policy_loss,
    gspo_policy_loss,
    gspo_token_policy_loss,
)
from pl_grouprl.functional.policy_loss.weighted import cispo_policy_loss, dro_policy_loss, gpg_policy_loss

__all__ = [
    "MAX_LOG_RATIO",
    "MAX_SEQUENCE_LOG_RATIO",
    "POLICY_LOSSES",
    "PolicyLoss",
    "PolicyLossFunction",
    "cispo_policy_loss",
    "clip_cov_policy_loss",
    "clipped_policy_loss",
    "dppo_kl_policy_loss",
    "dppo_tv_policy_loss",
    "dro_policy_loss",
    "gmpo_policy_loss",
    "gpg_policy_loss",
    "gspo_policy_loss",
    "gspo_token_policy_loss",
    "kl_cov_policy_loss",
    "make_policy_loss",
    "register_policy_loss",
    "sapo_policy_loss",
]
