"""Several ranks do what one does: steps of each algorithm, whole runs, engines with weights of their own, failures."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import pytest
import torch
from helpers import rank_cases
from helpers.rank_cases import CASES, CRITICS, DYNAMIC, ESTIMATORS, REFUSED, result_of
from helpers.scripts import run_script
from helpers.sweeps import sweep
from helpers.tiny_runs import compare_gradients, largest_difference, same

FORKED = Path(__file__).with_name("forked_ranks.py")

# Five prompts: one rank has three of them, the other two, so cut in four each has updates with nothing to train.
STEPS = {f"step:{name}:{cut}" for name in CASES for cut in ((1,) if name == "ppo shared" else (1, 4))} - {
    f"step:{name}:1" for name in CASES if name not in ("grpo token-mean", "ppo", "group_ppo", "ppo shared")
}
ROWS = {f"rows:{name}" for name in ("grpo seq-mean-token-mean", "grpo process supervision", "ppo seq-mean-token-mean")}
QUICK = {
    *("step:grpo token-mean:4", "step:gspo:4", "step:ppo:1", "step:ppo:4", "step:group_ppo:4", "step:ppo shared:1"),
    *("estimator:grpo", "estimator:remax", "estimator:reinforce_plus_plus", "estimator:reinforce_plus_plus_baseline"),
    *("estimator:process", "estimator:tree", "estimator:vine", "estimator:optimal_token_baseline", "estimator:batch"),
    *("estimator:normalize_then_sum", "estimator:token_kl", "estimator:sequence_mask", "estimator:adaptive"),
    *("refused:of_rollouts", "refused:of_branches", "warm_up:shared", "warm_up:lora"),
    *(f"dynamic:{name}" for name in DYNAMIC),
    *("run:plain", "run:plain:1", "run:sequence parallel", "run:distilled"),
}
ALL = {
    *STEPS, *ROWS, *QUICK, *(f"estimator:{name}" for name in ESTIMATORS), *(f"refused:{name}" for name in REFUSED),
    *(f"warm_up:{name}" for name in CRITICS),
}  # fmt: skip


def cases(kind):
    names = sorted(name for name in ALL if name.startswith(kind))
    return sweep(names, quick=QUICK.intersection(names))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """What one rank had in a case."""
    return functools.cache(lambda case: result_of(case, tmp_path_factory.mktemp("one")))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What each of two ranks had in a case; those of the fast tests run together, and so do the others."""

    @functools.cache
    def run(names):
        folder = tmp_path_factory.mktemp("two")
        run_script(rank_cases.__file__, 2, folder, *sorted(names), ranks=2, cwd=folder, timeout=600)
        return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]

    def found(case):
        return [own[case] for own in run(frozenset(QUICK if case in QUICK else ALL - QUICK))]

    return found


@pytest.mark.parametrize("case", cases("step"))
def test_gradients_of_a_step(one, two, case):
    first, second = (own["gradients"] for own in two(case))
    compare_gradients(first, one(case.rpartition(":")[0] + ":1")["gradients"])
    assert same(first, second)


@pytest.mark.parametrize("case", cases("rows"))
def test_rows_of_episodes(one, two, case):
    for found in two(case):
        compare_gradients(found["gradients"], one(case)["gradients"])


@pytest.mark.parametrize("case", cases("estimator"))
def test_advantages_and_metrics(one, two, case):
    alone, both = one(case), two(case)
    merged = {**both[0]["advantages"], **both[1]["advantages"]}
    assert sorted(len(own["advantages"]) for own in both) == [2, 3]  # dealt to the ranks after the rollouts
    assert merged.keys() == alone["advantages"].keys()
    for prompt, advantages in alone["advantages"].items():
        assert merged[prompt] == pytest.approx(advantages, abs=2e-5), prompt
    assert any(abs(value) > 0.1 for own in alone["advantages"].values() for value in own)
    names = [name for name in alone["metrics"] if name.startswith(("sampling/", "kl", "loss"))]
    assert len(names) > 2
    for own in both:
        found = {name: own["metrics"][name] for name in names}
        assert found == pytest.approx({name: alone["metrics"][name] for name in names}, abs=1e-5)
        assert own["beta"] == pytest.approx(alone["beta"], rel=1e-6)


@pytest.mark.parametrize("case", cases("refused"))
def test_all_ranks_refuse_what_one_rank_has(one, two, case):
    for own in (one(case), *two(case)):
        assert ("branch_path" if case.endswith("branches") else "a reward per token") in own["error"]


def test_ranks_refill_with_the_prompts_of_a_single_one(one, two):
    alone, (first, second) = one("dynamic:refill"), two("dynamic:refill")
    # Ranks take turns in the batch: 0 and 2 are of the first rank, 1 and 3, which teach nothing, of the second. Both
    # are drawn anew, one by each rank.
    assert first["calls"][:2] == [2, 1]
    assert second["calls"][:2] == [2, 1]
    kept = first["kept"] + second["kept"]  # groups are dealt to the ranks anew once all are there
    assert {0, 2} <= set(kept)
    assert sorted(kept) == sorted(alone["kept"])
    names = [*(f"dynamic_sampling/{name}" for name in ("kept_groups", "generated_groups", "generation_batches"))]
    for own in (first, second):
        for name in (*names, "rewards/lengths/number"):
            assert own["metrics"][name] == alone["metrics"][name]
    assert same(first["weights"], second["weights"])
    assert largest_difference(alone["weights"], first["weights"]) <= 1e-5


@pytest.mark.parametrize("case", ["one_rank_keeps_none", "batch_scale", "pooled_baseline", "mini_batches"])
def test_a_rank_that_keeps_nothing_changes_nothing(one, two, case):
    alone, (first, second) = one(f"dynamic:{case}"), two(f"dynamic:{case}")
    assert first["kept"] == [0, 2]
    assert first["metrics"]["dynamic_sampling/kept_groups"] == 2
    assert same(first["weights"], second["weights"])
    assert largest_difference(alone["weights"], first["weights"]) <= 1e-5
    for name in ("loss", "grad_norm", "reward", "sampling/importance_sampling_ratio/min"):
        if case != "mini_batches" or name == "reward":  # the groups of a mini-batch depend on the ranks
            assert first["metrics"][name] == pytest.approx(alone["metrics"][name], abs=1e-5), name


def test_what_one_sampler_reports_is_left_out_on_all_ranks(one, two):
    """Otherwise the ranks would wait for each other with metrics of different numbers."""
    alone = one("dynamic:one_sampler_reports")
    assert "sampling/importance_sampling_ratio/min" in alone["metrics"]
    for own in two("dynamic:one_sampler_reports"):
        assert not any(name.startswith("sampling/") for name in own["metrics"])
        assert largest_difference(alone["weights"], own["weights"]) <= 1e-5


def test_no_rank_keeps_anything(two):
    policy = rank_cases.TinyPolicy().load()
    for own in two("dynamic:nothing"):
        assert own["metrics"]["dynamic_sampling/kept_groups"] == 0
        assert own["calls"] == [2, 2]
        assert same(list(own["weights"].values()), list(policy.parameters()))
        assert all(math.isfinite(value) for value in own["metrics"].values())


@pytest.mark.parametrize("case", cases("warm_up"))
def test_warm_up(two, case):
    first, second = (own["weights"] for own in two(case))
    assert all(same(left, right) for left, right in zip(first, second, strict=True))
    before, warm, after = first
    assert same(before, warm, "policy")
    assert not same(before, warm, "critic")
    assert not same(warm, after, "policy")
    assert not same(warm, after, "critic")


@pytest.mark.parametrize("case", ["plain", "sequence parallel", "distilled"])
def test_runs(one, two, case):
    """Also in rows that two ranks share, and that are cut where segments are not."""
    alone, (first, second) = one(f"run:{case}"), two(f"run:{case}")
    assert same(first["weights"], second["weights"])
    tolerance = 1e-6 if case == "sequence parallel" else 1e-5
    assert largest_difference(alone["weights"], first["weights"]) < tolerance
    left_out = ("time/", "perf/", *(("prefix/",) if case == "sequence parallel" else ()))
    names = {name for name in alone["metrics"] if not name.startswith(left_out)}
    assert {"loss", "reward", "reward_std", "num_tokens", "grad_norm", "val/reward"} <= names
    assert "time/wait_for_ranks" not in alone["metrics"]
    assert first["metrics"]["time/wait_for_ranks"] >= 0
    for name in names:
        assert first["metrics"][name] == pytest.approx(alone["metrics"][name], abs=1e-5), name


def test_a_run_resumes_between_updates(two, tmp_path):
    whole, resumed = two("run:plain")[0], two("run:plain:1")[0]
    assert same(whole["weights"], resumed["weights"])


@pytest.mark.slow
def test_another_number_of_ranks_resumes_between_updates(tmp_path):
    """The rollouts of both ranks are dealt again, not sampled again."""
    run_script(rank_cases.__file__, 2, tmp_path, "run:plain", ranks=2, cwd=tmp_path)
    whole = torch.load(tmp_path / "0.pt", weights_only=True)["run:plain"]
    saved = torch.load(tmp_path / "plain" / "step=1.ckpt", weights_only=True)["pl_grouprl"]["rollouts"]
    assert sorted(len(state["groups"]) for state in saved) == [2, 3]
    resumed = result_of("run:plain:1", tmp_path)
    assert largest_difference(resumed["weights"], whole["weights"]) < 1e-5
    assert resumed["metrics"]["reward"] == pytest.approx(whole["metrics"]["reward"])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_rollouts_ahead(tmp_path, strategy):
    alone = result_of(f"ahead:{strategy}", tmp_path / "one")["weights"]
    run_script(rank_cases.__file__, 2, tmp_path, f"ahead:{strategy}", f"ahead:{strategy}:1", ranks=2, cwd=tmp_path)
    found = torch.load(tmp_path / "0.pt", weights_only=True)
    both, resumed = (found[name]["weights"] for name in (f"ahead:{strategy}", f"ahead:{strategy}:1"))
    assert largest_difference(alone, both) <= 1e-5
    assert same(both, resumed)


# Ranks that are forked case by case, since some fail.


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    """What each rank wrote of each case. A run that hangs ends the script with an error."""

    @functools.cache
    def run(kind, strategy, cases):
        folder = tmp_path_factory.mktemp(kind)
        run_script(FORKED, kind, strategy, folder, cases, cwd=folder, timeout=650)
        return {name: [torch.load(folder / name / f"rank{rank}.pt") for rank in (0, 1)] for name in json.loads(cases)}

    return lambda kind, strategy, cases: run(kind, strategy, json.dumps(cases))


COPIED = {"adapter": "merged"}
LORA = {"lora": True}
LOST = {"faults": {"1": [["update", 2, "lost"]], "0": [["generate", 4, "lost at once"]]}}
SYNCS = {
    "ddp": {
        "own weights": {},
        "copied": COPIED,
        "lost": COPIED | LOST,
        "failed": COPIED | {"faults": {"1": [["generate", 2, "failed"]], "0": [["generate", 2, "lost"]]}},
    },
    "ddp, more": {
        "own weights": {},
        "copied": COPIED,
        "resumed": COPIED | {"checkpoint": "copied/step=3.ckpt"},
        "written to by one": COPIED | {"writes": 1},
    },
    "fsdp2": {"own weights": LORA, "separate": LORA | {"adapter": "separate"}},
    "fsdp2, more": {
        # In the middle of the weights, which the other rank gathers to their end.
        "failed": LORA | COPIED | {"faults": {"1": [["update", 2, "failed"]]}},
        "own weights": LORA,
        "copied": LORA | COPIED,
        "resumed": LORA | COPIED | {"checkpoint": "copied/step=3.ckpt"},
        "lost": LORA | {"adapter": "separate"} | LOST,
    },
}


def assert_all_end(ranks):
    errors = [rank["error"] for rank in ranks]
    assert errors[1] == "OSError: no space left"
    assert errors[0].startswith("RuntimeError: rank 1 failed with OSError: no space left")


@pytest.mark.parametrize("kind", sweep(SYNCS, quick=["ddp", "fsdp2"]))
def test_weights_are_sent_together(forked, kind):
    runs = forked("sync", kind.split(",")[0], SYNCS[kind])

    def each(name, what):
        return [rank[what] for rank in runs[name]]

    def versions(name):
        return [[version for version, *_ in updates] for updates in each(name, "updates")]

    def is_the_same(name, expected):
        pairs = zip(each(name, "weights"), each(expected, "weights"), strict=True)
        return all(same(one, other) for one, other in pairs)

    for name in runs.keys() & {"copied", "separate", "lost", "written to by one"}:
        assert each(name, "tokens") == each("own weights", "tokens"), name
        assert is_the_same(name, "own weights"), name
        assert each(name, "closes") == [1, 1]
    # Six steps, two to each batch of rollouts; validation after the fourth shares what the last rollouts need.
    for name in runs.keys() & {"copied", "separate"}:
        assert versions(name) == [[1, 2, 3]] * 2
        # Also a rank without prompts samples: the last batch in validation has one.
        assert [calls["generate"] for calls in each(name, "calls")] == [5, 5]
        assert [[step["sync/count"] for step in steps] for steps in each(name, "steps")] == [[1.0] * 6] * 2
    if "resumed" in runs:
        assert each("resumed", "tokens") == [tokens[3:] for tokens in each("copied", "tokens")]
        assert is_the_same("resumed", "copied")
        assert versions("resumed") == [[1]] * 2
    if "lost" in runs:  # rank 1 loses the second sync, rank 0 the fourth sampling, of rank 1's other calls nothing
        assert versions("lost") == [[1, 2, 3, 4, 5], [1, 3, 4, 5]]
        restarts = [[step["sync/restarts"] for step in steps] for steps in each("lost", "steps")]
        assert restarts == [[0, 0, 1, 1, 1, 1]] * 2
    if "failed" in runs:
        assert_all_end(runs["failed"])
        assert each("failed", "closes") == [1, 1]
    if "written to by one" in runs:  # noticed by all
        assert versions("written to by one") == [[1, 2, 3, 4]] * 2


@pytest.mark.parametrize("strategy", sweep(["ddp", "fsdp2"], quick=["fsdp2"]))
def test_weights_taken_in_flight(forked, strategy):
    """Two ranks take as many groups each as they have prompts, get weights together, and end together."""
    runs = forked("in_flight", strategy, {"plain": "", "lost": "lost", "failed": "failed", "resumed": ""})
    for ranks in (runs["plain"], runs["lost"]):
        assert [rank["error"] for rank in ranks] == [None, None]
        trained = [tuple(prompt) for rank in ranks for step in rank["prompts"] for prompt in step]
        assert len(trained) == len(set(trained)) == 20
        for step in range(4):
            assert sum(len(rank["prompts"][step]) for rank in ranks) == 5
            ages = [step - v for rank in ranks for versions in rank["versions"][step] for v in versions]
            for rank in ranks:
                assert rank["steps"][step]["rollout/staleness/max"] == max(ages) <= 2
                assert rank["steps"][step]["rollout/staleness/mean"] == pytest.approx(sum(ages) / len(ages))
    assert_all_end(runs["failed"])
    before = [tuple(prompt) for rank in runs["plain"] for step in rank["prompts"][:2] for prompt in step]
    after = [tuple(prompt) for rank in runs["resumed"] for step in rank["prompts"] for prompt in step]
    assert len(after) == len(set(after)) == 10  # what was queued
    assert not set(before) & set(after)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_all_ranks_end_where_one_ranks_weight_is_broken(forked, strategy):
    for rank in forked("broken", strategy, {"broken": {}})["broken"]:
        assert "NaN or infinity in 1 parameters after optimizer step 1: policy.model.norm.weight" in rank["error"]


def test_another_reward_file_on_one_rank_is_told(forked):
    runs = forked("rewards", "ddp", {"saved": "", "resumed": "saved"})
    assert "rewards.score.sha256" in runs["resumed"][0]["warnings"]
