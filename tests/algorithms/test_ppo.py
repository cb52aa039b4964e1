"""PPO: updates by hand, every option, critics of each kind, and policy and critic in one optimizer."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from helpers.rank_cases import CRITICS
from helpers.sweeps import sweep, sweep_pairs
from helpers.tiny_runs import RaggedEngine, ScriptedEngine, compare_gradients, constant, part, same, weights_of

from pl_grouprl.algorithms import PPO, Estimate, GroupPPO, OptimizerConfig
from pl_grouprl.demo.tasks import digit_tokenizer
from pl_grouprl.functional.masked import from_rows
from pl_grouprl.models import PolicyCopyCritic, PretrainedCritic, SharedTrunkCritic
from pl_grouprl.models.critic import LoRACritic
from pl_grouprl.types import EpisodeRows, SamplingConfig

# Single updates against a plain implementation: loops over rollouts and tokens, in float64. Nothing of it is packed,
# padded or vectorized, and nothing of `pl_grouprl.functional` is used.


TEMPERATURE = 0.8


OPTIONS = {
    "gamma": 0.97, "lam": 0.9, "critic_lam": 0.8, "epsilon": 0.02, "epsilon_high": 0.03, "beta": 0.3,
    "policy_loss": {"name": "ppo", "delta": 1.035},
    "kl": {"type": "k1", "place": "reward"}, "entropy_coef": 0.05, "cliprange_value": 0.02, "vf_coef": 0.7,
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


HAND_CRITICS = {
    "copy": PolicyCopyCritic(head_std=0.3),
    "shared": SharedTrunkCritic(head_std=0.3),
    "shared, detached": SharedTrunkCritic(detach=True, head_std=0.3),
    "lora": LoRACritic(r=4, head_std=0.3),
}
KINDS = [*((name, "shared") for name in HAND_CRITICS), ("copy", "repeated")]
CASES = [
    *((cls, *kind, rewards_with_a_gap) for cls in (PPO, GroupPPO) for kind in KINDS),
    *((cls, "copy", "shared", rewards_of_tokens) for cls in (PPO, GroupPPO)),
]
QUICK = [
    *((PPO, *kind, rewards_with_a_gap) for kind in KINDS[1:]),
    (GroupPPO, "copy", "shared", rewards_with_a_gap),
    *CASES[-2:],
]


@pytest.mark.parametrize(("cls", "critic", "sharing", "rewards"), sweep_pairs(CASES, QUICK))
def test_an_update_by_hand(fit, cls, critic, sharing, rewards):
    # The second batch of rollouts is off the reference, and its last update off its own old log-probabilities.
    run = fit(
        cls, steps=6, rewards=rewards, critic=HAND_CRITICS[critic], engine=RaggedEngine(), sharing={"mode": sharing},
        sampling=SamplingConfig(max_new_tokens=12, temperature=TEMPERATURE), trainer={"precision": "64-true"},
        optimizer=OptimizerConfig(learning_rate=4e-3), critic_optimizer=OptimizerConfig(learning_rate=5e-3), **OPTIONS,
    )  # fmt: skip
    threshold = run.buffer.metrics["token_group/threshold"] if cls is GroupPPO else None
    rollout_time, last_update = (Weights(run.module, run.weights, step) for step in (2, 4))
    plain = Plain(run.module, rollout_time, threshold)
    policy_loss, value_loss, clipped = plain.losses(last_update)
    # Each clip is at work, or the test would say less than it should. Few tokens come as far as delta.
    assert clipped["policy"]
    assert clipped["value"]
    assert clipped["delta"] or cls is GroupPPO
    if threshold is not None:
        assert threshold != 4.0  # moved after the first batch of rollouts
        assert max(len(group) for row in plain.groups for group in row) > 1

    metrics = run.steps[-1]
    total = policy_loss + OPTIONS["vf_coef"] * value_loss
    tokens, positions = sum(map(len, plain.values)), sum(map(len, plain.groups))
    assert metrics["loss"] == pytest.approx(float(total), rel=1e-6, abs=1e-7)
    assert metrics["value/loss"] == pytest.approx(float(value_loss), rel=1e-6)
    assert metrics["value/clip_ratio"] == pytest.approx(clipped["value"] / positions)
    assert metrics["clip_ratio/region_mean"] == pytest.approx(clipped["policy"] / tokens)
    assert metrics["clip_ratio/delta_mean"] == pytest.approx(clipped["delta"] / tokens)

    total.backward()
    for prefix, own in (("policy.", last_update.policy), ("critic.", last_update.critic)):
        expected = {prefix + name: p.grad for name, p in own.named_parameters() if p.requires_grad}
        compare_gradients(part(run.gradients[-1], prefix), expected)


# Options.

BASE = {"critic": PolicyCopyCritic(head_std=0.3), "whiten_advantages": False, "gamma": 0.9, "lam": 0.8}


def spread_rewards(completions, **columns):
    return [len(set(text)) / 5 - 0.3 * (len(text) % 2) for text in completions]


@pytest.fixture
def fit_ragged(fit):
    """Some steps on made-up completions, in float64."""

    def run(cls=PPO, trainer=None, **options):
        defaults = {"engine": RaggedEngine(), "rewards": spread_rewards, "sampling": SamplingConfig(max_new_tokens=12)}
        trainer = {"precision": "64-true", **(trainer or {})}
        return fit(cls, trainer=trainer, data={"shuffle": False}, **{**defaults, **BASE, **options})

    return run


def rows(buffer, *names):
    """Each rollout's trained tokens: lists of values by name."""
    lengths = buffer.rollout_lengths.tolist()
    masks = buffer.joined("loss_mask").split(lengths)
    values = {name: buffer.joined(name).split(lengths) for name in names}
    return [{name: own[i][mask].tolist() for name, own in values.items()} for i, mask in enumerate(masks)]


def gae(own, gamma, lam, after=0.0):
    values, result, following = [*own["values"], after], [], 0.0
    for t in reversed(range(len(own["token_rewards"]))):
        delta = own["token_rewards"][t] + gamma * values[t + 1] - values[t]
        following = delta + gamma * lam * following
        result.insert(0, following)
    return result


NAMES = ("token_rewards", "values", "advantages", "returns")


def test_lambdas_and_where_the_reward_goes(fit_ragged):
    for options, lam_of, target_lam in (
        ({}, lambda n: 0.8, 0.8),
        ({"critic_lam": 0.3}, lambda n: 0.8, 0.3),
        ({"lam_alpha": 0.5, "critic_lam": 1.0}, lambda n: max(1 - 1 / (0.5 * n), 0.0), 1.0),
        ({"lam_alpha": 0.5}, lambda n: max(1 - 1 / (0.5 * n), 0.0), 0.8),
    ):
        run = fit_ragged(**options)
        assert any(r.loss_mask and not r.loss_mask[-1] for r in run.rollouts)
        for own, rollout in zip(rows(run.buffer, *NAMES), run.rollouts, strict=True):
            n = len(own["values"])
            if n == 0:
                continue
            assert own["token_rewards"][-1] == pytest.approx(rollout.reward)  # at the last trained token
            assert not any(own["token_rewards"][:-1])
            assert own["advantages"] == pytest.approx(gae(own, 0.9, lam_of(n)))
            targets = [a + v for a, v in zip(gae(own, 0.9, target_lam), own["values"], strict=True)]
            assert own["returns"] == pytest.approx(targets)
    mask = run.buffer.joined("loss_mask")
    values, returns = (run.buffer.joined(name)[mask].double() for name in ("values", "returns"))
    expected = 1 - (returns - values).var(unbiased=False) / returns.var(unbiased=False)
    assert run.steps[0]["value/explained_variance"] == pytest.approx(expected.item(), abs=1e-6)


def test_turns_as_steps(fit_ragged):
    """One advantage per turn; gamma and lambda count turns, and the critic is trained where they begin."""
    run = fit_ragged(advantage_level="turn", critic_lam=0.3, bootstrap_truncated=True)
    buffer, lengths = run.buffer, run.buffer.rollout_lengths.tolist()
    names = ("token_rewards", "values", "advantages", "returns", "value_mask", "loss_mask")
    values = {name: buffer.joined(name).split(lengths) for name in names}
    several = 0
    for index, rollout in enumerate(run.rollouts):
        own = {name: parts[index] for name, parts in values.items()}
        turns = EpisodeRows((rollout,)).turns
        steps = {
            "token_rewards": [own["token_rewards"][first:end].sum().item() for first, end in turns],
            "values": [own["values"][first].item() for first, _ in turns],
        }
        expected, targets = gae(steps, 0.9, 0.8), gae(steps, 0.9, 0.3)
        if rollout.finish_reason == "length":
            continue  # its value after the last token is not kept
        several += len(turns) > 1
        for (first, end), advantage, target in zip(turns, expected, targets, strict=True):
            assert own["advantages"][first:end].tolist() == pytest.approx([advantage] * (end - first), abs=1e-6)
            assert own["returns"][first].item() == pytest.approx(target + own["values"][first].item(), abs=1e-6)
        assert own["value_mask"].nonzero().flatten().tolist() == [first for first, _ in turns]
    assert several


def test_tokens_out_of_the_loss_do_not_cut_a_turn(fit_ragged):
    """Tokens that rejection takes out of the loss leave a gap in the mask, but the turn is still one."""
    options = {"importance_sampling": {"rollout_rs": "token_k1", "rollout_rs_threshold": 1.2}}
    run = fit_ragged(advantage_level="turn", engine=RaggedEngine(logprobs=True), **options)
    assert run.buffer.metrics["sampling/rejected"] > 0
    lengths = run.buffer.rollout_lengths.tolist()
    advantages, mask = (run.buffer.joined(name).split(lengths) for name in ("advantages", "loss_mask"))
    cut = 0
    for index, rollout in enumerate(run.rollouts):
        for first, end in EpisodeRows((rollout,)).turns:
            trained = advantages[index][first:end][mask[index][first:end]]
            assert len(set(trained.tolist())) <= 1
            cut += 0 < len(trained) < end - first
    assert cut


def test_bootstrap_of_truncated_rollouts(fit_ragged):
    without, with_value = (fit_ragged(bootstrap_truncated=on) for on in (False, True))
    cut = [r.finish_reason == "length" for r in without.rollouts]
    assert any(cut)
    pairs = zip(rows(without.buffer, *NAMES), rows(with_value.buffer, *NAMES), cut, strict=True)
    for left, right, truncated in pairs:
        assert left["values"] == pytest.approx(right["values"])
        if not truncated:
            assert left["advantages"] == pytest.approx(right["advantages"])
            continue
        # The last advantage differs by gamma V(after), the ones before by that, discounted by gamma lam per token.
        after = (right["advantages"][-1] - left["advantages"][-1]) / 0.9
        assert abs(after) > 1e-3
        assert right["advantages"] == pytest.approx(gae(right, 0.9, 0.8, after))


def test_whitening(fit_ragged):
    plain, whitened = (fit_ragged(whiten_advantages=on).buffer for on in (False, True))
    mask = plain.joined("loss_mask")
    raw, white = (buffer.joined("advantages")[mask] for buffer in (plain, whitened))
    assert white.mean().item() == pytest.approx(0, abs=1e-9)
    assert white.std().item() == pytest.approx(1, abs=1e-6)
    torch.testing.assert_close(white, (raw - raw.mean()) / (raw.var() + 1e-8).sqrt())
    torch.testing.assert_close(plain.joined("returns"), whitened.joined("returns"))  # the critic's scale stays


def test_value_clipping(fit_ragged):
    options = {"num_iterations": 2, "steps": 2, "optimizer": OptimizerConfig(1e-2)}
    tight, wide, none = (fit_ragged(cliprange_value=limit, **options) for limit in (1e-3, 1e3, None))
    assert tight.steps[1]["value/clip_ratio"] > 0.1
    assert wide.steps[1]["value/clip_ratio"] == none.steps[1]["value/clip_ratio"] == 0
    assert wide.steps[1]["value/loss"] == none.steps[1]["value/loss"]
    assert same(none.gradients[1], wide.gradients[1])
    assert not same(none.gradients[1], tight.gradients[1], "critic")


def test_vf_coef_scales_the_critics_gradient(fit_ragged):
    one, half = fit_ragged(), fit_ragged(vf_coef=0.5)
    for name, gradient in one.gradients[0].items():
        factor = 0.5 if name.startswith("critic") else 1.0
        torch.testing.assert_close(half.gradients[0][name], factor * gradient)
    assert half.steps[0]["value/loss"] == one.steps[0]["value/loss"]


def test_old_scores_and_a_reference_only_where_they_are_needed(fit_ragged):
    for options, old, reference in (
        ({}, False, False),
        ({"num_iterations": 2}, True, False),
        ({"beta": 0.1}, False, True),
        ({"beta": 0.1, "kl": {"place": "reward"}}, True, True),
    ):
        run = fit_ragged(**options)
        assert ("old_logprobs" in run.buffer.tokens) == old
        assert (run.module.reference is not None) == ("kl" in run.steps[0]) == reference
        assert run.steps[0].get("kl", 0) == pytest.approx(0, abs=1e-9)


def test_penalty_in_the_reward(fit_ragged):
    options = {"steps": 2, "optimizer": OptimizerConfig(1e-2)}
    run = fit_ragged(beta=0.2, kl={"type": "k1", "place": "reward"}, **options)
    total, tokens = 0.0, 0
    names = ("token_rewards", "old_logprobs", "ref_logprobs")
    for own, rollout in zip(rows(run.buffer, *names), run.rollouts, strict=True):
        kl = [p - q for p, q in zip(own["old_logprobs"], own["ref_logprobs"], strict=True)]
        expected = [-0.2 * k for k in kl]
        if expected:
            expected[-1] += rollout.reward
        assert own["token_rewards"] == pytest.approx(expected, abs=1e-7)
        total, tokens = total + sum(kl), tokens + len(kl)
    assert abs(total) > 1e-3
    assert run.steps[1]["kl"] == pytest.approx(total / tokens, rel=1e-5)
    assert run.steps[1]["kl_coef"] == pytest.approx(0.2)


@pytest.mark.parametrize("kl_in", sweep(["reward", "loss"], quick=["reward"]))
def test_adaptive_coefficient(fit_ragged, kl_in):
    adaptive = {"beta": 0.1, "kl": {"target": 1e-3, "horizon": 50, "place": kl_in}, "optimizer": OptimizerConfig(1e-2)}
    run = fit_ragged(steps=3, **adaptive)
    first_count, *_, last_count = (
        sum(any(r.loss_mask or r.token_ids) for group in groups for r in group.rollouts) for groups in run.groups
    )
    # Before any update the KL is 0, as far below its target as the controller counts; after it, above it.
    first = 0.1 * (1 - 0.2 * first_count / 50)
    shown = [step["kl_coef"] for step in run.steps]
    if kl_in == "reward":  # the coefficient of the rewards is that of before the move
        assert shown[:2] == pytest.approx([0.1, first])
        assert shown[2] > shown[1]
        assert run.module.beta == pytest.approx(shown[2] * (1 + 0.2 * last_count / 50))
    else:
        assert shown[0] == pytest.approx(first)
        assert shown[0] < shown[1] < shown[2] == run.module.beta


def test_the_penalty_acts(fit_ragged):
    """Policies with a penalty stay nearer to the reference than one without."""

    def distance(**more):
        run = fit_ragged(steps=6, optimizer=OptimizerConfig(5e-3), **more)
        start = run.module.policy_source.load().double()
        pairs = zip(run.module.policy.parameters(), start.parameters(), strict=True)
        return math.sqrt(sum((a - b).square().sum().item() for a, b in pairs))

    free = distance()
    assert distance(beta=30.0) < free
    assert distance(beta=30.0, kl={"place": "reward", "type": "k1"}) != pytest.approx(free, rel=1e-3)


def test_what_is_refused_at_the_start(fit_ragged):
    accumulating = {"num_mini_batches": 2, "trainer": {"accumulate_grad_batches": 2}}
    for options, message in (
        ({"critic": SharedTrunkCritic(), **accumulating}, "accumulate_grad_batches is 2 with a critic"),
        ({"beta": 0.1, "kl": {"target": 0.1, "horizon": 2}}, "kl.horizon is 2 with 4 prompts of 4 rollouts"),
        ({"critic_optimizer": OptimizerConfig(schedule="linear"), "steps": -1}, "the run has no end"),
        ({"importance_sampling": {"mode": "token_mask"}}, "importance_sampling.mode is 'token_mask'"),
        # The critic has the policy's limit, too, so nothing is left to clip.
        ({"optimizer": OptimizerConfig(max_grad_norm=1.0), "trainer": {"gradient_clip_val": 0.5}}, "gradient_clip_val"),
    ):
        with pytest.raises(ValueError, match=message):
            fit_ragged(**options)
    fit_ragged(critic=SharedTrunkCritic(detach=True), **accumulating)


class FlatPPO(PPO):
    """The same on the axis of response tokens."""

    def estimate(self, rows, buffer, scores):
        found = super().estimate(rows, buffer, scores)
        return Estimate(*(None if own is None else from_rows(own, buffer.rollout_lengths) for own in found))


def test_an_estimate_per_token(fit):
    options = {"rewards": rewards_of_tokens, "engine": ScriptedEngine(), "data": {"shuffle": False}}
    buffers = [fit(cls, **options).buffer for cls in (PPO, FlatPPO)]
    for name in ("advantages", "returns", "value_mask"):
        assert torch.equal(*(buffer.joined(name) for buffer in buffers))


# Critics.


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of a causal language model and of a reward model, as transformers writes them."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

    shape = {
        "vocab_size": len(digit_tokenizer()), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("critics")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(folder / "causal")
        model = Qwen3ForSequenceClassification(Qwen3Config(**shape, num_labels=1, pad_token_id=0))
        model.score.weight.data.normal_(std=0.5)
        model.save_pretrained(folder / "classifier")
    return {"causal": str(folder / "causal"), "classifier": str(folder / "classifier"), "head": model.score.weight.data}


@pytest.mark.parametrize(
    ("critic", "num_generations"),
    sweep_pairs(
        itertools.product([*CRITICS, "causal", "classifier"], [1, 4]),
        quick=[("copy", 1), ("shared", 4), ("shared, detached", 1), ("lora", 4), ("causal", 1), ("classifier", 4)],
    ),
)
def test_every_critic_trains(fit, make_module, saved, critic, num_generations):
    source = CRITICS.get(critic) or saved[critic]
    if isinstance(source, str) and num_generations == 4:
        source = PretrainedCritic(source)  # the same as its path
    runs = {}
    for sharing in ("shared", "repeated"):
        module = make_module(
            PPO, critic=source, num_generations=num_generations,
            sharing={"mode": sharing, "verify": sharing == "shared"},
            num_iterations=2, num_mini_batches=2, optimizer=OptimizerConfig(learning_rate=1e-3),
        )  # fmt: skip
        module.configure_model()
        start = weights_of(module)
        runs[sharing] = fit(module=module, steps=5)
        for prefix in ("policy", "critic"):
            moved = part(runs[sharing].weights[-1], prefix)
            assert max((value - start[name]).abs().max() for name, value in moved.items()) > 1e-4, prefix
    if critic == "classifier":  # the head of a reward model becomes the value head
        assert torch.equal(start["critic.head.weight"], saved["head"])
    elif critic == "causal":
        assert start["critic.head.weight"].std() < 0.01
    shared, repeated = runs.values()
    for prefix in ("policy", "critic"):
        # AdamW turns a gradient near 0 into a step of up to the learning rate, so it is the mean that is compared.
        one, other = (torch.cat([v.flatten() for v in part(run.weights[-1], prefix).values()]) for run in runs.values())
        assert (one - other).abs().mean() < 1e-5
    for left, right in zip(shared.steps, repeated.steps, strict=True):
        for name in ("loss", "value/loss", "value/explained_variance", "grad_norm/critic"):
            assert left[name] == pytest.approx(right[name], abs=2e-4, rel=1e-3), name


def test_a_copy_of_the_policy_is_the_default(make_module):
    module = make_module(PPO)
    module.configure_model()
    critic = module.critic
    assert not critic.shares_trunk
    assert same(critic.trunk.parameters(), module.policy.model.parameters())
    module.configure_model()
    assert module.critic is critic


@pytest.mark.parametrize(
    ("cls", "critic", "precision"),
    sweep_pairs(
        itertools.product([PPO, GroupPPO], CRITICS, ["bf16-true", "bf16-mixed"]),
        quick=[
            (PPO, "shared, detached", "bf16-true"),
            (GroupPPO, "shared", "bf16-mixed"),
            (GroupPPO, "lora", "bf16-true"),
        ],
    ),
)
def test_bf16(fit, cls, critic, precision):
    options = {
        "num_iterations": 2,
        "num_mini_batches": 2,
        "beta": 0.1,
        "kl": {"place": "reward"},
        "sharing": {"verify": True},
    }
    run = fit(cls, steps=4, critic=CRITICS[critic], trainer={"precision": precision}, **options)
    assert run.module.policy.dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
    for name in ("advantages", "values", "returns", "old_logprobs"):
        assert run.buffer.tokens[name][0].dtype == torch.float32, name
    for step in run.steps:
        assert math.isfinite(step["loss"])
        assert step["grad_norm/policy"] > 0
        assert step["grad_norm/critic"] > 0


@pytest.mark.parametrize("cls", sweep([PPO, GroupPPO], quick=[GroupPPO]))
def test_sharing_changes_nothing_over_many_updates(fit, cls):
    options = {"critic": CRITICS["copy"], "num_iterations": 2, "num_mini_batches": 2, "beta": 0.05}
    options |= {"optimizer": OptimizerConfig(1e-4), "trainer": {"precision": "64-true"}}
    shared, repeated = (fit(cls, steps=12, sharing={"mode": sharing}, **options) for sharing in ("shared", "repeated"))
    assert shared.steps[-1]["prefix/token_ratio"] > 2
    assert repeated.steps[-1]["prefix/token_ratio"] <= 1
    for left, right in zip(shared.steps, repeated.steps, strict=True):
        for name in ("loss", "value/loss"):
            assert left[name] == pytest.approx(right[name], abs=1e-5, rel=0)


def test_the_critic_learns_a_constant_reward(fit):
    """All rewards 1, gamma and critic_lam 1: every return is 1, whatever the policy does."""
    run = fit(
        PPO, steps=24, rewards=constant(1.0), critic_lam=1.0, cliprange_value=None,
        critic_optimizer=OptimizerConfig(learning_rate=3e-2), optimizer=OptimizerConfig(learning_rate=0.0),
    )  # fmt: skip
    assert run.steps[0]["value/loss"] == pytest.approx(0.5, abs=0.02)  # values near 0: (0 - 1)^2 / 2
    assert run.steps[-1]["value/loss"] < 0.01
    assert "value/explained_variance" not in run.steps[-1]  # nothing varies that could be explained


@pytest.mark.parametrize("cls", [PPO, GroupPPO])
def test_the_policy_learns(fit, cls):
    """Letters are rewarded; a random policy writes about 60 % of them."""
    rewards = [step["reward"] for step in fit(cls, steps=20, num_generations=8).steps]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2


# Policy and critic in one optimizer.


@pytest.mark.parametrize("critic", CRITICS)
def test_every_trained_weight_is_in_one_named_group(fit, critic):
    run = fit(
        PPO, critic=CRITICS[critic], optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=0.1),
        critic_optimizer=OptimizerConfig(learning_rate=1e-2),
    )  # fmt: skip
    module, groups = run.module, {group["name"]: group for group in run.trainer.optimizers[0].param_groups}
    assert {name: group["weight_decay"] for name, group in groups.items()} == {
        "policy": 0.1, "policy_no_decay": 0.0, "critic": 0.0,
    }  # fmt: skip
    listed = [id(p) for group in groups.values() for p in group["params"]]
    assert sorted(listed) == sorted({id(p) for p in module.parameters() if p.requires_grad})
    policy = {id(p) for p in module.policy.parameters()}
    assert {id(p) for name in ("policy", "policy_no_decay") for p in groups[name]["params"]} == policy
    if "shared" in critic:
        assert len(groups["critic"]["params"]) == 2  # weight and bias of the head
    if critic == "lora":  # it follows the policy and leaves it alone
        theirs, tied = dict(module.policy.model.named_parameters()), dict(module.critic.trunk.named_parameters())
        assert module.critic.tied
        for name, source in module.critic.tied.items():
            assert tied[name].data_ptr() == theirs[source].data_ptr()
            assert tied[name].grad is None


def test_rates_and_schedules_are_separate(fit):
    optimizers = {
        "optimizer": OptimizerConfig(learning_rate=1e-3, schedule="linear"),
        "critic_optimizer": OptimizerConfig(learning_rate=4e-3, warmup_steps=3),
    }
    run = fit(PPO, steps=4, **optimizers)
    # What the next step has: a line from 1e-3 down to 0 in 4 steps; 4 steps of warm-up up to 4e-3.
    assert [rates["policy"] for rates in run.rates] == pytest.approx([7.5e-4, 5e-4, 2.5e-4, 0])
    assert [rates["critic"] for rates in run.rates] == pytest.approx([2e-3, 3e-3, 4e-3, 4e-3])
    assert fit(PPO, optimizer=OptimizerConfig(5e-4)).rates == [{"policy": 5e-4, "critic": 5e-4}]


def norm(gradients, prefix):
    return torch.cat([g.flatten() for g in part(gradients, prefix).values()]).norm().item()


@pytest.fixture
def fit_clipped(fit):
    def run(policy=None, critic=None, **trainer):
        return fit(
            PPO, engine=ScriptedEngine(), critic=CRITICS["copy"], optimizer=OptimizerConfig(max_grad_norm=policy),
            critic_optimizer=OptimizerConfig(max_grad_norm=critic), trainer=trainer, data={"shuffle": False},
        )  # fmt: skip

    return run


CLIPS = [
    # policy's own limit, critic's own limit, the trainer's; what the norms may be at most: policy, critic, both
    (1e-3, None, None, (1e-3, None, None)),
    (None, 2e-3, None, (None, 2e-3, None)),
    (1e-3, 2e-3, None, (1e-3, 2e-3, None)),
    (None, None, 3e-3, (None, None, 3e-3)),
    (1e-3, None, 3e-3, (1e-3, 3e-3, None)),
    (None, 2e-3, 3e-3, (3e-3, 2e-3, None)),
]


@pytest.mark.parametrize(("policy", "critic", "trainer", "limits"), CLIPS)
def test_clipping_is_separate(fit_clipped, policy, critic, trainer, limits):
    run = fit_clipped(policy, critic, gradient_clip_val=trainer)
    norms = [norm(run.gradients[0], prefix) for prefix in ("policy", "critic", "")]
    before = [run.steps[0][name] for name in ("grad_norm/policy", "grad_norm/critic", "grad_norm")]
    for after, unclipped, limit in zip(norms[:2], before[:2], limits[:2], strict=True):
        assert unclipped > 5e-3
        if limit is not None:
            assert after == pytest.approx(limit, rel=2e-3)
        elif limits[2] is None:
            assert after == pytest.approx(unclipped, rel=1e-5)
    if limits[2] is not None:
        assert norms[2] == pytest.approx(limits[2], rel=2e-3)
        # Clipped together, the two keep their proportion.
        assert norms[0] / norms[1] == pytest.approx(before[0] / before[1], rel=1e-4)


def test_clipping_by_value_with_a_separate_limit(fit_clipped):
    run = fit_clipped(critic=1e-2, gradient_clip_val=1e-4, gradient_clip_algorithm="value")
    policy, critic = (
        max(g.abs().max() for g in part(run.gradients[0], name).values()) for name in ("policy", "critic")
    )
    assert policy == pytest.approx(1e-4)
    assert critic > 1e-4
    assert norm(run.gradients[0], "critic") == pytest.approx(1e-2, rel=2e-3)


@pytest.mark.parametrize(
    ("cls", "critic"),
    sweep_pairs(
        itertools.product([PPO, GroupPPO], CRITICS),
        quick=[(PPO, "shared"), (PPO, "lora"), (GroupPPO, "copy"), (GroupPPO, "shared, detached")],
    ),
)
def test_critic_warm_up(fit, make_module, cls, critic):
    module = make_module(
        cls, critic=CRITICS[critic], critic_warmup_steps=2, cliprange_value=None, num_mini_batches=2, entropy_coef=0.01,
        optimizer=OptimizerConfig(learning_rate=1e-2, weight_decay=0.1),
    )  # fmt: skip
    module.configure_model()
    start = weights_of(module)
    run = fit(module=module, steps=4)
    weights = [start, *run.weights]
    for step, metrics in enumerate(run.steps):
        assert same(weights[step], weights[step + 1], "policy") == (step < 2), step
        assert not same(weights[step], weights[step + 1], "critic.head" if critic == "lora" else "critic"), step
        assert (metrics["grad_norm/policy"] == 0) == (step < 2)
        assert metrics["grad_norm/critic"] > 0


def test_warm_up_counts_optimizer_steps(fit):
    run = fit(PPO, steps=2, critic_warmup_steps=1, num_mini_batches=2, trainer={"accumulate_grad_batches": 2})
    assert same(run.weights[0], run.weights[1], "policy")
    assert not same(run.weights[1], run.weights[3], "policy")
    assert not same(run.weights[0], run.weights[1], "critic")


def test_warm_up_does_not_change_what_comes_after(fit):
    """The policy's first real step has the moments of a fresh AdamW: the sign of the gradient times the rate."""
    optimizer, trainer = OptimizerConfig(learning_rate=1e-3, eps=1e-30), {"precision": "64-true"}
    run = fit(PPO, steps=3, critic_warmup_steps=2, optimizer=optimizer, trainer=trainer)
    for name, gradient in part(run.gradients[2], "policy").items():
        change = run.weights[2][name] - run.weights[1][name]
        torch.testing.assert_close(change, -1e-3 * gradient.sign(), atol=1e-12, rtol=1e-6)


@pytest.mark.parametrize("critic", sweep(CRITICS, quick=["shared", "lora"]))
def test_an_empty_step_moves_neither(fit, critic):
    """5 prompts in batches of 4: the second batch of rollouts has one group for 3 updates, so two are empty."""
    data, trainer = {"train_size": 5, "drop_last": False}, {"max_steps": -1, "max_epochs": 1}
    optimizer = OptimizerConfig(1e-2, weight_decay=0.1)
    run = fit(PPO, critic=CRITICS[critic], num_mini_batches=3, optimizer=optimizer, data=data, trainer=trainer)
    empty = [step for step in (3, 4, 5) if run.steps[step]["grad_norm"] == 0]
    assert len(empty) == 2
    (full,) = {3, 4, 5} - set(empty)
    assert not same(run.weights[full - 1], run.weights[full], "policy")
    assert not same(run.weights[full - 1], run.weights[full], "critic.head")
    for step in empty:
        assert same(run.weights[step - 1], run.weights[step])
        assert same(run.moments[step - 1], run.moments[step])
