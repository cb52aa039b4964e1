"""Micro-batches, prefix sharing and ranks do not change the gradient of a step: every denominator is the step's."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
import torch
from helpers.scripts import run_script
from helpers.sweeps import sweep_pairs

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


QUICK = ("grpo token-mean", "gspo", "ppo", "group_ppo")


RANKS_QUICK = (*QUICK, NO_ACCUMULATION[0])


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What each rank found in a case; those of the fast tests run together, and so do the others."""

    @functools.cache
    def run(*cases):
        folder = tmp_path_factory.mktemp("ranks")
        run_script(SCRIPT, folder, *cases, ranks=2, cwd=folder, timeout=300)
        return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]

    def found(case, cut):
        quick = case in RANKS_QUICK
        cases = [name for name in (*CASES, NO_ACCUMULATION[0]) if (name in RANKS_QUICK) == quick]
        return [own[case, cut] for own in run(*cases)]

    return found


@pytest.mark.parametrize(
    ("case", "cut"),
    sweep_pairs(
        [(case, cut) for case, cuts in RANK_CUTS.items() for cut in cuts],
        quick=[(case, cut) for case in QUICK for cut in RANK_CUTS[case]],
    ),
)
def test_two_ranks(whole, two_ranks, case, cut):
    # Five prompts: one rank has three of them, the other two, so cut in four each has updates with nothing to train.
    first, second = two_ranks(case, cut)
    compare(first, whole(case, *CASES[case]))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_two_ranks_with_a_trunk_that_both_losses_train(whole, two_ranks):
    name, cls, options = NO_ACCUMULATION
    compare(two_ranks(name, 1)[0], whole(name, cls, options))
