"""Policy losses, the sampler's correction and the KL coefficient through GRPO, against functions and plain loops."""

from __future__ import annotations

import pytest

"""Log-probability that the engines here report for the first token of a rollout; the policy's are about -3.3."""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy_loss_options": {"temperature": 1.0}}, "policy_loss='ppo' does not use temperature; it takes epsilon"),
        ({"policy_loss": "gpg", "epsilon": 0.2}, "policy_loss='gpg' does not use epsilon; it takes no options"),
        ({"epsilon": 0.1, "policy_loss_options": {"epsilon": 0.2}}, "epsilon is set twice, as 0.1 and in policy_loss_"),
        (
            {"scale_rewards": "batch", "advantage_options": {"scale": "none"}},
            "scale is set twice, as 'batch' and in advantage_options as 'none'",
        ),
        ({"importance_sampling": "truncate"}, "importance_sampling is 'truncate'"),
        ({"importance_sampling_low": 0.5}, "importance_sampling_low is 0.5 .* importance_sampling is 'none'"),
        ({"importance_sampling_high": 2.0}, "importance_sampling_high is 2.0, but importance_sampling is 'none'"),
        (
            {"importance_sampling": "token_mask", "importance_sampling_high": None},
            "importance_sampling='token_mask' needs a bound",
        ),
        ({"importance_sampling": "token_mask", "importance_sampling_low": 4.0}, "high is 3.0; it must be larger than"),
        ({"kl_in": "advantage"}, "kl_in is 'advantage'; it must be 'loss' or 'reward'"),
        ({"kl_target": 1.0}, "kl_target is 1.0 and beta is 0"),
        ({"beta": 0.1, "kl_target": 0.0}, "target is 0.0; it must be larger than 0"),
        ({"beta": 0.1, "kl_horizon": 100}, "kl_horizon is 100 and kl_target is None"),
    ],
)
def test_refused(make_module, options, message):
    with pytest.raises(ValueError, match=message):
        make_module(**options)
