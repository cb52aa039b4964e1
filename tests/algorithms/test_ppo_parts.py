"""Policy and critic in one optimizer: rates, schedules, clipping, critic warm-up, empty and broken steps."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from helpers.scripts import run_script
from helpers.sweeps import sweep

from pl_grouprl.models import PolicyCopyCritic, SharedTrunkCritic
from pl_grouprl.models.critic import LoRACritic

CRITICS = {
    "copy": PolicyCopyCritic(head_std=0.1),
    "shared": SharedTrunkCritic(head_std=0.1),
    "shared, detached": SharedTrunkCritic(detach=True, head_std=0.1),
    "lora": LoRACritic(r=4, head_std=0.1),
}


WARM_UP_SCRIPT = Path(__file__).with_name("warm_up_ranks.py")


def part(weights, prefix):
    return {name: value for name, value in weights.items() if name.startswith(prefix)}


def same(left, right, prefix=""):
    left, right = part(left, prefix), part(right, prefix)
    assert left
    return all(torch.equal(value, right[name]) for name, value in left.items())


TWO_RANKS_QUICK = ("shared", "lora")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What each rank found of a critic; those of the fast tests run together, and so do the others."""

    @functools.cache
    def run(*critics):
        folder = tmp_path_factory.mktemp("warm_up")
        run_script(WARM_UP_SCRIPT, folder, *critics, ranks=2, cwd=folder)
        return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]

    def found(critic):
        quick = critic in TWO_RANKS_QUICK
        return [own[critic] for own in run(*(name for name in CRITICS if (name in TWO_RANKS_QUICK) == quick))]

    return found


@pytest.mark.parametrize("critic", sweep(CRITICS, quick=TWO_RANKS_QUICK))
def test_warm_up_on_two_ranks(two_ranks, critic):
    first, second = two_ranks(critic)
    for left, right in zip(first, second, strict=True):
        assert same(left, right)
    before, warm, after = first
    assert same(before, warm, "policy")
    assert not same(before, warm, "critic")
    assert not same(warm, after, "policy")
    assert not same(warm, after, "critic")
