"""GROUP PPO trains its critic at the starts of token groups: head, trunk and backward run for nothing else."""

from __future__ import annotations

import pytest
import torch

from pl_grouprl.algorithms import PPO, GroupPPO
from pl_grouprl.algorithms import ppo as ppo_module
from pl_grouprl.models import PolicyCopyCritic, SharedTrunkCritic
from pl_grouprl.models.critic import LoRACritic
from pl_grouprl.packing import truncate_rollouts
from pl_grouprl.types import SamplingConfig

CRITICS = {"copy": PolicyCopyCritic(head_std=0.3), "lora": LoRACritic(r=4, head_std=0.3)}
SHARED = {"shared": SharedTrunkCritic(head_std=0.3), "shared, detached": SharedTrunkCritic(detach=True, head_std=0.3)}
# tau = 2 and rewards at the end only: groups of two tokens where values hardly differ, more where they do.
CUT = {"group_variance_threshold": 2.0, "adaptive_threshold": False}


class Counts:
    """Rows that the value head gets and tokens that go through the trunk, with gradient enabled."""

    def __init__(self, module):
        module.configure_model()
        self.rows, self.tokens, self.head_gradients = [], [], []
        module.critic.head.register_forward_hook(self.head)
        module.critic.trunk.register_forward_hook(self.trunk, with_kwargs=True)

    def head(self, head, args, values):
        if torch.is_grad_enabled():
            self.rows.append(len(values))
            values.register_hook(lambda gradient: self.head_gradients.append(gradient.clone()))

    def trunk(self, trunk, args, kwargs, output):
        if torch.is_grad_enabled():
            self.tokens.append(output.last_hidden_state.shape[:-1].numel())


@pytest.fixture
def fit(make_module, make_data, make_trainer, ragged_engine):
    def run(cls=GroupPPO, *, max_steps=1, **options):
        options = {"engine": ragged_engine(), "sampling": SamplingConfig(max_new_tokens=12), **options}
        module = make_module(cls, **options)
        counts = Counts(module)
        make_trainer(max_steps=max_steps, precision="64-true").fit(module, make_data(shuffle=False))
        return module, counts

    return run


def of_buffer(module):
    buffer = module.last_rollouts
    starts, mask = buffer.joined("group_starts"), buffer.joined("loss_mask")
    ends, offset = [], 0
    for group in buffer.groups:
        for rollout in group.rollouts:
            own = starts[offset : offset + len(rollout.token_ids)].nonzero().flatten().tolist()
            ends.append(own[-1] + 1 if own else 0)
            offset += len(rollout.token_ids)
    return starts, mask, ends


@pytest.mark.parametrize("critic", [*CRITICS, *SHARED])
def test_the_head_runs_only_at_group_starts(fit, critic):
    module, counts = fit(critic=(CRITICS | SHARED)[critic], **CUT)
    starts, mask, _ = of_buffer(module)
    assert counts.rows == [int(starts.sum())]
    assert int(starts.sum()) < 0.8 * int(mask.sum())
    assert torch.equal(module.last_rollouts.joined("value_mask"), starts)
    (gradient,) = counts.head_gradients
    assert gradient.shape == (int(starts.sum()),)
    assert (gradient != 0).any()
    everywhere, counts = fit(critic=(CRITICS | SHARED)[critic], critic_positions="all", **CUT)
    assert counts.rows == [int(mask.sum())]
    assert torch.equal(everywhere.last_rollouts.joined("value_mask"), mask)


@pytest.mark.parametrize("critic", CRITICS)
def test_the_trunk_stops_at_the_last_start(fit, critic):
    module, counts = fit(critic=CRITICS[critic], **CUT)
    _, _, ends = of_buffer(module)
    groups = module.last_rollouts.groups
    prompts = sum(len(group.prompt_ids) for group in groups)
    whole = prompts + sum(len(r.token_ids) for group in groups for r in group.rollouts)
    assert counts.tokens == [prompts + sum(ends)]
    assert counts.tokens[0] < whole
    _, all_counts = fit(PPO, critic=CRITICS[critic])
    # PPO reads the value before the last trained token; nothing is behind it but tool output.
    assert whole >= all_counts.tokens[0] > counts.tokens[0]


@pytest.mark.parametrize("sharing", ["shared", "repeated"])
@pytest.mark.parametrize("critic", CRITICS)
def test_the_gradient_is_that_of_whole_rollouts(fit, monkeypatch, gradients, critic, sharing):
    truncated, counts = fit(critic=CRITICS[critic], sharing={"mode": sharing}, **CUT)
    with monkeypatch.context() as patch:

        def keep_all(groups, ends):
            return truncate_rollouts(groups, [len(rollout.token_ids) for group in groups for rollout in group.rollouts])

        patch.setattr(ppo_module, "truncate_rollouts", keep_all)
        whole, whole_counts = fit(critic=CRITICS[critic], sharing={"mode": sharing}, **CUT)
    assert whole_counts.rows == counts.rows
    assert sum(whole_counts.tokens) > sum(counts.tokens) or sharing == "repeated"  # the longest row may stay
    left, right = gradients(truncated), gradients(whole)
    scale = max(g.abs().max() for name, g in right.items() if name.startswith("critic"))
    assert scale > 1e-3
    for name, gradient in right.items():
        assert (left[name] - gradient).abs().max() <= 1e-6 * scale, name


def test_later_states_get_no_gradient(fit, monkeypatch):
    """Zero gradient off the starts, seen at the hidden states themselves."""
    seen = []
    original = ppo_module.Critic.values

    def values(self, batch, index=None, *, states=None):
        if torch.is_grad_enabled() and states is not None:
            states.retain_grad()
            seen.append((states, index))
        return original(self, batch, index, states=states)

    monkeypatch.setattr(ppo_module.Critic, "values", values)
    fit(critic=SHARED["shared"], vf_coef=1.0, rewards=lambda completions, **columns: [1.0] * len(completions),
        whiten_advantages=True, critic_warmup_steps=1, **CUT)  # fmt: skip
    ((states, index),) = seen
    touched = states.grad.abs().sum(dim=1).nonzero().flatten()
    assert set(touched.tolist()) <= set(index.tolist())
    assert len(touched) > 0
