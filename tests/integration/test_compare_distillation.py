"""The comparison of distillation with GRPO: what it runs, and the tokens that it counts."""

import json
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from examples import compare_distillation  # noqa: E402


def made_up(label, seed, rewards, tokens=(10, 20, 30)):
    points = [{"step": step, "seconds": float(step), "reward": reward} for step, reward in enumerate(rewards)]
    return {"label": label, "seed": seed, "curve": points, "tokens": list(tokens), "conditions": {"device": "cpu"}}


def test_only_algorithm_and_its_options_differ():
    configs = compare_distillation.configurations("distillation.yaml", teacher="elsewhere")
    ours, theirs = configs["Distillation"], configs["GRPO"]
    assert ours["model"]["init_args"]["teacher"] == "elsewhere"
    assert [own["model"]["class_path"] for own in (ours, theirs)] == ["pl_grouprl.Distillation", "pl_grouprl.GRPO"]
    assert {name: own for name, own in ours.items() if name != "model"} == {
        name: own for name, own in theirs.items() if name != "model"
    }
    own, other = ours["model"]["init_args"], theirs["model"]["init_args"]
    differing = {name for name in own.keys() | other.keys() if own.get(name) != other.get(name)}
    assert differing == {"teacher", "distillation_coef", "gamma", "rewards", "epsilon", "epsilon_high", "beta"}
    assert [reward["weight"] for reward in (*own["rewards"], *other["rewards"])] == [0.0, 1.0]
    default = yaml.safe_load((ROOT / "configs" / "grpo_pg.yaml").read_text())["model"]["init_args"]
    assert {name: default[name] for name in ("epsilon", "epsilon_high", "beta")} == compare_distillation.GRPO_OPTIONS


def test_tokens_are_those_sampled_before_the_validation():
    run = made_up("GRPO", 0, [0.2, 0.5, 0.96, 0.9])
    assert compare_distillation.tokens_at(run) == [0, 10, 30, 60]
    assert compare_distillation.tokens_to_reach(run, 0.95) == 30
    assert compare_distillation.tokens_to_reach(run, 0.5) == 10
    assert compare_distillation.tokens_to_reach(run, 0.97) is None


def test_the_report(tmp_path, capsys):
    runs = [made_up("Distillation", seed, [0.2, 0.96, 0.97, 0.98]) for seed in (0, 1)]
    runs.append(made_up("GRPO", 0, [0.2, 0.3, 0.4, 0.5]))
    summary = compare_distillation.write_report(runs, accuracy=1.0, folder=tmp_path)
    assert summary["Distillation"]["tokens_to_threshold"] == [10, 10]
    assert summary["GRPO"]["tokens_to_threshold"] == [None]
    assert json.loads((tmp_path / "distillation.json").read_text())["threshold"] == pytest.approx(0.95)
    assert (tmp_path / "distillation.png").read_bytes().startswith(b"\x89PNG")
    output = capsys.readouterr().out
    assert "10; 10" in output
    assert "not reached" in output
