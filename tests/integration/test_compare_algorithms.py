"""The comparison of algorithms in the small: what it writes agrees with what was run."""

import json
import sys

import pytest
import yaml
from helpers.cli_runs import ROOT, TASK, warm_started

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from examples import compare_algorithms, compare_report

MODULES = {"GRPO": "GRPO", "PPO": "PPO", "GROUP PPO": "GroupPPO"}


CONFIGURATION = f"""
model:
  class_path: pl_grouprl.%(module)s
  init_args:
    policy: {warm_started("%(folder)s", steps=0)}
    rewards: [{{function: {{class_path: pl_grouprl.rewards.LeadingCorrectCharacters}}}}]
    num_generations: 4
    sampling: {{max_new_tokens: 4}}
    beta: 0.1
    num_iterations: %(iterations)s
data: {{class_path: pl_grouprl.PromptDataModule, init_args: {{train: {TASK}, val: {TASK}, batch_size: 2}}}}
trainer: {{accelerator: cpu, max_steps: 4, check_val_every_n_epoch: null, val_check_interval: 1,
  num_sanity_val_steps: 0, log_every_n_steps: 1, enable_model_summary: false}}
"""
"""2 prompts of 20 digits, 4 rollouts each, a random policy of one layer."""


@pytest.fixture(scope="module")
def compare(tmp_path_factory):
    """Call the example on three small configurations; its folder is `compare.folder`."""
    folder = tmp_path_factory.mktemp("comparison")
    algorithms = []
    for label, module in MODULES.items():
        # Two updates of PPO's rollouts, so that what is counted per rollout is told from what is counted per step.
        iterations = 2 if module == "PPO" else 1
        path = folder / f"{module}.yaml"
        path.write_text(CONFIGURATION % {"module": module, "folder": folder, "iterations": iterations})
        algorithms.append(f"{label}={path}")

    def call(*arguments, algorithms=algorithms):
        metric = ["--metric", "val/rewards/LeadingCorrectCharacters/mean", "--steps", "2"]
        output = ["--output", str(folder / "out")]
        return compare_algorithms.main(["--algorithms", *algorithms, *metric, *output, *arguments])

    call.folder, call.algorithms = folder, algorithms
    return call


@pytest.fixture(scope="module")
def written(compare):
    """What a comparison of all three leaves behind."""
    runs = compare("--seeds", "3")
    out = compare.folder / "out"
    text = (out / "comparison.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith(("| G", "| P"))]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {"runs": runs, "json": json.loads((out / "comparison.json").read_text()), "cells": cells, "out": out}


def test_all_algorithms_ran_from_one_policy_on_the_same_prompts(written):
    runs = written["json"]["runs"]
    assert [run["algorithm"] for run in runs] == list(MODULES.values())
    assert len({run["base_policy"] for run in runs}) == 1
    assert len({run["curve"][0]["reward"] for run in runs}) == 1  # the same rollouts before training, too
    grpo, ppo, group_ppo = (run["prompts"] for run in runs)
    assert grpo == group_ppo
    assert len(grpo) == len(set(grpo)) == 2
    assert ppo == grpo[:1]  # one batch of prompts, two updates


def test_the_curve_is_that_of_the_run_folder(written):
    for run in written["json"]["runs"]:
        assert [point["step"] for point in run["curve"]] == [0, 1, 2]
        assert run["curve"][0]["seconds"] == 0
        assert run["curve"][2]["seconds"] == pytest.approx(sum(run["seconds"]["step"]))
        folder = written["out"] / "runs" / f"{compare_algorithms.slug(run['label'])}-seed3"
        summary = json.loads((folder / "summary.json").read_text())
        assert run["curve"][2]["reward"] == summary["metrics"][run["options"]["metric"]]["last"]
        assert sum(run["seconds"]["step"]) / 2 == pytest.approx(summary["metrics"]["time/step"]["mean"])


def test_parts_add_up_to_the_step(written):
    for run in written["json"]["runs"]:
        seconds = run["seconds"]
        parts = [sum(seconds[part][step] for part in (*compare_report.PARTS, "rest")) for step in range(2)]
        assert parts == pytest.approx(seconds["step"])
        assert all(value >= 0 for value in seconds["rest"])
        assert (seconds["values"][0] > 0) == (run["algorithm"] != "GRPO")
        assert len(run["critic_update_seconds"]) == (0 if run["algorithm"] == "GRPO" else 5)


def test_positions_are_rollouts_tokens_and_token_groups(written):
    grpo, ppo, group_ppo = written["json"]["runs"]
    assert grpo["positions"] == [8, 8]  # 2 prompts, 4 rollouts each
    assert ppo["positions"] == ppo["tokens"]
    assert ppo["tokens"] == [grpo["tokens"][0] / 2]  # the same first rollouts, shared out among two updates
    assert all(8 <= own <= tokens for own, tokens in zip(group_ppo["positions"], group_ppo["tokens"], strict=True))


def test_the_table_is_the_json(written):
    summaries = {own["label"]: own for own in written["json"]["summary"]}
    runs = {run["label"]: run for run in written["json"]["runs"]}
    rewards = {row[0]: row for row in written["cells"] if len(row) == 8}
    seconds = {row[0]: row for row in written["cells"] if len(row) == 10}
    assert rewards.keys() == seconds.keys() == summaries.keys() == MODULES.keys()
    assert (written["out"] / "comparison.png").read_bytes().startswith(b"\x89PNG")
    for label, run in runs.items():
        final, positions, tokens = run["curve"][-1]["reward"], sum(run["positions"]), sum(run["tokens"])
        assert summaries[label]["final"] == [final]
        assert rewards[label][2] == f"{final:.3f}"
        assert rewards[label][6] == f"{positions / len(run['positions']):.0f}"
        compression = 1 - positions / tokens if label == "GROUP PPO" else 0
        assert rewards[label][7] == f"{compression:.2f}"
        assert (seconds[label][9] == "-") == (label == "GRPO")


def test_resume_trains_only_what_is_missing(written, compare, monkeypatch):
    trained = []
    train = compare_algorithms.train
    monkeypatch.setattr(compare_algorithms, "train", lambda *args: trained.append(args[1]) or train(*args))
    runs = compare("--seeds", "3", "4", "--resume", algorithms=compare.algorithms[:1])
    assert trained == ["grpo-seed4"]
    assert [run["seed"] for run in runs] == [3, 4]
    assert runs[0] == written["json"]["runs"][0]
    assert runs[0]["prompts"] != runs[1]["prompts"]
    with pytest.raises(SystemExit, match="other options or configurations"):
        compare("--seeds", "3", "--resume", "--steps", "3", algorithms=compare.algorithms[:1])


def test_seconds_of_a_rollout_are_shared_out_among_its_updates():
    points = {
        "time/rollout": {1: 4.0, 2: 0.0, 3: 6.0, 4: 0.0},
        "time/update": {1: 1.0, 2: 3.0, 3: 2.0, 4: 2.0},
        "time/step": {1: 6.0, 2: 3.0, 3: 9.0, 4: 2.0},
    }
    seconds = compare_algorithms.per_step_seconds(points, 2)
    assert seconds["rollout"] == [2.0, 2.0, 3.0, 3.0]
    assert seconds["update"] == [2.0, 2.0, 2.0, 2.0]
    assert seconds["step"] == [4.5, 4.5, 5.5, 5.5]
    assert seconds["rest"] == [0.5, 0.5, 0.5, 0.5]
    assert seconds["values"] == [0.0] * 4


def made_up(seed, rewards, seconds):
    points = zip((0, 10, 20), seconds, rewards, strict=True)
    return {
        "label": "A", "seed": seed, "base_policy": 1.0, "prompts": ["x", "y"],
        "curve": [{"step": step, "seconds": at, "reward": reward} for step, at, reward in points],
    }  # fmt: skip


def test_curves_are_means_and_ranges_over_the_seeds():
    runs = [made_up(0, (0.2, 0.4, 0.9), (0, 5, 10)), made_up(1, (0.4, 0.8, 0.7), (0, 7, 12))]
    own = compare_report.curve(runs, "red")
    assert own.steps == [0, 10, 20]
    assert own.seconds == [0, 6, 11]
    assert own.mean == pytest.approx([0.3, 0.6, 0.8])
    assert (own.low, own.high) == ([0.2, 0.4, 0.7], [0.4, 0.8, 0.9])
    assert compare_report.spread([0.1, 0.5], 0.1) == [0.1, 0.5]
    assert compare_report.spread([0.9, 0.95, 0.96], 0.1) == pytest.approx([0.8, 0.9, 1.0])


def test_runs_from_other_policies_or_on_other_prompts_are_refused():
    run = made_up(0, (0, 0, 0), (0, 1, 2))
    compare_algorithms.check_same_start([run, {**run, "prompts": ["x"]}])
    compare_algorithms.check_same_start([run, {**run, "prompts": ["z"], "seed": 1}])
    with pytest.raises(SystemExit, match="different prompts"):
        compare_algorithms.check_same_start([run, {**run, "prompts": ["x", "z"]}])
    with pytest.raises(SystemExit, match="different policies"):
        compare_algorithms.check_same_start([run, {**run, "base_policy": 2.0, "seed": 1}])


def test_what_cannot_be_compared_is_an_error(compare, tmp_path):
    fragment = tmp_path / "fragment.yaml"
    one = compare.algorithms[:1]
    with pytest.raises(SystemExit, match="LABEL=CONFIG"):
        compare(algorithms=["grop"])
    for option, message in (("val_check_interval: 4", "validation"), ("accumulate_grad_batches: 2", "compare with 1")):
        fragment.write_text(f"trainer: {{{option}}}")
        with pytest.raises(SystemExit, match=message):
            compare("--seeds", "5", "--config", str(fragment), algorithms=one)


@pytest.mark.parametrize("text", ["grpo", "PPO", "GROUP PPO", "group_ppo"])
def test_default_configurations_exist(text):
    label, config = compare_algorithms.parse_algorithm(text)
    model = yaml.safe_load((ROOT / "configs" / config).read_text())["model"]
    assert model["class_path"] == f"pl_grouprl.{MODULES[label]}"
