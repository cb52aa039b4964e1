"""The configurations with tools through the command line, in the small, and the whole run that learns to use one."""

import csv
import json
import sys
from pathlib import Path

import httpx2
import pytest
import yaml
from helpers import mcp_server, openenv_server
from helpers.qwen_tokenizer import qwen_tokenizer
from helpers.scripted_engine import ScriptedEngine
from helpers.small_lookup import SMALL_LOOKUP

from pl_grouprl.chat.format import read_template
from pl_grouprl.cli import main
from pl_grouprl.demo.warm_start import build_model
from pl_grouprl.episodes import openenv
from pl_grouprl.rollout import HFRolloutEngine

LOGGER = "[{{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {{save_dir: {folder}, name: run}}}}]"
SMALL_QWEN = """
model:
  init_args:
    policy: {{init_args: {{path: {folder}/tiny, gradient_checkpointing: false}}}}
    num_generations: 2
    num_mini_batches: 1
data:
  init_args:
    train: {folder}/rows.jsonl
    val: {folder}/rows.jsonl
    test: null
    batch_size: 2
    max_prompt_length: 1500
trainer: {{accelerator: cpu, precision: 32-true, max_steps: 2, val_check_interval: 2, enable_progress_bar: false}}
"""


def fit(folder, config, text, *more):
    """Run a configuration with a fragment over it; its metrics by name and number of steps."""
    (folder / "small.yaml").write_text(text.format(folder=folder))
    logger = LOGGER.format(folder=folder)
    main(["fit", "--config", config, "--config", str(folder / "small.yaml"), "--trainer.logger", logger, *more])
    metrics = {}
    with (folder / "run" / "version_0" / "metrics.csv").open(newline="") as lines:
        for row in csv.DictReader(lines):
            for name, value in row.items():
                if value:
                    metrics.setdefault(name, {})[int(row["step"]) + 1] = float(value)
    return metrics


@pytest.mark.parametrize("name", ["tools", "tree"])
def test_the_lookup_runs_in_the_small(tmp_path, name):
    metrics = fit(tmp_path, f"grpo_{name}.yaml", SMALL_LOOKUP)
    assert len(metrics["reward"]) == 3
    assert metrics["val/rewards/exact_match/mean"].keys() == {1, 3}
    if name == "tools":
        assert max(metrics["tools/call_frequency"].values()) > 0  # even so short a warm start teaches the format
        assert all(ratio > 1 for part in ("prefix", "episode") for ratio in metrics[f"{part}/token_ratio"].values())
    else:
        assert all(4 <= leaves <= 16 for leaves in metrics["branching/leaves"].values())  # 4 roots, 4 times at most
        assert max(metrics["branching/token_ratio"].values()) > 1


def save_tiny_qwen(folder):
    """A random Qwen3 of one layer, with a tokenizer that has Qwen3's special tokens and the package's template."""
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = read_template("qwen3")
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 4096}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    build_model({"model_type": "qwen3", **size, **heads}, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_gsm8k(folder):
    """Two rows as `examples/prepare_gsm8k.py` writes them."""
    rows = [
        {"data_source": "openai/gsm8k"}
        | {"prompt": [{"role": "user", "content": f"Three boxes of 4 red and {blue} blue pens: how many pens?"}]}
        | {"reward_model": {"style": "rule", "ground_truth": str(3 * (4 + blue))}}
        for blue in (10, 11)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_the_qwen3_run_on_a_tiny_model(tmp_path):
    save_tiny_qwen(tmp_path / "tiny")
    write_gsm8k(tmp_path)
    shorter = ["--model.init_args.episodes.max_turn_tokens", "6", "--model.init_args.episodes.max_tokens", "40"]
    metrics = fit(tmp_path, "grpo_qwen3_tools.yaml", SMALL_QWEN, *shorter)
    assert metrics["val/rewards/correct/mean"].keys() == {1, 2}
    assert metrics["episode/turns"] == {1: 1, 2: 1}  # a random model never writes a call
    assert max(metrics["completions/max_length"].values()) <= 6


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def scripted(tmp_path, monkeypatch):
    """Lets the tiny Qwen3 write these turns in each episode."""
    save_tiny_qwen(tmp_path / "tiny")
    write_gsm8k(tmp_path)

    def use(*turns):
        engine = ScriptedEngine(lambda prompt, index, turn: turns[turn])
        monkeypatch.setattr(HFRolloutEngine, "bind", lambda self, model, tokenizer=None: engine.bind(model, tokenizer))
        monkeypatch.setattr(HFRolloutEngine, "generate", lambda self, *args, **more: engine.generate(*args, **more))

    return use


def test_the_qwen3_run_calls_the_calculator(tmp_path, scripted):
    scripted(call("calculate", expression="3 * (4 + 10)"), "#### 42")

    metrics = fit(tmp_path, "grpo_qwen3_tools.yaml", SMALL_QWEN, "--trainer.max_steps", "1")

    assert metrics["tools/call_frequency"] == {1: 1}
    assert metrics["tools/failure_frequency"] == {1: 0}
    assert metrics["rewards/correct/mean"] == {1: 0.5}  # 42 pens in one row, 45 in the other


def test_the_qwen3_run_calls_the_tools_of_an_mcp_server(tmp_path, scripted):
    scripted(call("calculate", expression="40 + 1"), call("add", a=41), "#### 42")
    server = json.dumps([sys.executable, mcp_server.__file__])
    one = f"{{class_path: pl_grouprl.episodes.MCPTools, init_args: {{command: {server}, include: [add]}}}}"
    tools = f"[pl_grouprl.demo.tasks.calculate, {one}]"
    more = ["--config", "tools/mcp.yaml", "--model.init_args.tools", tools, "--trainer.max_steps", "1"]

    metrics = fit(tmp_path, "grpo_qwen3_tools.yaml", SMALL_QWEN, *more)

    assert metrics["tools/call_frequency"] == {1: 2}
    assert metrics["tools/failure_frequency"] == {1: 0}


def test_the_qwen3_run_in_an_openenv_environment_that_owns_the_prompts(tmp_path, scripted, monkeypatch):
    kinds = {"http://localhost:8000": "adding"}
    for name, module in openenv_server.fake_library(kinds).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(openenv, "OPENENV_AVAILABLE", True)
    monkeypatch.setattr(httpx2, "get", openenv_server.fake_get(kinds))
    scripted(call("step", number=4) + "\n" + call("step", number=-1), call("step", number=3), "Done.")
    rows = "    train: {folder}/rows.jsonl\n    val: {folder}/rows.jsonl\n    test: null\n"
    assert rows in SMALL_QWEN
    more = ["--config", "tools/openenv.yaml", "--data.init_args.steps_per_epoch", "1", "--trainer.max_epochs", "2"]

    metrics = fit(tmp_path, "grpo_qwen3_tools.yaml", SMALL_QWEN.replace(rows, ""), *more)

    assert metrics["rewards/OpenEnv_steps/mean"] == pytest.approx({1: 0.7, 2: 0.7})
    assert metrics["tools/failure_frequency"] == pytest.approx({1: 1 / 3, 2: 1 / 3})


def test_the_configurations_of_both_runs_agree_with_their_relatives():
    """What the runs with tools say they share with the runs without."""
    configs = Path(__file__).resolve().parents[2] / "configs"
    tools, plain = (
        yaml.safe_load((configs / f"grpo_qwen3_{name}.yaml").read_text())["model"]["init_args"]
        for name in ("tools", "gsm8k")
    )
    same = ("policy", "rewards", "num_generations", "num_mini_batches", "loss_type", "beta", "optimizer")
    assert {name: tools[name] for name in same} == {name: plain[name] for name in same}


def test_the_branching_run_differs_from_the_lookup_run_only_where_it_says_so():
    configs = Path(__file__).resolve().parents[2] / "configs"
    tree, tools = (yaml.safe_load((configs / f"grpo_{name}.yaml").read_text()) for name in ("tree", "tools"))
    del tree["model"]["init_args"]["episodes"]["branching"]
    for name in ("advantage_estimator", "advantage_options", "loss_agg_mode", "num_generations", "tools"):
        del tree["model"]["init_args"][name]
    for name in ("environment_factory", "num_generations"):
        del tools["model"]["init_args"][name]
    for split in ("train", "val", "test"):
        tree["data"]["init_args"][split].pop("init_args", None)  # the shared directory
    for logger in (*tree["trainer"]["logger"], *tools["trainer"]["logger"]):
        del logger["init_args"]["name"]
    assert tree == tools


@pytest.mark.slow
def test_reinforcement_learning_teaches_both_calls(tmp_path):
    """About four minutes on two cores, a minute of them the warm start."""
    cache = str(tmp_path / "cache")
    metrics = fit(tmp_path, "grpo_tools.yaml", "{{}}", "--model.init_args.policy.init_args.cache_dir", cache)
    exact = metrics["val/rewards/exact_match/mean"]
    last = max(exact)
    assert last == 100
    assert exact[1] <= 0.4  # before the first step
    assert min(value for step, value in exact.items() if step > 0.75 * last) >= 0.95
    assert metrics["tools/call_frequency"][last] == pytest.approx(2, abs=0.1)
