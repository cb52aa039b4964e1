"""Every policy loss and aggregation, and the value loss: branched rollouts are the same shared, repeated and cut."""

import random

import pytest
import torch
from helpers.branched import branched_groups
from helpers.tiny_models import gradients, tiny_model, worst_gradient_error

from pl_grouprl.attention import shared_prefix
from pl_grouprl.functional.importance import ImportanceSampling
from pl_grouprl.functional.losses import LOSS_AGG_MODES
from pl_grouprl.functional.policy_loss import POLICY_LOSSES
from pl_grouprl.models.critic import Critic, ValueHead
from pl_grouprl.models.score import PrefixPass, score
from pl_grouprl.training.buffer import RolloutBuffer
from pl_grouprl.training.micro_batches import MicroBatchSchedule, RowOptions
from pl_grouprl.training.objective import KLPenalty, PolicyObjective

pytestmark = pytest.mark.usefixtures("layers_checked_once")

CPU = torch.device("cpu")
CASES = [(name, mode) for mode in LOSS_AGG_MODES for name in POLICY_LOSSES]


def buffer_of(groups, policy, generator):
    """Rollouts with advantages per token, and old, reference and sampler's log-probabilities near the policy's."""
    buffer = RolloutBuffer(groups)
    assert buffer.joined("loss_mask").any()
    (row,) = MicroBatchSchedule(buffer, range(len(groups)), RowOptions("repeated", None, CPU))
    with torch.no_grad():
        logprobs_N = score(policy, row.scoring).logprobs_N
    for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs"):
        noise_N = 0.3 * torch.randn(len(logprobs_N), generator=generator, dtype=torch.float64)
        buffer.put(name, buffer.in_order([logprobs_N + noise_N], row.rollout_numbers, per_token=True))
    for name in ("advantages", "returns"):
        buffer.put(name, torch.randn(len(logprobs_N), generator=generator, dtype=torch.float64))
    return buffer


def step(policy, critic, buffer, objective, options):
    """The sums of the policy's and the critic's loss over all micro-batches, and the gradients."""
    both = torch.nn.ModuleDict({"policy": policy, "critic": critic})
    both.zero_grad()
    total = 0.0
    with shared_prefix(policy), shared_prefix(critic.trunk):
        for batch in MicroBatchSchedule(buffer, range(len(buffer.groups)), options):
            if isinstance(batch, PrefixPass):
                batch.loss(both.parameters()).backward()
                continue
            sums = objective.loss(batch, score(policy, batch.scoring, **objective.score_options))
            loss, denominator = sums.losses["policy"]
            values_N = critic.values(batch.scoring)
            final_B = critic.values(batch.scoring, batch.scoring.final_index_B)
            loss = loss + ((values_N - batch.tokens["returns"]).square() * batch.mask_N).sum()
            loss = loss + (final_B.square().sum() if batch.rollout_numbers else 0 * final_B.sum())
            loss.backward()
            total = total + torch.stack([loss.detach(), denominator.to(loss.dtype)])
    return total, gradients(both)


@pytest.fixture(scope="module")
def models():
    head = ValueHead.near_zero(32, std=0.5).double()
    trunk = tiny_model("gpt2", dtype=torch.float64, seed=1).transformer
    return tiny_model("gpt2", dtype=torch.float64), Critic(trunk, head)


def assert_same(models, seed, name, mode):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    policy, critic = models
    buffer = buffer_of(branched_groups(seed, 3, most=10, common=3), policy, generator)
    objective = PolicyObjective(
        name,
        {},
        loss_agg_mode=mode,
        kl=KLPenalty(0.1),
        max_new_tokens=16,
        entropy_coef=0.05,
        importance_sampling=ImportanceSampling("token_truncate", high=1.2),
    )
    loss, expected = step(policy, critic, buffer, objective, RowOptions("repeated", None, CPU))
    cuts = [None] if POLICY_LOSSES[name].compares_tokens else [None, rng.choice([13, 16, 25])]
    for budget in cuts:
        options = RowOptions("shared", budget, CPU, share_across_groups=bool(seed % 2), min_saved_tokens=1 + seed % 3)
        found, gradients_ = step(policy, critic, buffer, objective, options)
        torch.testing.assert_close(found, loss, atol=0, rtol=1e-9)
        assert worst_gradient_error(gradients_, expected) < 1e-9


@pytest.mark.parametrize("seed", range(len(CASES)))
def test_losses_and_gradients(models, seed):
    assert_same(models, seed, *CASES[seed])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(len(CASES), 200))
def test_more_losses_and_gradients(models, seed):
    assert_same(models, seed, *CASES[seed % len(CASES)])
