"""Which rollouts are trained: groups without spread are replaced, truncated completions are left out."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from helpers.scripts import run_script

"""With so large an eps a step of AdamW is nearly the gradient itself."""


def same(left, right):
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def close(left, right, tolerance=1e-5):
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True)) <= tolerance


SCRIPT = Path(__file__).with_name("dynamic_sampling_ranks.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of one rank, and of two ranks, ended with, by case."""
    results = []
    for devices in (1, 2):
        folder = tmp_path_factory.mktemp(f"dynamic{devices}")
        run_script(SCRIPT, devices, folder, ranks=devices, cwd=folder)
        results.append([torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(devices)])
    return results


def test_ranks_refill_with_the_prompts_of_a_single_one(ranks):
    alone, (first, second) = ranks[0][0]["refill"], (own["refill"] for own in ranks[1])
    # Ranks take turns in the batch: 0 and 2 are of the first rank, 1 and 3, which teach nothing, of the second. Both
    # are drawn anew, one by each rank.
    assert first["calls"][:2] == [2, 1]
    assert second["calls"][:2] == [2, 1]
    kept = first["kept"] + second["kept"]  # groups are dealt to the ranks anew once all are there
    assert {0, 2} <= set(kept)
    assert sorted(kept) == sorted(alone["kept"])
    for own in (first, second):
        for name in ("kept_groups", "generated_groups", "generation_batches"):
            assert own["metrics"][f"dynamic_sampling/{name}"] == alone["metrics"][f"dynamic_sampling/{name}"]
        assert own["metrics"]["rewards/lengths/number"] == alone["metrics"]["rewards/lengths/number"]
    assert same(first["weights"], second["weights"])
    assert close(alone["weights"], first["weights"])


@pytest.mark.parametrize("case", ["one_rank_keeps_none", "batch_scale", "pooled_baseline", "mini_batches"])
def test_a_rank_that_keeps_nothing_changes_nothing(ranks, case):
    (one,), (first, second) = ranks
    assert first[case]["kept"] == [0, 2]
    assert first[case]["metrics"]["dynamic_sampling/kept_groups"] == 2
    assert same(first[case]["weights"], second[case]["weights"])
    assert close(one[case]["weights"], first[case]["weights"])
    for name in ("loss", "grad_norm", "reward", "sampling/importance_sampling_ratio/min"):
        expected = one[case]["metrics"][name]
        if case != "mini_batches" or name == "reward":  # the groups of a mini-batch depend on the ranks
            assert first[case]["metrics"][name] == pytest.approx(expected, abs=1e-5), name


def test_what_one_sampler_reports_is_left_out_on_all_ranks(ranks):
    """Otherwise the ranks would wait for each other with metrics of different numbers."""
    (one,), both = ranks
    assert "sampling/importance_sampling_ratio/min" in one["one_sampler_reports"]["metrics"]
    for own in both:
        assert not any(name.startswith("sampling/") for name in own["one_sampler_reports"]["metrics"])
        assert close(one["one_sampler_reports"]["weights"], own["one_sampler_reports"]["weights"])


def test_no_rank_keeps_anything(ranks):
    for own in ranks[1]:
        case = own["nothing"]
        assert case["metrics"]["dynamic_sampling/kept_groups"] == 0
        assert case["calls"] == [2, 2]
        assert same(case["weights"], case["start"])
        assert all(math.isfinite(value) for value in case["metrics"].values())
