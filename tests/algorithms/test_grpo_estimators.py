"""Every advantage estimator through GRPO: what stands in the buffer is what the pure function gives."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from helpers.scripts import run_script
from helpers.sweeps import sweep

ROLLOUT_LEVEL = ("grpo", "rloo", "opo", "grpo_passk", "remax")


TOKEN_LEVEL = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")


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
            {"beta": 0.1, "kl_in": "reward", "multi_objective_aggregation": "normalize_then_sum"},
            "kl_in='reward' takes one reward",
        ),
        ({"num_generations": 1, "advantage_estimator": "reinforce_plus_plus_baseline"}, "num_generations is 1; rei"),
        ({"num_generations": 1, "advantage_estimator": "opo"}, "num_generations is 1; opo compares"),
    ],
)
def test_refused(make_module, options, message):
    with pytest.raises(ValueError, match=message):
        make_module(**options)


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
