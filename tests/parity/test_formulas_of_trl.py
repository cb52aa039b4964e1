"""Losses of TRL against TRL's own numbers: what `GRPOTrainer._compute_loss` of TRL 1.16.0 gives in float64.

Four rollouts of 6, 4, 5 and 1 tokens, one of them masked, with log-probabilities and entropies in closed form. TRL got
them in place of its model's; the numbers are its loss, and the gradients of log-probabilities and entropies, each
multiplied by 1 to 24 and summed.
Legend: B rollouts, L padded response length.
"""

import pytest
import torch

from pl_grouprl.functional.entropy import EntropyOptions, high_entropy_mask
from pl_grouprl.functional.importance import ImportanceSampling
from pl_grouprl.functional.logprobs import TokenScores
from pl_grouprl.functional.losses import LOSS_PRESETS
from pl_grouprl.training.micro_batches import MicroBatch, RowOptions, lay_out
from pl_grouprl.training.objective import KLOptions, KLPenalty, PolicyObjective
from pl_grouprl.types import Rollout, RolloutGroup

LENGTHS = [6, 4, 5, 1]
B, L = len(LENGTHS), max(LENGTHS)
RESPONSE = torch.arange(L) < torch.tensor(LENGTHS)[:, None]
MASK = RESPONSE.clone()
MASK[0, 2] = False
PLACE = torch.arange(B * L, dtype=torch.float64).reshape(B, L)


def loss_of(loss_type, *, beta=0.0, epsilon=0.2, epsilon_high=0.28, **options):
    """Our loss, and its gradients as the numbers of TRL have them."""
    policy = (-1.2 + (1.7 * PLACE).sin()).requires_grad_()
    old = policy.detach() - 0.3 * (2.3 * PLACE + 1).sin()
    entropy = (1.5 + (1.3 * PLACE + 0.5).cos()).requires_grad_()
    advantages = torch.tensor([0.9, -1.1, 0.4, -0.7], dtype=torch.float64)
    quantities = {
        "old_logprobs": old,
        "ref_logprobs": policy.detach() + 0.4 * (0.9 * PLACE + 3).sin(),
        "advantages": advantages[:, None].expand(B, L),
        "loss_mask": MASK,
    }
    if options.get("importance_sampling", MASK_ALONE) != MASK_ALONE:
        quantities["rollout_logprobs"] = old - 0.2 * (2.9 * PLACE + 2).cos()
    if "entropy_coef" in options:
        chosen = high_entropy_mask(entropy[RESPONSE], MASK[RESPONSE], options["entropy_coef"].top_quantile)
        quantities["high_entropy"] = torch.zeros(B, L, dtype=torch.bool).masked_scatter(RESPONSE, chosen)
    groups = [RolloutGroup([1], [Rollout([1] * length, reward=0.0) for length in LENGTHS])]
    rows, preset = RowOptions("shared", None, torch.device("cpu")), LOSS_PRESETS[loss_type]
    tokens = {name: matrix[RESPONSE] for name, matrix in quantities.items()}
    batch = MicroBatch(lay_out(groups, rows), tokens, groups, options=rows)
    clips = {} if preset.loss == "vespo" else {"epsilon": epsilon, "epsilon_high": epsilon_high}
    options = {"kl": KLPenalty(beta), "max_new_tokens": L, "loss_agg_mode": preset.aggregation} | options
    objective = PolicyObjective(preset.loss, clips, **options)
    total, count = objective.loss(batch, TokenScores(policy[RESPONSE], entropy[RESPONSE])).losses["policy"]
    gradients = torch.autograd.grad(total / count, [policy, entropy], materialize_grads=True)
    return [float((total / count).detach()), *(float((gradient * (PLACE + 1)).sum()) for gradient in gradients)]


TRUNCATED = ImportanceSampling("token_truncate", high=1.1)
MASK_ALONE = ImportanceSampling(off_policy_mask_threshold=0.05)
CASES = {
    "luspo": (
        {"loss_type": "luspo", "epsilon": 0.05, "epsilon_high": 0.1},
        (-0.354414832883479, -1.74712687374299, 0),
    ),
    "vespo": ({"loss_type": "vespo"}, (-0.141776968175195, 0.50537409548942, 0)),
    "vespo, truncated": (
        {"loss_type": "vespo", "importance_sampling": TRUNCATED},
        (-0.0151410440313257, -0.24989877650301, 0),
    ),
    "vespo, masked": (
        {"loss_type": "vespo", "importance_sampling": ImportanceSampling("token_mask", high=1.1)},
        (-0.0489626278212008, 0.482425251603159, 0),
    ),
    "off-policy mask": (
        {"loss_type": "dapo", "importance_sampling": MASK_ALONE},
        (-0.130759154407593, 0.0722774675052472, 0),
    ),
    "off-policy mask, sampler": (
        {"loss_type": "dapo", "importance_sampling": ImportanceSampling("token_truncate", None, 1.1, 0.05)},
        (-0.126766541445079, 0.106266054879514, 0),
    ),
    "corrected k3": (
        {"loss_type": "dapo", "kl": KLPenalty(0.3, KLOptions(use_bias_correction=True))},
        (-0.0816127724123692, 0.113746894907962, 0),
    ),
    "top entropy": (
        {"loss_type": "dapo", "beta": 0.3, "entropy_coef": EntropyOptions(top_quantile=0.4)},
        (-0.147743804196886, -0.241181102208233, 0),
    ),
    "top entropy, bonus": (  # TRL divides the bonus by the 6 tokens that get it, not by all 15
        {"loss_type": "dapo", "entropy_coef": EntropyOptions(0.07 * 15 / 6, top_quantile=0.4)},
        (-0.320341989911963, -0.131529612345506, -0.618333333333333),
    ),
    "all": (
        {
            "loss_type": "dapo",
            "kl": KLPenalty(0.3, KLOptions(use_bias_correction=True)),
            "importance_sampling": ImportanceSampling("token_truncate", None, 1.1, 0.05),
            "entropy_coef": EntropyOptions(0.07 * 15 / 6, top_quantile=0.4),
        },
        (-0.315367373611086, -0.214597338635756, -0.618333333333333),
    ),
    "k3": ({"loss_type": "dapo", "beta": 0.3}, (-0.0817897262718252, -0.0373740223574807, 0)),
}


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient(name):
    options, expected = CASES[name]
    assert loss_of(**options) == pytest.approx(expected, rel=1e-11, abs=1e-11)


def test_vespo_takes_weights_of_tokens():
    with pytest.raises(ValueError, match=r"importance_sampling.mode is 'sequence_mask', but policy_loss='vespo'"):
        loss_of("vespo", importance_sampling=ImportanceSampling("sequence_mask"))
