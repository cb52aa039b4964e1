"""Every advantage estimator through GRPO: what stands in the buffer is what the pure function gives."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest
import torch
from helpers.branching_engine import BranchingEngine
from helpers.episodes import make_episode, make_group
from helpers.rollouts import per_rollout_means
from helpers.scripts import run_script
from helpers.sweeps import sweep

from pl_grouprl.algorithms import OptimizerConfig
from pl_grouprl.attention import shared_prefix
from pl_grouprl.functional import advantages as functions
from pl_grouprl.functional.kl import kl_estimate
from pl_grouprl.functional.masked import from_rows, to_rows
from pl_grouprl.rewards import Weighted
from pl_grouprl.types import Rollout

ROLLOUT_LEVEL = ("grpo", "rloo", "opo", "grpo_passk", "remax")
TOKEN_LEVEL = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")


class Engine:
    """Scripted completions; a greedy one has its own script and is asked for once per prompt."""

    def __init__(self):
        self.calls = []

    def bind(self, model, tokenizer=None):
        pass

    def generate(self, prompts, sampling, *, num_generations, seed):
        self.calls.append((sampling.temperature, num_generations, len(prompts)))
        shift = 0 if sampling.temperature else 100
        return [[self._rollout(sum(prompt) + 7 * g + shift) for g in range(num_generations)] for prompt in prompts]

    @staticmethod
    def _rollout(number):
        length = number % 6
        return Rollout([2 + (number + 3 * i) % 20 for i in range(length)], finish_reason="stop")


def some_rewards(completions, **columns):
    """Letters of a completion; those of four characters have no reward."""
    return [None if len(text) == 4 else float(sum(c.isalpha() for c in text)) for text in completions]


def length_reward(completions, **columns):
    return [None if len(text) < 2 else float(len(text)) for text in completions]


def rollouts_of(buffer):
    return [rollout for group in buffer.groups for rollout in group.rollouts]


def rewards_of(buffer):
    return torch.tensor([math.nan if r.reward is None else r.reward for r in rollouts_of(buffer)])


def group_ids_of(buffer):
    return torch.tensor([index for index, group in enumerate(buffer.groups) for _ in group.rollouts])


def greedy_rewards(buffer):
    """Rewards of the greedy script, worked out again."""
    greedy = [Engine._rollout(sum(group.prompt_ids) + 100) for group in buffer.groups for _ in group.rollouts]
    texts = ["".join("0" if i < 12 else "a" for i in rollout.token_ids) for rollout in greedy]
    return torch.tensor([math.nan if r is None else r for r in some_rewards(texts)])


def pure_rollout_advantages(name, rewards_B, buffer):
    ids_B = group_ids_of(buffer)
    if name == "remax":
        return functions.remax_advantages(rewards_B, greedy_rewards(buffer))
    if name == "opo":
        return functions.opo_advantages(rewards_B, ids_B, buffer.rollout_lengths)
    names = {"grpo": "group_relative_advantages", "rloo": "rloo_advantages", "grpo_passk": "grpo_passk_advantages"}
    return getattr(functions, names[name])(rewards_B, ids_B)


def assert_per_rollout(buffer, advantages_B):
    expected_N = advantages_B.repeat_interleave(buffer.rollout_lengths)
    torch.testing.assert_close(buffer.joined("advantages"), expected_N, rtol=0, atol=1e-6)


@pytest.fixture
def step(make_module, make_data, make_trainer):
    """One step; a reference that is not the policy where there is one."""

    def run(engine=None, rewards=some_rewards, **options):
        module = make_module(engine=engine or Engine(), rewards=rewards, **options)
        module.configure_model()
        if module.reference is not None:
            generator = torch.Generator().manual_seed(3)
            with torch.no_grad():
                for parameter in module.reference.parameters():
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        make_trainer(max_steps=1).fit(module, make_data())
        return module

    return run


@pytest.mark.parametrize("name", ROLLOUT_LEVEL)
def test_rollout_level(step, name):
    buffer = step(advantage_estimator=name).last_rollouts
    rewards_B = rewards_of(buffer)
    assert rewards_B.isnan().any()
    expected_B = pure_rollout_advantages(name, rewards_B, buffer)
    assert expected_B.abs().max() > 0.1
    assert not expected_B[rewards_B.isnan()].any()
    assert_per_rollout(buffer, expected_B)


def test_remax_samples_one_greedy_rollout_per_prompt(step):
    engine = Engine()
    module = step(engine, advantage_estimator="remax", num_generations=1)
    assert engine.calls == [(1.0, 1, 4), (0.0, 1, 4)]
    assert rewards_of(module.last_rollouts).tolist() != greedy_rewards(module.last_rollouts).tolist()


def test_the_other_estimators_sample_no_greedy_rollout(step):
    engine = Engine()
    step(engine, advantage_estimator="rloo")
    assert engine.calls == [(1.0, 4, 4)]


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_reinforce_plus_plus(step, gamma):
    options = {} if gamma == 1 else {"advantage_options": {"gamma": gamma}}
    buffer = step(advantage_estimator="reinforce_plus_plus", **options).last_rollouts
    # Reward-to-go by a plain loop: the reward counts gamma^k at k tokens before the last one.
    returns, trained = [], []
    for rollout in rollouts_of(buffer):
        length = len(rollout.token_ids)
        returns += [(rollout.reward or 0.0) * gamma ** (length - 1 - t) for t in range(length)]
        trained += [rollout.reward is not None] * length
    returns_N, trained_N = torch.tensor(returns), torch.tensor(trained)
    whitened_N = (returns_N - returns_N[trained_N].mean()) / (returns_N[trained_N].std() + 1e-8)
    torch.testing.assert_close(buffer.joined("advantages"), whitened_N.masked_fill(~trained_N, 0), rtol=0, atol=1e-5)


def test_reinforce_plus_plus_baseline(step):
    # The group's mean is that of all rollouts with a reward: those without one, and those without a token, are known
    # from the rewards of the rollouts alone.
    buffer = step(advantage_estimator="reinforce_plus_plus_baseline").last_rollouts
    lengths_B = buffer.rollout_lengths
    assert (lengths_B == 0).any()
    mask_BT = to_rows(buffer.joined("loss_mask"), lengths_B)
    expected_BT = functions.reinforce_plus_plus_baseline_advantages(rewards_of(buffer), group_ids_of(buffer), mask_BT)
    torch.testing.assert_close(buffer.joined("advantages"), from_rows(expected_BT, lengths_B), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kl_type", ["k1", "k3"])
@pytest.mark.parametrize("name", ROLLOUT_LEVEL)
def test_kl_in_the_reward_of_rollouts(step, name, kl_type):
    module = step(advantage_estimator=name, beta=0.5, kl={"place": "reward", "type": kl_type})
    buffer = module.last_rollouts
    kl_N = kl_estimate(buffer.joined("old_logprobs"), buffer.joined("ref_logprobs"), kl_type)
    kl_N = kl_N.masked_fill(~buffer.joined("loss_mask"), 0)
    assert kl_N.abs().max() > 0.01
    penalty_B = torch.stack([part.sum() for part in kl_N.split(buffer.rollout_lengths.tolist())])
    assert_per_rollout(buffer, pure_rollout_advantages(name, rewards_of(buffer) - 0.5 * penalty_B, buffer))
    mean = kl_N.sum() / buffer.joined("loss_mask").sum()
    assert buffer.metrics["kl"] == pytest.approx(mean.item(), rel=1e-5)
    assert buffer.metrics["kl_coef"] == 0.5
    # The rewards themselves, and what is logged of them, stay free of the penalty.
    assert rewards_of(buffer)[~rewards_of(buffer).isnan()].frac().abs().max() == 0


def test_kl_in_the_reward_of_tokens(step):
    options = {"beta": 0.5, "kl": {"place": "reward", "type": "k1"}, "advantage_options": {"gamma": 0.9}}
    buffer = step(advantage_estimator="reinforce_plus_plus", **options).last_rollouts
    kl_N = kl_estimate(buffer.joined("old_logprobs"), buffer.joined("ref_logprobs"), "k1")
    returns, trained = [], []
    for rollout, kl in zip(rollouts_of(buffer), kl_N.split(buffer.rollout_lengths.tolist()), strict=True):
        to_go, own = rollout.reward or 0.0, []
        for t in reversed(range(len(kl))):
            to_go = (to_go if t == len(kl) - 1 else 0.9 * to_go) - 0.5 * kl[t].item()
            own.append(to_go)
        returns += own[::-1]
        trained += [rollout.reward is not None] * len(kl)
    returns_N, trained_N = torch.tensor(returns), torch.tensor(trained)
    whitened_N = (returns_N - returns_N[trained_N].mean()) / (returns_N[trained_N].std() + 1e-8)
    torch.testing.assert_close(buffer.joined("advantages"), whitened_N.masked_fill(~trained_N, 0), rtol=0, atol=1e-4)


def test_kl_in_the_reward_of_the_baseline_estimator(step):
    options = {"beta": 0.5, "kl": {"place": "reward", "type": "k1"}}
    buffer = step(advantage_estimator="reinforce_plus_plus_baseline", **options).last_rollouts
    lengths_B = buffer.rollout_lengths
    mask_N = buffer.joined("loss_mask")
    kl_N = kl_estimate(buffer.joined("old_logprobs"), buffer.joined("ref_logprobs"), "k1").masked_fill(~mask_N, 0)
    penalty_B = torch.stack([part.sum() for part in kl_N.split(lengths_B.tolist())])
    expected_BT = functions.reinforce_plus_plus_baseline_advantages(
        rewards_of(buffer) - 0.5 * penalty_B, group_ids_of(buffer), to_rows(mask_N, lengths_B)
    )
    torch.testing.assert_close(buffer.joined("advantages"), from_rows(expected_BT, lengths_B), rtol=0, atol=1e-5)


SEVERAL = [
    Weighted(some_rewards, weight=1.0, name="some"),
    Weighted(length_reward, weight=2.0, name="length"),
    Weighted(lambda completions, **columns: [float(len(text) % 2) for text in completions], weight=0.0, name="logged"),
]


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_several_rewards(step, aggregation):
    buffer = step(rewards=SEVERAL, multi_objective_aggregation=aggregation).last_rollouts
    ids_B, rollouts = group_ids_of(buffer), rollouts_of(buffer)
    columns = {
        name: torch.tensor([math.nan if r.rewards[name] is None else r.rewards[name] for r in rollouts])
        for name in ("some", "length", "logged")
    }
    assert columns["some"].isnan().any()
    assert columns["length"].isnan().any()
    if aggregation == "sum_then_normalize":
        nothing_B = columns["some"].isnan() & columns["length"].isnan()
        total_B = columns["some"].nan_to_num() + 2 * columns["length"].nan_to_num()
        expected_B = functions.group_relative_advantages(total_B.masked_fill(nothing_B, math.nan), ids_B)
        torch.testing.assert_close(rewards_of(buffer), total_B.masked_fill(nothing_B, math.nan), equal_nan=True)
    else:
        separate = {name: functions.group_relative_advantages(own, ids_B) for name, own in columns.items()}
        total_B = separate["some"] + 2 * separate["length"]  # the weight 0 leaves the third out
        trained_B = ~rewards_of(buffer).isnan()
        centred_B = total_B - total_B[trained_B].mean()
        credited_B = torch.tensor([bool(total_B[ids_B == group].any()) for group in ids_B])
        expected_B = (centred_B / (total_B[trained_B].std() + 1e-6)).masked_fill(~trained_B | ~credited_B, 0)
    assert expected_B.abs().max() > 0.5
    torch.testing.assert_close(
        buffer.joined("advantages"), expected_B.repeat_interleave(buffer.rollout_lengths), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("name", ["remax", "opo"])
def test_several_rewards_normalized_first_with_other_estimators(step, name):
    options = {"advantage_estimator": name, "multi_objective_aggregation": "normalize_then_sum"}
    buffer = step(rewards=[Weighted(some_rewards, 3.0)], **options).last_rollouts
    single_B = pure_rollout_advantages(name, rewards_of(buffer) / 3, buffer)
    trained_B = ~rewards_of(buffer).isnan()
    advantages = per_rollout_means(buffer, "advantages")
    flat = torch.tensor([value for own in advantages for value in own])
    shown_B = trained_B & (buffer.rollout_lengths > 0)
    expected_B = (3 * single_B - 3 * single_B[trained_B].mean()) / (3 * single_B[trained_B].std() + 1e-6)
    credited_B = torch.tensor([bool(single_B[group_ids_of(buffer) == g].any()) for g in group_ids_of(buffer)])
    torch.testing.assert_close(flat[shown_B & credited_B], expected_B[shown_B & credited_B], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantage_options": {"gamma": 0.5}}, "advantage_estimator='grpo' does not use gamma"),
        ({"advantage_estimator": "remax", "scale_rewards": "group"}, "does not use scale"),
        (
            {"multi_objective_aggregation": "sum"},
            "multi_objective_aggregation is 'sum'",
        ),
        (
            {"advantage_estimator": "reinforce_plus_plus", "multi_objective_aggregation": "normalize_then_sum"},
            "advantage_estimator='reinforce_plus_plus' takes one reward",
        ),
        (
            {"beta": 0.1, "kl": {"place": "reward"}, "multi_objective_aggregation": "normalize_then_sum"},
            "kl.place='reward' takes one reward",
        ),
        ({"num_generations": 1, "advantage_estimator": "reinforce_plus_plus_baseline"}, "num_generations is 1; rei"),
        ({"num_generations": 1, "advantage_estimator": "opo"}, "num_generations is 1; opo compares"),
    ],
)
def test_refused(make_module, options, message):
    with pytest.raises(ValueError, match=message):
        make_module(**options)


def test_compute_advantages_by_itself(step):
    module = step(advantage_estimator="grpo", scale_rewards="none")
    buffer = module.last_rollouts
    expected_B = functions.group_relative_advantages(rewards_of(buffer), group_ids_of(buffer), scale="none")
    torch.testing.assert_close(module.compute_advantages(buffer.groups), expected_B)


@pytest.mark.parametrize("name", ["tree", "vine"])
def test_branched_rollouts(step, name):
    buffer = step(BranchingEngine(Engine()), advantage_estimator=name, loss_agg_mode="seq-mean-token-sum").last_rollouts
    rollouts = rollouts_of(buffer)
    branches = functions.BranchPaths([r.branch_points for r in rollouts], [r.branch_path for r in rollouts])
    mask_BT = to_rows(buffer.joined("loss_mask"), buffer.rollout_lengths)
    estimator = functions.make_advantage_estimator(name)
    expected_BT = estimator(rewards_of(buffer), group_ids_of(buffer), mask=mask_BT, branches=branches)
    expected_N = from_rows(expected_BT, buffer.rollout_lengths)
    torch.testing.assert_close(buffer.joined("advantages"), expected_N)
    assert any(len(set(own.tolist())) > 1 for own in expected_N.split(buffer.rollout_lengths.tolist()))


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_optimal_token_baseline(step, make_module, name):
    """The norms are those of the policy before the update, from a forward that is made for them."""
    module = step(advantage_estimator=name, optimizer=OptimizerConfig(learning_rate=0.0))
    buffer = module.last_rollouts
    assert torch.isfinite(buffer.joined("old_logprobs")).all()
    with shared_prefix(module.policy):
        norms_N = module.score_rollouts(module.policy, buffer, score_norm=True).score_norm_N
    rewards, norms, mask = (
        to_rows(values_N, buffer.rollout_lengths)
        for values_N in (buffer.joined("token_rewards"), norms_N, buffer.joined("loss_mask"))
    )
    found = functions.make_advantage_estimator(name)(rewards, group_ids_of(buffer), mask=mask, score_norms=norms)
    assert found.abs().max() > 0.1
    torch.testing.assert_close(buffer.joined("advantages"), from_rows(found, buffer.rollout_lengths))


def test_tree_refuses_what_belongs_to_whole_rollouts(step, make_module):
    with pytest.raises(ValueError, match=r"a reward function returned a reward per token, .*'tree'"):
        step(rewards=lambda completion_ids, **columns: [[1.0] * len(ids) for ids in completion_ids],
             advantage_estimator="tree")  # fmt: skip
    with pytest.raises(ValueError, match="advantage_estimator='vine' takes one reward"):
        make_module(advantage_estimator="vine", multi_objective_aggregation="normalize_then_sum")


# Two ranks.

SCRIPT = Path(__file__).with_name("estimator_ranks.py")

WITH_ADVANTAGES = (
    *(*ROLLOUT_LEVEL, *TOKEN_LEVEL, "process", "process_reinforce", "tree", "vine", "gpg"),
    *("optimal_token_baseline", "batch", "normalize_then_sum", "kl", "token_kl"),
)
WITH_METRICS = ("token_truncate", "sequence_mask", "kl", "token_kl", "adaptive", "tree")
REFUSED = {
    "of_rollouts": "a reward function returned a reward per token",
    "of_tokens": "a reward function returned a reward per token",
    "of_branches": "share the first numbers of branch_path, (0,), but not the tokens from 0 to 2",
}
QUICK = {
    *("grpo", "remax", *TOKEN_LEVEL, "process", "tree", "vine", "optimal_token_baseline", "batch"),
    *("normalize_then_sum", "token_kl", "sequence_mask", "adaptive", "of_rollouts", "of_branches"),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What one rank and two ranks put into their buffers in a case, by prompt.

    The cases of the fast tests run together, and so do the others.
    """

    @functools.cache
    def run(*cases):
        results = []
        for devices in (1, 2):
            folder = tmp_path_factory.mktemp(f"ranks{devices}")
            run_script(SCRIPT, devices, folder, *cases, ranks=devices, cwd=folder)
            results.append([torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(devices)])
        return results

    def found(case):
        names = dict.fromkeys((*WITH_ADVANTAGES, *WITH_METRICS, *REFUSED))
        cases = [name for name in names if (name in QUICK) == (case in QUICK)]
        return [[own[case] for own in ranks] for ranks in run(*cases)]

    return found


@pytest.mark.parametrize("case", sweep(WITH_ADVANTAGES, QUICK.intersection(WITH_ADVANTAGES)))
def test_two_ranks_have_the_advantages_of_one(ranks, case):
    (one,), two = ranks(case)
    merged = {**two[0]["advantages"], **two[1]["advantages"]}
    assert sorted(len(own["advantages"]) for own in two) == [2, 3]  # dealt to the ranks after the rollouts
    assert merged.keys() == one["advantages"].keys()
    for prompt, advantages in one["advantages"].items():
        assert merged[prompt] == pytest.approx(advantages, abs=2e-5), prompt
    assert any(abs(value) > 0.1 for own in one["advantages"].values() for value in own)


@pytest.mark.parametrize("case", sweep(REFUSED, QUICK.intersection(REFUSED)))
def test_all_ranks_refuse_what_one_rank_has(ranks, case):
    messages = [own for results in ranks(case) for own in results]
    assert len(messages) == 3
    assert all(REFUSED[case] in message for message in messages)


@pytest.mark.parametrize("case", sweep(WITH_METRICS, QUICK.intersection(WITH_METRICS)))
def test_two_ranks_log_what_one_logs(ranks, case):
    (one,), two = ranks(case)
    names = [name for name in one["metrics"] if name.startswith(("sampling/", "kl", "loss"))]
    assert len(names) > 2
    for rank in (0, 1):
        for name in names:
            assert two[rank]["metrics"][name] == pytest.approx(one["metrics"][name], abs=1e-5), name
        assert two[rank]["beta"] == pytest.approx(one["beta"], rel=1e-6)


def test_opo_weighs_episodes_by_what_the_model_wrote(make_module):
    module = make_module(advantage_estimator="opo")
    group = make_group(make_episode(observation=3, reward=1.0), Rollout([1, 2], reward=0.0))
    # 4 of 9 tokens and 2 of 2: the baseline is (4 * 1 + 2 * 0) / 6.
    assert module.compute_advantages([group]).tolist() == pytest.approx([1 / 3, -2 / 3])
