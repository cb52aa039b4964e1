"""Every option of PPO does what it says, and what cannot be honoured is refused."""

from __future__ import annotations

import pytest

from pl_grouprl.algorithms import PPO

REFUSED = [
    ({"gamma": 1.5}, r"gamma is 1.5; it must be in \[0, 1\]"),
    ({"lam": -0.1}, r"lam is -0.1; it must be in \[0, 1\]"),
    ({"critic_lam": 2}, r"critic_lam is 2; it must be in \[0, 1\], or None"),
    ({"lam_alpha": 0}, "lam_alpha is 0; it must be larger than 0, or None"),
    ({"cliprange_value": 0}, "cliprange_value is 0; it must be larger than 0, or None for no clipping"),
    ({"vf_coef": 0}, "vf_coef is 0; it must be a finite number larger than 0"),
    ({"critic_warmup_steps": -1}, "critic_warmup_steps is -1; it must be 0 or larger"),
    ({"beta": -1}, "beta is -1; it must be 0"),
    ({"beta": float("inf")}, "beta is inf; it must be 0"),
    ({"beta": 0.1, "kl_horizon": 100}, "kl_horizon is 100 and kl_target is None"),
    ({"bootstrap_truncated": True, "mask_truncated_completions": True}, "bootstrap_truncated=True applies to rollouts"),
    ({"kl_in": "reward"}, "kl_in is 'reward' and beta is 0"),
    ({"kl_in": "both"}, "kl_in is 'both'; it must be 'loss' or 'reward'"),
    ({"kl_type": "k9"}, "k9"),
    ({"kl_target": 0.1}, "kl_target is 0.1 and beta is 0"),
    ({"beta": 0.1, "kl_horizon": 10}, "kl_horizon is 10 and kl_target is None"),
    ({"beta": 0.1, "kl_target": -1}, "target is -1; it must be larger than 0"),
    ({"num_generations": 0}, "num_generations is 0; it must be at least 1"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_out_of_range(make_module, options, message):
    with pytest.raises(ValueError, match=message):
        make_module(PPO, **options)
