"""The policy gradient of GROUP PPO in a small MDP, in expectation over all its trajectories, against the true one.

A state is the history of actions; action 0 ends the episode, else it ends after `HORIZON` actions. The policy is a
softmax of its own parameters in each state, the values are exact.
"""

import pytest
import torch

from pl_grouprl.functional.advantages.temporal import generalized_advantages, td_errors, turn_advantages
from pl_grouprl.functional.token_groups import find_token_groups, improbable_token_groups, token_group_advantages

ACTIONS, HORIZON = 3, 5
SETTINGS = [(1.0, 0.6), (0.9, 1.0), (0.9, 0.6), (0.9, 0.0)]  # gamma, lam


class Enumeration:
    """All trajectories with their probabilities, exact values, and the true gradient."""

    def __init__(self, gamma, seed=3):
        generator = torch.Generator().manual_seed(seed)
        histories = [()]
        for history in histories:
            if len(history) < HORIZON - 1:
                histories += [(*history, action) for action in range(1, ACTIONS)]
        self.index = {history: number for number, history in enumerate(histories)}
        shape = (len(histories), ACTIONS)
        self.gamma = gamma
        self.logits = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        self.rewards_SA = torch.randn(shape, generator=generator, dtype=torch.float64)
        value = self.value_of(())
        (self.true_gradient,) = torch.autograd.grad(value, self.logits)
        self.policy = self.logits.detach().softmax(-1)
        self.values_S = torch.stack([self.value_of(history).detach() for history in histories])
        self.lay_out(self.trajectories(()))

    def value_of(self, history):
        """V, differentiable by the logits."""
        if history not in self.index:
            return torch.zeros((), dtype=torch.float64)
        state = self.index[history]
        after = [torch.zeros((), dtype=torch.float64)]
        after += [self.value_of((*history, action)) for action in range(1, ACTIONS)]
        return (self.logits[state].softmax(-1) * (self.rewards_SA[state] + self.gamma * torch.stack(after))).sum()

    def trajectories(self, history):
        if history not in self.index:
            return [()]
        endings = [(0,)]
        endings += [(action, *rest) for action in range(1, ACTIONS) for rest in self.trajectories((*history, action))]
        return endings

    def lay_out(self, trajectories):
        shape = (len(trajectories), HORIZON)
        self.mask = torch.zeros(shape, dtype=torch.bool)
        self.states, self.actions = torch.zeros(2, *shape, dtype=torch.int64).unbind(0)
        for b, actions in enumerate(trajectories):
            for t, action in enumerate(actions):
                self.mask[b, t], self.actions[b, t] = True, action
                self.states[b, t] = self.index[actions[:t]]
        taken = self.policy[self.states, self.actions]
        self.probability = taken.masked_fill(~self.mask, 1).prod(1)
        self.rewards = self.rewards_SA[self.states, self.actions] * self.mask
        self.values = self.values_S[self.states] * self.mask
        self.logprobs = taken.log().where(self.mask, torch.nan)
        self.score_norms = 1 - 2 * taken + self.policy.square().sum(-1)[self.states]
        self.errors = td_errors(self.rewards, self.values, self.mask, gamma=self.gamma)

    def expected_gradient(self, weights):
        """Sum over trajectories and tokens of p * weight * grad ln pi(a_t | s_t), shape [states, actions]."""
        scores = torch.nn.functional.one_hot(self.actions, ACTIONS) - self.policy[self.states]
        terms = (self.probability[:, None] * weights * self.mask)[:, :, None] * scores
        return torch.zeros_like(self.policy).index_add(0, self.states.flatten(), terms.flatten(0, 1))

    def deviation(self, weights):
        """Relative error of the expected gradient."""
        error = self.expected_gradient(weights) - self.true_gradient
        return (error.norm() / self.true_gradient.norm()).item()

    def variance(self, weights):
        """Trace of the covariance of one trajectory's estimate, in units of the squared norm of the true gradient."""
        scores = torch.nn.functional.one_hot(self.actions, ACTIONS) - self.policy[self.states]
        terms, places = (weights * self.mask)[:, :, None] * scores, self.states[:, :, None].expand(-1, -1, ACTIONS)
        single = terms.new_zeros(len(weights), *self.policy.shape).scatter_add(1, places, terms).flatten(1)
        mean = self.expected_gradient(weights).flatten()
        of_squares = (self.probability * single.square().sum(1)).sum()
        return ((of_squares - mean.square().sum()) / self.true_gradient.square().sum()).item()

    def cut(self, signal, threshold=2.0, max_size=16):
        groups = find_token_groups(
            signal, self.score_norms, self.mask, threshold=threshold, max_size=max_size, epsilon=0.0
        )
        assert self.mask.sum() > 1.2 * groups.ends.sum()  # tokens do share advantages
        return groups

    def advantages(self, groups, lam, mode="broadcast"):
        return token_group_advantages(
            self.rewards, self.values, groups, self.mask, gamma=self.gamma, lam=lam, mode=mode
        )[0]

    def discount(self, groups, mode):
        """gamma^t of where the advantage's return begins: at the group's start, or at the token itself.

        The gradient of the discounted return has this factor at each token. PPO and its kin leave it out, whatever
        the estimator; here it is put in, so that there is a true gradient to compare with. It is 1 for gamma = 1.
        """
        own = torch.arange(HORIZON).expand(groups.starts.shape)
        return self.gamma ** (own if mode == "variable_lambda" else start_of(groups)).double()


def start_of(groups):
    """Position at which the group of each token begins."""
    return torch.where(groups.starts, torch.arange(HORIZON), 0).cummax(1).values


def end_of(groups):
    """Position at which the group of each token ends."""
    return torch.where(groups.ends, torch.arange(HORIZON), HORIZON - 1).flip(1).cummin(1).values.flip(1)


@pytest.fixture(scope="module")
def mdp():
    made = {}

    def make(gamma):
        if gamma not in made:
            made[gamma] = Enumeration(gamma)
        return made[gamma]

    return make


def test_the_enumeration_is_complete(mdp):
    world = mdp(0.9)
    assert len(world.probability) == 1 + 2 + 4 + 8 + 16 * 3
    assert world.probability.sum().item() == pytest.approx(1, abs=1e-12)
    discounted = (world.rewards * 0.9 ** torch.arange(HORIZON).double()).sum(1)
    assert (world.probability * discounted).sum().item() == pytest.approx(world.values_S[0].item(), abs=1e-12)


@pytest.mark.parametrize("mode", ["broadcast", "variable_lambda"])
@pytest.mark.parametrize(("gamma", "lam"), SETTINGS)
@pytest.mark.parametrize(("threshold", "max_size"), [(1.5, 16), (2.0, 3), (4.0, 16)])
def test_expected_gradient_is_the_true_one(mdp, mode, gamma, lam, threshold, max_size):
    world = mdp(gamma)
    groups = world.cut(world.errors, threshold, max_size)
    weights = world.advantages(groups, lam, mode) * world.discount(groups, mode)
    torch.testing.assert_close(world.expected_gradient(weights), world.true_gradient, rtol=0, atol=1e-9)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_without_the_discount_outside_each_mode_weighs_tokens_as_it_says(mdp, gamma):
    """What is trained: every token's exact advantage, times gamma^(t - b) in a broadcast group that begins at b."""
    world = mdp(gamma)
    groups = world.cut(world.errors)
    inside = gamma ** (torch.arange(HORIZON) - start_of(groups)).double()
    for mode, factor in (("broadcast", inside), ("variable_lambda", torch.ones_like(inside))):
        expected = world.expected_gradient(world.errors * factor)  # delta with exact V is the advantage in expectation
        actual = world.expected_gradient(world.advantages(groups, 0.6, mode))
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


def wrong_signs(world, weights):
    """Components that clearly point the other way: an action made less likely that ought to become more likely."""
    estimate, true = world.expected_gradient(weights), world.true_gradient
    clear = 0.01 * true.abs().max()
    return int(((estimate * true < 0) & (estimate.abs() > clear) & (true.abs() > clear)).sum())


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_other_baselines_places_and_boundaries_are_biased(mdp, gamma):
    world = mdp(gamma)
    groups = world.cut(world.errors)
    to_baseline = world.values.gather(1, start_of(groups)) - world.values.gather(1, end_of(groups))
    for weights in (world.advantages(groups, 1.0) + to_baseline, world.advantages(groups, 1.0, "endpoint")):
        weights = weights * world.discount(groups, "broadcast")
        assert world.deviation(weights) > 0.3
        assert wrong_signs(world, weights) > 0
    for lam in (0.95, 1.0):  # a boundary that looks ahead; 1 is Monte Carlo
        ahead, _ = generalized_advantages(world.rewards, world.values, world.mask, gamma=gamma, lam=lam)
        groups = world.cut(ahead)
        assert world.deviation(world.advantages(groups, 1.0) * world.discount(groups, "broadcast")) > 0.1
        # The same signal cannot bias groups of one token: nothing is shared.
        single = find_token_groups(ahead, world.score_norms, world.mask, max_size=1)
        assert world.deviation(world.advantages(single, 1.0) * world.discount(single, "broadcast")) < 1e-12


def begun_by(improbable, mask):
    """Groups of which each improbable token is the first, not the last: the end depends on the next action."""
    ends = mask & torch.nn.functional.pad(improbable[:, 1:] | ~mask[:, 1:], (0, 1), value=True)
    return improbable_token_groups(torch.zeros_like(mask, dtype=torch.float64), mask, forced_ends=ends)


@pytest.mark.parametrize("mode", ["broadcast", "variable_lambda"])
@pytest.mark.parametrize(("gamma", "lam"), SETTINGS)
@pytest.mark.parametrize(("probability", "max_size"), [(0.2, None), (0.4, None), (0.2, 2)])
def test_ends_at_improbable_tokens_are_unbiased_and_starts_are_not(mdp, mode, gamma, lam, probability, max_size):
    world = mdp(gamma)
    groups = improbable_token_groups(world.logprobs, world.mask, probability=probability, max_size=max_size)
    assert world.mask.sum() > 1.2 * groups.ends.sum()
    weights = world.advantages(groups, lam, mode) * world.discount(groups, mode)
    torch.testing.assert_close(world.expected_gradient(weights), world.true_gradient, rtol=0, atol=1e-9)
    if max_size is None:
        groups = begun_by(world.logprobs.exp() < probability, world.mask)
        weights = world.advantages(groups, lam, mode) * world.discount(groups, mode)
        # Unbiased only if an end reads no value (a lambda of 1), and a start is nobody else's baseline.
        assert (world.deviation(weights) > 0.02) == ((lam, mode) != (1.0, "variable_lambda"))


@pytest.mark.parametrize("lam", [0.0, 0.6, 1.0])
def test_turns_are_unbiased(mdp, lam):
    """Turns of two tokens: one advantage for both, with exact values where they begin."""
    world = mdp(1.0)
    turns = (torch.arange(HORIZON) // 2).where(world.mask, -1)
    weights, _, _ = turn_advantages(world.rewards, world.values, world.mask, turns, gamma=1.0, lam=lam)
    torch.testing.assert_close(world.expected_gradient(weights), world.true_gradient, rtol=0, atol=1e-9)


def test_both_rules_side_by_side(mdp):
    """Figures of docs/group_ppo.md: `python -m pytest -s -k side_by_side tests/functional/test_group_ppo_mdp.py`."""
    world, found = mdp(1.0), {}
    wrong = torch.randn(len(world.values_S), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = world.values
    for error in (0.0, 0.5):
        world.values = exact + error * wrong[world.states] * world.mask
        errors = td_errors(world.rewards, world.values, world.mask, gamma=1.0)
        every = find_token_groups(errors, world.score_norms, world.mask, max_size=1)
        rules = {
            "every token": every,
            "variance, 2": world.cut(errors, 2.0),
            "variance, 4": world.cut(errors, 4.0),
            "improbable, 0.2": improbable_token_groups(world.logprobs, world.mask),
            "improbable, 0.4": improbable_token_groups(world.logprobs, world.mask, probability=0.4),
            "improbable first, 0.2": begun_by(world.logprobs.exp() < 0.2, world.mask),
        }
        for name, groups in rules.items():
            for mode in ("broadcast", "variable_lambda"):
                weights = world.advantages(groups, 0.6, mode)
                sizes = (world.probability * world.mask.sum(1)).sum() / (world.probability * groups.ends.sum(1)).sum()
                found[name, mode, error] = (world.deviation(weights), world.variance(weights))
                bias, variance = found[name, mode, error]
                print(f"{name:22} {mode:16} {error} {sizes:.2f} {bias:.3f} {variance:.2f}")
    world.values = exact
    for (name, _, error), (deviation, _) in found.items():
        if error == 0:
            assert (deviation < 1e-9) == (name != "improbable first, 0.2")
    assert found["improbable, 0.2", "broadcast", 0.5][0] > 0.01  # groups of any kind bootstrap from wrong values
