"""Each policy loss against a plain loop over padded matrices, written from the papers' and the peers' formulas.

The flat axis has the tokens of all rollouts in a random order, one rollout is empty, and masked tokens hold junk.
Legend: B rollouts, L padded response length.
"""

import math

import pytest
import torch

from pl_grouprl.functional.kl import kl_estimate
from pl_grouprl.functional.losses import LOSS_AGG_MODES, LOSS_PRESETS, aggregate
from pl_grouprl.functional.policy_loss import POLICY_LOSSES, make_policy_loss

LENGTHS = [7, 3, 0, 1, 5, 6, 2, 4]
B, L, NORM = len(LENGTHS), max(LENGTHS), 11
TOLERANCE = {torch.float32: {"atol": 1e-6, "rtol": 1e-6}, torch.float64: {"atol": 1e-12, "rtol": 1e-12}}


class Batch:
    """Random log-probabilities and advantages per token; two tool tokens are masked inside rollouts."""

    def __init__(self, seed, dtype):
        generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.policy = (-3 * torch.rand(B, L, generator=generator, dtype=dtype)).requires_grad_()
        noise = 0.5 * torch.randn(B, L, generator=generator, dtype=dtype)
        self.old = (self.policy.detach() + noise).clamp(max=-0.01)
        self.advantages = torch.randn(B, L, generator=generator, dtype=dtype)
        self.ref = self.old + 0.3 * torch.randn(B, L, generator=generator, dtype=dtype)
        response = torch.arange(L) < torch.tensor(LENGTHS)[:, None]
        self.mask = response.clone()
        self.mask[4, 2] = self.mask[0, 0] = False
        places = response.nonzero()
        self.places = places[torch.randperm(len(places), generator=generator)]

    def rows(self):
        """Trained positions of each rollout that has one."""
        rows = [[(i, t) for t in range(L) if self.mask[i, t]] for i in range(B)]
        return [row for row in rows if row]

    def tokens(self):
        return [place for row in self.rows() for place in row]

    def flat(self, matrix, junk=None):
        values = matrix[self.places[:, 0], self.places[:, 1]]
        if junk is None:
            return values
        mask = self.flat(self.mask)
        return torch.where(mask, values, torch.full_like(values, junk))

    def ours(self, name, mode, beta=0.0, **options):
        axis = {"mask_N": self.flat(self.mask), "rollout_index_N": self.places[:, 0], "num_rollouts": B}
        arguments = (self.flat(self.policy, 7.0), self.flat(self.old, math.nan), self.flat(self.advantages, math.inf))
        loss = make_policy_loss(name, **options)(*arguments, **axis)
        metrics = {metric: float(total / loss.metric_count) for metric, total in loss.metrics.items()}
        kl = kl_estimate(self.flat(self.policy, 7.0), self.flat(self.ref, 6.0), "k3")
        norm = NORM if mode == "seq-mean-token-sum-norm" else None
        return aggregate(loss.per_token_N + beta * kl, mode=mode, norm=norm, **axis), metrics

    def reduce(self, losses, mode):
        """Aggregate a dictionary of losses by position, as the names of the modes say."""
        if mode == "token-mean":
            return sum(losses.values()) / len(losses)
        divisors = {"seq-mean-token-sum": lambda row: 1, "seq-mean-token-sum-norm": lambda row: NORM}
        each = [sum(losses[place] for place in row) / divisors.get(mode, len)(row) for row in self.rows()]
        return sum(each) / len(each)

    def log_ratio(self, place):
        return self.policy[place] - self.old[place]


def assert_same(batch, ours, theirs):
    torch.testing.assert_close(ours, theirs, **TOLERANCE[batch.dtype])
    gradients = [torch.autograd.grad(value, batch.policy, retain_graph=True)[0] for value in (ours, theirs)]
    torch.testing.assert_close(*gradients, **TOLERANCE[batch.dtype])
    assert gradients[0].abs().sum() > 0


def ppo(batch, ratio, advantage, low, high):
    """The larger of the two losses, the clipped one a constant where the clip acts."""
    if ratio < 1 - low:
        clipped = torch.tensor(1 - low, dtype=batch.dtype)
    elif ratio > 1 + high:
        clipped = torch.tensor(1 + high, dtype=batch.dtype)
    else:
        return -ratio * advantage
    return -clipped * advantage if -clipped * advantage > -ratio * advantage else -ratio * advantage


def oracle_ppo(batch, epsilon, epsilon_high):
    return {p: ppo(batch, batch.log_ratio(p).exp(), batch.advantages[p], epsilon, epsilon_high) for p in batch.tokens()}


def oracle_gspo(batch, epsilon, epsilon_high):
    losses = {}
    for row in batch.rows():
        ratio = torch.exp(sum(batch.log_ratio(p) for p in row) / len(row))
        losses |= {p: ppo(batch, ratio, batch.advantages[p], epsilon, epsilon_high) for p in row}
    return losses


def oracle_gspo_token(batch, epsilon, epsilon_high):
    losses = {}
    for row in batch.rows():
        value = torch.exp(sum(batch.log_ratio(p) for p in row) / len(row)).detach()
        for p in row:
            ratio = value * batch.policy[p].exp() / batch.policy[p].exp().detach()
            losses[p] = ppo(batch, ratio, batch.advantages[p], epsilon, epsilon_high)
    return losses


def oracle_gmpo(batch, epsilon, epsilon_high):
    """The paper's product of ratios to the power of the advantage's sign, as verl takes it: mean advantage outside."""
    losses = {}
    for row in batch.rows():
        product = 1.0
        for p in row:
            sign = float(batch.advantages[p].sign())
            powered = batch.log_ratio(p).exp() ** sign
            bound = math.exp(epsilon_high if sign > 0 else epsilon)
            least = powered if powered < bound else torch.tensor(bound, dtype=batch.dtype)
            product = product * least**sign
        mean_advantage = sum(batch.advantages[p] for p in row) / len(row)
        losses |= dict.fromkeys(row, -mean_advantage * product ** (1 / len(row)))
    return losses


def oracle_cispo(batch, epsilon, epsilon_high):
    weights = {p: min(max(batch.log_ratio(p).exp().item(), 1 - epsilon), 1 + epsilon_high) for p in batch.tokens()}
    return {p: -weight * batch.advantages[p] * batch.policy[p] for p, weight in weights.items()}


def oracle_gpg(batch):
    return {p: -batch.policy[p] * batch.advantages[p] for p in batch.tokens()}


def oracle_sapo(batch, sapo_temperature_pos, sapo_temperature_neg):
    losses = {}
    for p in batch.tokens():
        temperature = sapo_temperature_pos if batch.advantages[p] > 0 else sapo_temperature_neg
        gate = 4 / temperature / (1 + torch.exp(-temperature * (batch.log_ratio(p).exp() - 1)))
        losses[p] = -gate * batch.advantages[p]
    return losses


def covariances(batch):
    tokens = batch.tokens()
    mean_advantage = sum(float(batch.advantages[p]) for p in tokens) / len(tokens)
    mean_logprob = sum(float(batch.policy[p].detach()) for p in tokens) / len(tokens)
    return {
        p: (float(batch.advantages[p]) - mean_advantage) * (float(batch.policy[p].detach()) - mean_logprob)
        for p in tokens
    }


def oracle_dro(batch, dro_beta):
    return {p: -batch.advantages[p] * batch.policy[p] + dro_beta / 2 * batch.log_ratio(p) ** 2 for p in batch.tokens()}


def oracle_clip_cov(batch, epsilon, epsilon_high, clip_cov_ratio, clip_cov_lb, clip_cov_ub):
    """With the ratio 1 every token between the bounds is chosen, so that nothing is left to chance."""
    assert clip_cov_ratio == 1
    losses = oracle_ppo(batch, epsilon, epsilon_high)
    for p, covariance in covariances(batch).items():
        plain = -batch.log_ratio(p).exp() * batch.advantages[p]
        if clip_cov_lb < covariance < clip_cov_ub and losses[p] == plain:
            losses[p] = 0 * plain
    return losses


def oracle_kl_cov(batch, kl_cov_ratio, ppo_kl_coef):
    losses = {p: -batch.log_ratio(p).exp() * batch.advantages[p] for p in batch.tokens()}
    by_size = sorted(covariances(batch).items(), key=lambda item: -item[1])
    for p, _ in by_size[: max(1, int(kl_cov_ratio * len(by_size)))]:
        losses[p] = losses[p] + ppo_kl_coef * batch.log_ratio(p).abs()
    return losses


def oracle_dppo(batch, divergence, epsilon, epsilon_high, clip_ratio_c):
    losses = {}
    for p in batch.tokens():
        new, old = float(batch.policy[p].detach().exp()), float(batch.old[p].exp())
        distance = divergence(new, old)
        out_above = batch.advantages[p] > 0 and new > old and distance > epsilon_high
        out_below = batch.advantages[p] < 0 and new < old and distance > epsilon
        weight = 0.0 if out_above or out_below else min(new / old, clip_ratio_c)
        losses[p] = -weight * batch.advantages[p] * batch.policy[p]
    return losses


def oracle_dppo_tv(batch, **options):
    return oracle_dppo(batch, lambda new, old: abs(new - old), **options)


def oracle_dppo_kl(batch, **options):
    def kl(new, old):
        return old * math.log(old / new) + (1 - old) * math.log((1 - old + 1e-8) / (1 - new + 1e-8))

    return oracle_dppo(batch, kl, **options)


def oracle_vespo(batch, vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg):
    losses = {}
    for row in batch.rows():
        product = math.exp(sum(float(batch.log_ratio(p).detach()) for p in row))
        for p in row:
            positive = batch.advantages[p] >= 0
            k, scale = (vespo_k_pos, vespo_lambda_pos) if positive else (vespo_k_neg, vespo_lambda_neg)
            losses[p] = -(product**k) * math.exp(scale * (1 - product)) * batch.advantages[p] * batch.policy[p]
    return losses


CLIPPING = {"epsilon": 0.2, "epsilon_high": 0.28}
CASES = {
    "ppo": (oracle_ppo, CLIPPING),
    "gspo": (oracle_gspo, {"epsilon": 0.05, "epsilon_high": 0.1}),
    "gspo_token": (oracle_gspo_token, {"epsilon": 0.05, "epsilon_high": 0.1}),
    "gmpo": (oracle_gmpo, {"epsilon": 0.2, "epsilon_high": 0.15}),
    "cispo": (oracle_cispo, CLIPPING),
    "gpg": (oracle_gpg, {}),
    "dro": (oracle_dro, {"dro_beta": 0.7}),
    "sapo": (oracle_sapo, {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.5}),
    "vespo": (
        oracle_vespo,
        {"vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5, "vespo_k_neg": 2.0, "vespo_lambda_neg": 1.2},
    ),
    "clip_cov": (oracle_clip_cov, CLIPPING | {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 0.8}),
    "kl_cov": (oracle_kl_cov, {"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.7}),
    "dppo_tv": (oracle_dppo_tv, {"epsilon": 0.05, "epsilon_high": 0.1, "clip_ratio_c": 1.5}),
    "dppo_kl": (oracle_dppo_kl, {"epsilon": 0.01, "epsilon_high": 0.02, "clip_ratio_c": 1.5}),
}
NO_RATIO = ("gpg", "ratio")
COUNTS_CLIPS = ["ppo", "gspo", "gspo_token", "gmpo", "cispo", "dppo_tv", "dppo_kl"]


def modes_of(name):
    """GMPO has one value per rollout: the oracle's and ours agree under the mean of a rollout's tokens only."""
    return ["seq-mean-token-mean"] if name == "gmpo" else ["token-mean", "seq-mean-token-mean"]


ALL = [(name, mode) for name in CASES for mode in modes_of(name)]


def test_every_loss_has_an_oracle():
    assert set(CASES) == set(POLICY_LOSSES)


@pytest.mark.parametrize(("seed", "dtype"), [(0, torch.float32), (1, torch.float64), (2, torch.float64)])
@pytest.mark.parametrize(("name", "mode"), ALL)
def test_value_and_gradient(name, mode, seed, dtype):
    batch = Batch(seed, dtype)
    oracle, options = CASES[name]
    ours, metrics = batch.ours(name, mode, **options)
    assert_same(batch, ours, batch.reduce(oracle(batch, **options), mode))
    if name in COUNTS_CLIPS:
        assert 0 < metrics["clip_ratio/region_mean"] < 1  # the case is not empty


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_verl_dual_clip(mode):
    batch = Batch(0, torch.float32)
    losses = oracle_ppo(batch, **CLIPPING)
    for p, loss in losses.items():
        if batch.advantages[p] < 0:
            losses[p] = torch.minimum(loss, -1.5 * batch.advantages[p])
    ours, _ = batch.ours("ppo", mode, **CLIPPING, delta=1.5)
    assert_same(batch, ours, batch.reduce(losses, mode))


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "bnpo"])
@pytest.mark.parametrize(("beta", "delta"), [(0.0, None), (0.1, None), (0.1, 1.5)])
def test_trl_loss_types(loss_type, beta, delta):
    """TRL limits the ratio itself by `delta`; its KL term is k3 without limits."""
    batch, losses = Batch(1, torch.float32), {}
    low_count = high_count = 0
    for p in batch.tokens():
        advantage, ratio = batch.advantages[p], batch.log_ratio(p).exp()
        first = ratio if delta is None else ratio.clamp(max=delta)
        gap = batch.ref[p] - batch.policy[p]
        clipped = torch.minimum(first * advantage, ratio.clamp(0.8, 1.28) * advantage)
        losses[p] = -clipped + beta * (gap.exp() - gap - 1)
        low_count += bool(ratio < 0.8 and advantage < 0)
        high_count += bool(ratio > 1.28 and advantage > 0)
    preset, options = LOSS_PRESETS[loss_type], {} if delta is None else {"delta": delta}
    ours, metrics = batch.ours(preset.loss, preset.aggregation, beta, **CLIPPING, **options)
    assert_same(batch, ours, batch.reduce(losses, preset.aggregation))
    counts = {"low": low_count, "high": high_count, "region": low_count + high_count}
    assert counts["region"] > 0
    for name, count in counts.items():
        assert metrics[f"clip_ratio/{name}_mean"] == pytest.approx(count / len(losses))


def test_trl_cispo_has_one_upper_bound():
    batch = Batch(2, torch.float64)
    ours, _ = batch.ours("cispo", LOSS_PRESETS["cispo"].aggregation, epsilon_max=1.3)
    assert_same(batch, ours, batch.reduce(oracle_cispo(batch, 1.0, 0.3), "token-mean"))


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "gmpo"])
def test_one_advantage_per_rollout(name):
    """The case of the papers, where GMPO agrees under a mean over tokens too."""
    batch = Batch(3, torch.float64)
    batch.advantages = batch.advantages[:, 1:2].expand(B, L)
    oracle, options = CASES[name]
    for mode in ("token-mean", "seq-mean-token-mean"):
        ours, _ = batch.ours(name, mode, **options)
        assert_same(batch, ours, batch.reduce(oracle(batch, **options), mode))
    if name != "gmpo":  # the two sequence losses have the same gradient
        ours, _ = batch.ours(name, "token-mean", **options)
        assert_same(batch, ours, batch.reduce(oracle_gspo(batch, **options), "token-mean"))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [(name, wrong) for name in CASES for wrong in ("advantage", "ratio") if (name, wrong) != NO_RATIO],
)
def test_an_error_of_sign_is_noticed(name, wrong):
    """Negative control: the oracle with the sign of one input turned around does not agree, in value or gradient."""
    batch = Batch(0, torch.float64)
    oracle, options = CASES[name]
    ours, _ = batch.ours(name, "seq-mean-token-mean", **options)
    if wrong == "advantage":
        batch.advantages = -batch.advantages
    else:
        batch.old = (2 * batch.policy.detach() - batch.old).clamp(max=-0.01)
    with pytest.raises(AssertionError):
        assert_same(batch, ours, batch.reduce(oracle(batch, **options), "seq-mean-token-mean"))
