"""PPO and GROUP PPO through the command line, in the small."""

import inspect
import json
import math
import re
from pathlib import Path

import pytest
import torch
import yaml
from helpers.cli_runs import ROOT, TASK, config_of, print_config, printed, usage_error, warm_started
from helpers.sweeps import sweep

from pl_grouprl import PPO, GroupPPO
from pl_grouprl.cli import main

SMALL = f"""
model:
  class_path: pl_grouprl.%(name)s
  init_args:
    policy: {warm_started("%(folder)s")}
    rewards: [{{class_path: pl_grouprl.rewards.LeadingCorrectCharacters}}]
    num_generations: 4
    num_mini_batches: 2
    sampling: {{max_new_tokens: 6}}
    sharing: {{verify: true}}
    policy_loss: {{name: ppo, epsilon: 0.1, epsilon_high: 0.3}}
    kl: {{place: reward, target: 1.0}}
    beta: 0.01
    critic:
      class_path: pl_grouprl.models.PolicyCopyCritic
      init_args: {{head_std: 0.05, seed: 3}}
    optimizer: {{learning_rate: 1.0e-3}}
    critic_optimizer: {{learning_rate: 2.0e-3, schedule: cosine, warmup_steps: 1, max_grad_norm: 0.5}}
    lam: 0.9
    cliprange_value: 0.3
    dynamic_sampling: true
    guards: {{max_generation_batches: 2}}
data:
  class_path: pl_grouprl.PromptDataModule
  init_args: {{train: {TASK}, val: {TASK}, test: {TASK}, batch_size: 4, val_batch_size: 4}}
trainer:
  accelerator: cpu
  max_steps: 2
  num_sanity_val_steps: 0
  val_check_interval: 2
  check_val_every_n_epoch: null
  log_every_n_steps: 1
  enable_progress_bar: false
  enable_model_summary: false
  logger:
    - class_path: lightning.pytorch.loggers.CSVLogger
      init_args: {{save_dir: %(folder)s/runs, name: small}}
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {{every_n_train_steps: 2, save_last: true}}
    - class_path: pl_grouprl.callbacks.RunSummary
"""
GROUPS = """
model:
  init_args:
    group_variance_threshold: 1.5
    group_max_size: 4
    target_compression: 0.5
    threshold_lr: 0.1
    score_norm: sketch
    sketch_dim: 8
    advantage_mode: variable_lambda
trainer:
  callbacks+:
    - class_path: pl_grouprl.TokenGroupMonitor
"""


@pytest.fixture(scope="module")
def configurations(tmp_path_factory):
    """Arguments of the command line for both algorithms."""
    arguments = {}
    for name in ("PPO", "GroupPPO"):
        folder = tmp_path_factory.mktemp(name)
        (folder / "small.yaml").write_text(SMALL % {"name": name, "folder": folder})
        (folder / "groups.yaml").write_text(GROUPS)
        files = ["small.yaml", "groups.yaml"] if name == "GroupPPO" else ["small.yaml"]
        arguments[name] = [part for file in files for part in ("--config", str(folder / file))]
    return arguments


@pytest.fixture(scope="module")
def runs(configurations):
    """The folder of a finished run of each."""
    for arguments in configurations.values():
        main(["fit", *arguments])
    return {name: Path(own[1]).parent / "runs/small/version_0" for name, own in configurations.items()}


@pytest.mark.parametrize("name", sweep(["PPO", "GroupPPO"], quick=["GroupPPO"]))
def test_the_printed_config_has_what_was_set_and_is_a_config(configurations, name, capsys, tmp_path):
    config, text = print_config(capsys, "fit", *configurations[name])
    (tmp_path / "whole.yaml").write_text(text)
    assert config == config_of(capsys, tmp_path / "whole.yaml")
    assert config["model"]["class_path"] == f"pl_grouprl.{name}"
    options = config["model"]["init_args"]
    assert options["critic"]["init_args"] == {"head_std": 0.05, "seed": 3}
    critic = options["critic_optimizer"]
    assert (critic["learning_rate"], critic["max_grad_norm"]) == (2e-3, 0.5)
    assert options["optimizer"]["learning_rate"] == 1e-3
    assert options["policy_loss"] == {"name": "ppo", "epsilon": 0.1, "epsilon_high": 0.3}
    assert (options["lam"], options["gamma"], options["critic_lam"]) == (0.9, 1.0, None)
    assert options["kl"].items() >= {"type": "k3", "place": "reward", "target": 1.0, "horizon": None}.items()
    assert ("score_norm" in options) == (name == "GroupPPO")


@pytest.mark.parametrize(
    ("critic", "init_args"),
    [
        ("SharedTrunkCritic", {"detach": True}),
        ("LoRACritic", {"r": 4, "alpha": 8, "target_modules": ["q_proj"]}),
        ("PretrainedCritic", {"path": "some/model"}),
    ],
)
def test_critics_by_class_path(configurations, capsys, critic, init_args):
    value = {"class_path": f"pl_grouprl.models.{critic}", "init_args": init_args}
    parsed = parsed_critic(configurations, capsys, json.dumps(value))
    assert parsed["class_path"] == value["class_path"]
    assert {name: parsed["init_args"][name] for name in init_args} == init_args


def parsed_critic(configurations, capsys, value):
    arguments = ["--model.init_args.critic", value]
    return print_config(capsys, "fit", *configurations["PPO"], *arguments)[0]["model"]["init_args"]["critic"]


def test_a_critic_by_path_and_by_default(configurations, capsys):
    for given, expected in (("some/model", "some/model"), ("null", None)):
        assert parsed_critic(configurations, capsys, given) == expected


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("vf_coef", "high"),
        ("group_max_size", "4"),  # GROUP PPO's, not PPO's
        ("advantage_estimator", "rloo"),
        ("critic_optimizer.momentum", "0.5"),
        ("kl.place", "advantage"),
    ],
)
def test_unknown_options_are_usage_errors(configurations, capsys, option, value):
    said = usage_error(capsys, "fit", *configurations["PPO"], f"--model.init_args.{option}", value)
    assert option.split(".")[-1] in said


@pytest.mark.parametrize("name", ["PPO", "GroupPPO", "GRPO"])
def test_help_of_a_module_lists_its_options(capsys, name):
    shown = printed(capsys, "fit", f"--model.help=pl_grouprl.{name}")
    common = ["policy_loss", "kl.target", "importance_sampling.mode", "dynamic_sampling", "beta", "num_generations"]
    own = {
        "PPO": ["critic_optimizer", "cliprange_value", "bootstrap_truncated", "lam_alpha"],
        "GroupPPO": ["critic_optimizer", "group_variance_threshold", "target_compression", "boundary_at_turn_ends"],
        "GRPO": ["advantage_estimator", "advantage_options", "multi_objective_aggregation"],
    }
    assert not [option for option in common + own[name] if f".{option} " not in shown]


@pytest.mark.parametrize("name", ["PPO", "GroupPPO"])
def test_fit(runs, name, capsys):
    metrics = json.loads((runs[name] / "summary.json").read_text())["metrics"]
    expected = {
        "value/loss", "value/clip_ratio", "value/explained_variance", "grad_norm/policy", "grad_norm/critic", "kl",
        "kl_coef", "dynamic_sampling/kept_groups", "dynamic_sampling/generated_groups", "val/reward", "time/values",
        "dynamic_sampling/generation_batches",
    }  # fmt: skip
    groups = {
        "token_group/total_tokens", "token_group/advantage_positions", "token_group/compression_ratio",
        "token_group/speedup_factor", "token_group/avg_group_size", "token_group/threshold",
        "token_group/ended_by_variance", "token_group/ended_by_size", "token_group/ended_by_last",
    }  # fmt: skip
    assert expected <= metrics.keys()
    assert (groups <= metrics.keys()) == (name == "GroupPPO")
    assert all(math.isfinite(value) for values in metrics.values() for value in values.values())
    assert config_of(capsys, runs[name] / "config.yaml") == yaml.safe_load((runs[name] / "config.yaml").read_text())
    names = torch.load(runs[name] / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"].keys()
    assert {part.split(".")[0] for part in names} == {"policy", "critic"}


@pytest.mark.parametrize("name", sweep(["PPO", "GroupPPO"], quick=["GroupPPO"]))
def test_resume_goes_on(runs, configurations, name):
    checkpoint = runs[name] / "checkpoints" / "last.ckpt"
    main(["fit", *configurations[name], "--ckpt_path", str(checkpoint), "--trainer.max_steps", "3"])
    newest = max(runs[name].parent.iterdir(), key=lambda path: int(path.name.split("_")[1]))
    assert json.loads((newest / "summary.json").read_text())["steps"] == 3


def test_parity_and_evaluation(runs, configurations, capsys):
    for name in ("PPO", "GroupPPO"):
        checkpoint = ["--ckpt_path", str(runs[name] / "checkpoints" / "last.ckpt")]
        main(["parity", *configurations[name], *checkpoint])
    assert capsys.readouterr().out.count("Qwen3ForCausalLM") >= 2
    main(["validate", *configurations["GroupPPO"], *checkpoint])
    assert "val/most_frequent_digit/mean@1" in capsys.readouterr().out


# What the page about options says of the two.


def page_cells(column, page="options.md"):
    """What stands in backticks below a heading of the tables of a page."""
    found, place = [], None
    for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if column in cells:
            place = cells.index(column)
        elif not cells:
            place = None
        elif place is not None:
            found += re.findall(r"`([^`]+)`", cells[place])
    return set(found)


def own_options(cls):
    return set(inspect.signature(cls.__init__).parameters) - {"self", "kwargs", "policy", "rewards"}


@pytest.mark.parametrize("cls", [PPO, GroupPPO])
def test_every_option_of_its_own_is_on_the_page(cls):
    documented = page_cells(f"option of `{cls.__name__}`")
    known = {name for base in cls.__mro__ for name in inspect.signature(base.__init__).parameters}
    assert {name.partition(".")[0] for name in documented} <= known
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert not [name for name in own_options(cls) if f"`{name}`" not in text]


def test_metrics_of_the_page_are_logged(runs):
    documented = page_cells("with a critic, token groups or dynamic sampling", "metrics.md")
    logged = set(json.loads((runs["GroupPPO"] / "summary.json").read_text())["metrics"])
    assert len(documented) > 15
    elsewhere = {"policy/router_aux_loss", "time/exchange", "time/wait_for_rollouts"}  # experts, ranks, sampling ahead
    elsewhere |= {"time/wait_for_ranks", "perf/mfu", *(f"perf/mfu/{name}" for name in ("rollout", "scoring", "update"))}
    elsewhere |= {"time/weight_sync", *(f"sync/{name}" for name in ("count", "seconds", "bytes", "restarts"))}  # vLLM
    elsewhere |= {"rollout/staleness/mean", "rollout/staleness/max", "rollout/dropped_stale"}  # with max_staleness
    elsewhere |= {"entropy_coef", "sampling/off_policy_masked", "sampling/rejected", "vespo/phi_seq_mean"}  # if asked
    elsewhere |= {"sampling/kl_at_turn/{turn}", "sampling/routing_differs"}  # several turns, experts
    others = ("tools/", "episode/", "distillation/", "branching/")  # runs with tools, a teacher, or branches
    documented -= {name for name in documented if name.startswith(others)}
    assert documented - elsewhere <= logged
    prefixes = ("value/", "token_group/", "dynamic_sampling/", "grad_norm/", "time/values")
    assert {name for name in logged if name.startswith(prefixes)} <= documented
