"""Micro-batches, prefix sharing and ranks do not change the gradient of a step: every denominator is the step's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from helpers.scripts import run_script

SCRIPT = Path(__file__).with_name("denominator_cases.py")
sys.path.insert(0, str(SCRIPT.parent))

from denominator_cases import CASES, NO_ACCUMULATION, RANK_CUTS, gradients_of_a_step  # noqa: E402

WHOLE: dict = {}


@pytest.fixture
def whole(tmp_path):
    """The gradient of one mini-batch on one rank."""

    def compute(name, cls, options):
        if name not in WHOLE:
            WHOLE[name] = gradients_of_a_step(cls, options, folder=tmp_path)
        return WHOLE[name]

    return compute


def compare(actual, expected, tolerance=1e-6):
    """The largest difference, relative to the largest gradient of the part: policy or critic."""
    assert actual.keys() == expected.keys()
    for part in {name.split(".")[0] for name in expected}:
        names = [name for name in expected if name.startswith(part)]
        scale = max(expected[name].abs().max().item() for name in names)
        assert scale > 1e-4, part
        worst = max((actual[name] - expected[name]).abs().max().item() for name in names)
        assert expected[names[0]].dtype == torch.float64
        assert worst <= tolerance * scale, (part, worst / scale)


# Prompts have 20 tokens and groups up to 34 of rollouts: 70 takes a group or two at once, 24 splits the larger ones.
QUICK = ("grpo token-mean", "dr_grpo", "ppo", "group_ppo")
BUDGETS = [
    pytest.param(name, *cut, marks=() if cut == (24, "shared") or name in QUICK else pytest.mark.slow)
    for name in [*CASES, NO_ACCUMULATION[0]]
    for cut in [(70, "shared"), (24, "shared"), (70, "repeated")]
]


@pytest.mark.parametrize(("name", "budget", "sharing"), BUDGETS)
def test_a_token_budget_does_not_change_the_gradient(whole, name, budget, sharing, tmp_path):
    cls, options = CASES[name] if name in CASES else NO_ACCUMULATION[1:]
    cut = options | {"max_tokens_per_micro_batch": budget}
    found = gradients_of_a_step(cls, cut, sharing=sharing, folder=tmp_path)
    compare(found, whole(name, cls, options), 1e-6 if sharing == "shared" else 1e-5)


@pytest.mark.parametrize("budget", [70, 24])
@pytest.mark.parametrize("name", ["grpo token-mean", "ppo", "group_ppo"])
def test_a_token_budget_together_with_accumulation(whole, name, budget, tmp_path):
    cls, options = CASES[name]
    cut = options | {"max_tokens_per_micro_batch": budget}
    compare(gradients_of_a_step(cls, cut, cut=2, folder=tmp_path), whole(name, cls, options))


@pytest.mark.parametrize(("cut", "sharing"), [(4, "shared"), (2, "repeated")])
@pytest.mark.parametrize("case", CASES)
def test_micro_batches_and_sharing(whole, tmp_path, case, cut, sharing):
    cls, options = CASES[case]
    actual = gradients_of_a_step(cls, options, cut=cut, sharing=sharing, folder=tmp_path)
    compare(actual, whole(case, cls, options))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_script(SCRIPT, folder, ranks=2, cwd=folder, timeout=300)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize(("case", "cut"), [(case, cut) for case, cuts in RANK_CUTS.items() for cut in cuts])
def test_two_ranks(whole, two_ranks, case, cut):
    # Five prompts: one rank has three of them, the other two, so cut in four each has updates with nothing to train.
    first, second = (found[case, cut] for found in two_ranks)
    compare(first, whole(case, *CASES[case]))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_two_ranks_with_a_trunk_that_both_losses_train(whole, two_ranks):
    name, cls, options = NO_ACCUMULATION
    compare(two_ranks[0][name, 1], whole(name, cls, options))
