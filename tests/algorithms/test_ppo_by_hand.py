"""Single updates of PPO and GROUP PPO against a plain implementation: loops over rollouts and tokens, in float64.

Nothing here is packed, padded or vectorised, and nothing of `pl_grouprl.functional` is used.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from helpers.sweeps import sweep_pairs

from pl_grouprl.algorithms import PPO, GroupPPO, OptimizerConfig
from pl_grouprl.models import PolicyCopyCritic, SharedTrunkCritic
from pl_grouprl.models.critic import LoRACritic
from pl_grouprl.types import SamplingConfig

TEMPERATURE = 0.8
OPTIONS = {
    "gamma": 0.97, "lam": 0.9, "critic_lam": 0.8, "epsilon": 0.02, "epsilon_high": 0.03, "beta": 0.3,
    "policy_loss": {"delta": 1.035}, "kl": {"type": "k1", "place": "reward"}, "entropy_coef": 0.05,
    "cliprange_value": 0.02, "vf_coef": 0.7,
    "bootstrap_truncated": True, "num_iterations": 3,
}  # fmt: skip


def rewards_with_a_gap(completions, **columns):
    return [None if len(text) == 6 else len(set(text)) / 5 - 0.3 * (len(text) % 2) for text in completions]


def rewards_of_tokens(completion_ids, completions, **columns):
    """The same outcome for some, rewards of tokens (of tool output too) for the others."""
    outcomes = rewards_with_a_gap(completions)
    return [
        own if len(ids) % 3 == 0 else [None if i % 2 else 0.1 * (token % 7) for i, token in enumerate(ids)]
        for own, ids in zip(outcomes, completion_ids, strict=True)
    ]


class Weights:
    """The models as they were before a given step."""

    def __init__(self, module, states, step):
        state = states[step]
        self.policy, self.reference, self.critic = (
            copy.deepcopy(part) for part in (module.policy, module.reference, module.critic)
        )
        load(self.policy, state, "policy.")
        load(self.critic, state, "critic.")
        self.trunk = self.policy.model if module.critic.shares_trunk else self.critic.trunk
        self.detached = module.critic.shares_trunk and module.critic.detach_trunk

    def distributions(self, rollout):
        """Log-probabilities of every token of the vocabulary before each token of the rollout, [tokens, V]."""
        return all_logprobs(self.policy, rollout)

    def values(self, rollout):
        """V before each token, and after the last one."""
        prompt, tokens = rollout
        states = self.trunk(input_ids=torch.tensor([prompt + tokens])).last_hidden_state[0, len(prompt) - 1 :]
        if self.detached:
            states = states.detach()
        return states @ self.critic.head.weight[0] + self.critic.head.bias[0]


def load(part, state, prefix):
    own = dict(part.named_parameters())
    with torch.no_grad():
        for name, parameter in own.items():
            if prefix + name in state:
                parameter.copy_(state[prefix + name])
            parameter.grad = None


def all_logprobs(model, rollout):
    prompt, tokens = rollout
    logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1)


class Plain:
    """What a rollout gives the updates: lists over the rollouts of lists over trained tokens."""

    def __init__(self, module, before, threshold=None):
        self.module = module
        self.rollouts, self.kept, self.rewards, self.cut = [], [], [], []
        self.steps = []
        for group in module.last_rollouts.groups:
            for r in group.rollouts:
                if r.reward is None:
                    continue
                mask = r.loss_mask or [1] * len(r.token_ids)
                self.rollouts.append((list(group.prompt_ids), list(r.token_ids)))
                self.kept.append([i for i, bit in enumerate(mask) if bit])
                self.rewards.append(r.reward)
                self.steps.append(r.token_rewards or [])
                self.cut.append(r.finish_reason == "length")
        with torch.no_grad():
            self.old = [self.logprobs(before.distributions(r), i) for i, r in enumerate(self.rollouts)]
            self.norms = [self.score_norms(before.distributions(r), i) for i, r in enumerate(self.rollouts)]
            reference = [self.logprobs(all_logprobs(before.reference, r), i) for i, r in enumerate(self.rollouts)]
            self.values, self.after = [], []
            for i, r in enumerate(self.rollouts):
                values = before.values(r).tolist()
                self.values.append([values[t] for t in self.kept[i]])
                self.after.append(values[-1] if self.cut[i] else 0.0)
        self.token_rewards = [self.rewards_of(i, reference[i]) for i in range(len(self.rewards))]
        if threshold is None:
            self.groups = [[[t] for t in range(len(row))] for row in self.values]
        else:
            self.groups = self.cut_into_groups(threshold)
        self.advantages, self.returns = [], []
        for i in range(len(self.rollouts)):
            self.advantages.append(self.spread(i, self.semi_mdp(i, OPTIONS["lam"])))
            targets = self.semi_mdp(i, OPTIONS["critic_lam"])
            self.returns.append([a + self.values[i][g[0]] for a, g in zip(targets, self.groups[i], strict=True)])
        self.whiten()

    def rewards_of(self, i, reference):
        row = [-OPTIONS["beta"] * (p - q) for p, q in zip(self.old[i].tolist(), reference.tolist(), strict=True)]
        if row:
            row[-1] += self.rewards[i] - sum(step or 0.0 for step in self.steps[i])
            for t, step in enumerate(self.steps[i]):  # the last trained token up to t, or the first one
                row[max(sum(kept <= t for kept in self.kept[i]) - 1, 0)] += step or 0.0
        return row

    def logprobs(self, distributions, i):
        tokens = self.rollouts[i][1]
        picked = [distributions[t, tokens[t]] for t in self.kept[i]]
        return torch.stack(picked) if picked else distributions.new_zeros(0)

    def score_norms(self, distributions, i):
        """Squared norm of one-hot minus softmax, entry by entry."""
        norms = []
        for t in self.kept[i]:
            residual = -distributions[t].exp()
            residual[self.rollouts[i][1][t]] += 1
            norms.append(float((residual * residual).sum()))
        return norms

    def delta(self, i):
        values = [*self.values[i], self.after[i]]
        gamma = OPTIONS["gamma"]
        return [r + gamma * values[t + 1] - values[t] for t, r in enumerate(self.token_rewards[i])]

    def cut_into_groups(self, threshold, max_size=16, epsilon=1e-6):
        signals = [
            d * d * q for i in range(len(self.rollouts)) for d, q in zip(self.delta(i), self.norms[i], strict=True)
        ]
        floor = epsilon * sum(signals) / len(signals)
        groups = []
        for i in range(len(self.rollouts)):
            own, current, ppo, norms = [], [], 0.0, 0.0
            for t, d in enumerate(self.delta(i)):
                current.append(t)
                ppo += d * d * self.norms[i][t]
                norms += self.norms[i][t]
                fires = ppo > floor and len(current) * ppo * (1 + 1e-5) >= threshold * d * d * norms
                if fires or len(current) == max_size or t == len(self.values[i]) - 1:
                    own.append(current)
                    current, ppo, norms = [], 0.0, 0.0
            groups.append(own)
        return groups

    def semi_mdp(self, i, lam):
        """A_g = sum gamma^j r_{b+j} + gamma^n V_{e+1} - V_b + gamma^n lam A_{g+1}, from the last group on."""
        gamma, values = OPTIONS["gamma"], [*self.values[i], self.after[i]]
        result, following = [], 0.0
        for group in reversed(self.groups[i]):
            n, first = len(group), group[0]
            total = sum(gamma**j * self.token_rewards[i][first + j] for j in range(n))
            following = total + gamma**n * values[first + n] - values[first] + gamma**n * lam * following
            result.insert(0, following)
        return result

    def spread(self, i, per_group):
        return [a for a, group in zip(per_group, self.groups[i], strict=True) for _ in group]

    def whiten(self):
        everything = [a for row in self.advantages for a in row]
        mean = sum(everything) / len(everything)
        variance = sum((a - mean) ** 2 for a in everything) / (len(everything) - 1)
        self.advantages = [[(a - mean) / math.sqrt(variance + 1e-8) for a in row] for row in self.advantages]

    def losses(self, now):
        """The two losses with gradient, and how many tokens each clip touched."""
        policy, critic, tokens, states = 0.0, 0.0, 0, 0
        clipped = {"policy": 0, "delta": 0, "value": 0}
        for i, rollout in enumerate(self.rollouts):
            distributions, values = now.distributions(rollout), now.values(rollout)
            logprobs = self.logprobs(distributions, i)
            for t, position in enumerate(self.kept[i]):
                ratio, advantage = (logprobs[t] - self.old[i][t]).exp(), self.advantages[i][t]
                held = ratio.clamp(1 - OPTIONS["epsilon"], 1 + OPTIONS["epsilon_high"])
                surrogate = torch.minimum(ratio * advantage, held * advantage)
                clipped["policy"] += int(float(held * advantage) < float(ratio * advantage))
                delta = OPTIONS["policy_loss"]["delta"]
                if advantage < 0 and float(ratio) > delta:
                    surrogate = torch.as_tensor(delta * advantage)
                    clipped["delta"] += 1
                row = distributions[position]
                policy = policy - surrogate - OPTIONS["entropy_coef"] * -(row.exp() * row).sum()
                tokens += 1
            for g, group in enumerate(self.groups[i]):
                value, old = values[self.kept[i][group[0]]], self.values[i][group[0]]
                held = value.clamp(old - OPTIONS["cliprange_value"], old + OPTIONS["cliprange_value"])
                errors = [(v - self.returns[i][g]) ** 2 for v in (value, held)]
                clipped["value"] += int(float(errors[1]) > float(errors[0]))
                critic = critic + 0.5 * torch.maximum(*errors)
                states += 1
        return policy / tokens, critic / states, clipped


CRITICS = {
    "copy": PolicyCopyCritic(head_std=0.3),
    "shared": SharedTrunkCritic(head_std=0.3),
    "shared, detached": SharedTrunkCritic(detach=True, head_std=0.3),
    "lora": LoRACritic(r=4, head_std=0.3),
}


KINDS = [*((name, "shared") for name in CRITICS), ("copy", "repeated")]
CASES = [(cls, *kind) for cls in (PPO, GroupPPO) for kind in KINDS]
QUICK = [*((PPO, *kind) for kind in KINDS[1:]), (GroupPPO, "copy", "shared")]


@pytest.mark.parametrize(("cls", "critic", "sharing"), sweep_pairs(CASES, QUICK))
def test_an_update_by_hand(make_module, make_data, make_trainer, ragged_engine, history, cls, critic, sharing):
    check_an_update(make_module, make_data, make_trainer, ragged_engine, history, cls, critic, sharing)


@pytest.mark.parametrize("cls", [PPO, GroupPPO])
def test_rewards_of_tokens_by_hand(make_module, make_data, make_trainer, ragged_engine, history, cls):
    options = make_module, make_data, make_trainer, ragged_engine, history
    check_an_update(*options, cls, "copy", "shared", rewards_of_tokens)


def check_an_update(
    make_module, make_data, make_trainer, ragged_engine, history, cls, critic, sharing, rewards=rewards_with_a_gap
):
    module = make_module(
        cls, rewards=rewards, critic=CRITICS[critic], engine=ragged_engine(), sharing={"mode": sharing},
        sampling=SamplingConfig(max_new_tokens=12, temperature=TEMPERATURE),
        optimizer=OptimizerConfig(learning_rate=4e-3), critic_optimizer=OptimizerConfig(learning_rate=5e-3), **OPTIONS,
    )  # fmt: skip
    record = history(keep_tensors=True)
    # The second batch of rollouts is off the reference, and its last update off its own old log-probabilities.
    make_trainer(max_steps=6, callbacks=[record], precision="64-true").fit(module, make_data(batch_size=4))
    threshold = module.last_rollouts.metrics["token_group/threshold"] if cls is GroupPPO else None
    rollout_time, last_update = Weights(module, record.weights, 2), Weights(module, record.weights, 4)
    plain = Plain(module, rollout_time, threshold)
    policy_loss, value_loss, clipped = plain.losses(last_update)
    # Each clip is at work, or the test would say less than it should. Few tokens come as far as delta.
    assert clipped["policy"]
    assert clipped["value"]
    assert clipped["delta"] or cls is GroupPPO
    if threshold is not None:
        assert threshold != 4.0  # moved after the first batch of rollouts
        assert max(len(group) for row in plain.groups for group in row) > 1

    metrics = record.steps[-1]
    total = policy_loss + OPTIONS["vf_coef"] * value_loss
    tokens, positions = sum(map(len, plain.values)), sum(map(len, plain.groups))
    assert metrics["loss"] == pytest.approx(float(total), rel=1e-6, abs=1e-7)
    assert metrics["value/loss"] == pytest.approx(float(value_loss), rel=1e-6)
    assert metrics["value/clip_ratio"] == pytest.approx(clipped["value"] / positions)
    assert metrics["clip_ratio/region_mean"] == pytest.approx(clipped["policy"] / tokens)
    assert metrics["clip_ratio/delta_mean"] == pytest.approx(clipped["delta"] / tokens)

    total.backward()
    compare(record.gradients[-1], last_update.policy, "policy.")
    compare(record.gradients[-1], last_update.critic, "critic.")


def compare(gradients, part, prefix):
    """The largest difference of a gradient, relative to the largest gradient of the part."""
    expected = {prefix + name: p.grad for name, p in part.named_parameters() if p.requires_grad}
    actual = {name: gradient for name, gradient in gradients.items() if name.startswith(prefix)}
    assert actual.keys() == expected.keys()
    scale = max(gradient.abs().max() for gradient in expected.values())
    assert scale > 1e-4
    for name, gradient in expected.items():
        assert (actual[name] - gradient).abs().max() <= 1e-6 * scale, name
