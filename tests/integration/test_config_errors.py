"""What the command line says to a misspelt name or a wrong value in a configuration."""

import sys

import pytest
from helpers.cli_runs import ROOT, usage_error
from helpers.scripts import run_script

from pl_grouprl.cli import main
from pl_grouprl.utilities import optional

PRETRAINED = "class_path: pl_grouprl.models.PretrainedPolicy"
NUMERIC = "class_path: pl_grouprl.rewards.NumericAnswer"
RUN_SUMMARY = "class_path: pl_grouprl.callbacks.RunSummary"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("model: {init_args: {optimizer: {learning_rat: 1.0}}}", ["learning_rat"]),
        ("model: {class_path: pl_grouprl.GRP0}", ["GRP0"]),
        (
            f"model: {{init_args: {{policy: {{{PRETRAINED}, init_args: {{path: x, adapter: {{alhpa: 3}}}}}}}}}}",
            ["alhpa", "'alpha'"],
        ),
        (
            f"model: {{init_args: {{rewards: [{{function: {{{NUMERIC}, init_args: {{metod: strict}}}}}}]}}}}",
            ["metod", "'method'"],
        ),
        ("model: {init_args: {rewards: [{class_path: pl_grouprl.rewards.ExactMatsh}]}}", ["ExactMatsh"]),
        ("model: {init_args: {loss_type: dappo}}", ["loss_type", "dappo", "dr_grpo"]),
        ("trainer: {precision: bf16_mixed}", ["trainer.precision", "bf16_mixed", "bf16-mixed"]),
        ("model: {init_args: {max_tokens_per_micro_batch: many}}", ["max_tokens_per_micro_batch", "many"]),
        ("model: {init_args: {num_generations: four}}", ["num_generations", "four", "int"]),
        ("model: {init_arg: {num_generations: 4}}", ["init_arg"]),
        ("data: {init_args: {batchsize: 3}}", ["batchsize", "'batch_size'"]),
        (
            f"trainer: {{callbacks: [{{{RUN_SUMMARY}, init_args: {{every_n_step: 3}}}}]}}",
            ["every_n_step", "'every_n_steps'"],
        ),
        ("model: {init_args: {sampling: hot}}", ["sampling", "hot"]),
        ("model: {class_path: nowhere.GRPO}", ["nowhere"]),
        ("model: {init_args: {rewards: [{function: nowhere.own}]}}", ["rewards", "nowhere"]),
        ("algorithm: {adv_estimator: gae}", ["algorithm", "gae is pl_grouprl.PPO (base/ppo.yaml)"]),
        ("model: {init_args: {adv_estimator: rloo}}", ["is advantage_estimator of pl_grouprl.GRPO"]),
        ("model: {init_args: {kl_loss_coef: 0.1}}", ["kl_loss_coef is beta"]),
        ("model: {init_args: {clip_ratio_high: 0.3}}", ["clip_ratio_high is epsilon_high"]),
        ("model: {init_args: {optimizer: {lr: 0.1}}}", ["lr is learning_rate"]),
        ("data: {init_args: {train_batch_size: 8}}", ["train_batch_size is batch_size"]),
        ("model: {init_args: {group_params: {group_max_size: 8}}}", ["the options of pl_grouprl.GroupPPO"]),
        ("model: {class_path: torch.nn.Linear}", ["torch.nn.Linear"]),
        ("model: {init_args: [}", ["typo.yaml", "not YAML"]),
        ("model:\n  init_args: {beta: 0, beta: 1}", ["typo.yaml", "line 2", "beta"]),
        ("model: {init_args: {learning_rate: 1.0e-5}}", ["learning_rate"]),
        ("modl: 3", ["modl"]),
    ],
)
def test_a_wrong_name_or_value_is_named(text, names, tmp_path, capsys):
    path = tmp_path / "typo.yaml"
    path.write_text(text)
    printed = usage_error(capsys, "fit", "--config", "grpo_pg.yaml", "--config", path, "--print_config")
    assert [name for name in names if name not in printed] == []
    assert "usage:" not in printed


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["--trainer.max_step", "4"], "'--trainer.max_steps'"),
        (["--model.init_args.num_generation", "4"], "'num_generations'"),
    ],
)
def test_the_nearest_option_of_the_command_line(arguments, nearest, capsys):
    assert f"Did you mean {nearest}?" in usage_error(capsys, "fit", "--config", "grpo_pg.yaml", *arguments)


def test_what_a_reward_does_not_accept_is_the_last_line(capsys):
    reward = {"class_path": "pl_grouprl.rewards.FunctionFromFile", "init_args": {"path": __file__, "name": "score"}}
    printed = usage_error(capsys, "fit", "--config", "grpo_pg.yaml", f"--model.init_args.rewards={[reward]}")
    assert printed.splitlines()[-1] == f"error: {__file__} does not define 'score'."


def test_a_name_that_cannot_be_imported_is_the_last_line(capsys):
    argument = "--model.init_args.rewards=[{function: operator.nearnes}]"
    printed = usage_error(capsys, "fit", "--config", "grpo_pg.yaml", argument)
    lines = [line for line in printed.splitlines() if "check the import path" in line]
    assert lines == printed.splitlines()[-1:]
    assert lines == ["  module 'operator' has no attribute 'nearnes'; check the import path, and what it imports."]


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("algorithm.adv_estimator=group_ppo", "group_ppo is pl_grouprl.GroupPPO (base/group_ppo.yaml)"),
        ("--algorithm.group_params.group_max_size=8", "options of pl_grouprl.GroupPPO (base/group_ppo.yaml)"),
    ],
)
def test_the_module_that_an_option_of_verl_chooses(argument, hint, capsys):
    assert hint in usage_error(capsys, "fit", "--config", "base/grpo.yaml", argument)


def test_functions_are_imported_from_the_working_directory(tmp_path):
    (tmp_path / "own_rewards_26.py").write_text("def correct(completions, **columns):\n    return [0.0]\n")
    rewards = "model: {init_args: {rewards: [{function: own_rewards_26.correct}]}}"
    arguments = ["fit", "--config", "base/grpo.yaml", "--config", rewards, "--print_config"]
    done = run_script(ROOT / "cli.py", *arguments, cwd=tmp_path)
    assert "own_rewards_26.correct" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["plan", "--config", "grpo_pg.yaml", "--model.init_args.num_generations", "1"], "num_generations is 1"),
        (["fit", "--config", "base/grpo.yaml", "--model.init_args.policy", "x"], "rewards is None"),
    ],
)
def test_what_a_constructor_refuses_is_one_line(arguments, error, capsys):
    printed = usage_error(capsys, *arguments).splitlines()
    assert printed[-1].startswith(f"error: {error}")
    assert [line for line in printed if "Seed set" not in line] == printed[-1:]


def test_what_a_policy_refuses_is_one_line(capsys):
    policy = f"{{{PRETRAINED}, init_args: {{path: a, gradient_checkpointing_kwargs: {{a: 1}}}}}}"
    printed = usage_error(capsys, "plan", "--config", "base/grpo.yaml", "--model.init_args.policy", policy)
    assert printed.splitlines()[-1].startswith("error: gradient_checkpointing_kwargs is set, but")


@pytest.mark.parametrize("spec", ["{class_path: broken_21.Broken}", "{function: {class_path: broken_21.Broken}}"])
def test_any_other_error_of_a_reward_is_raised_as_it_is(spec, tmp_path, monkeypatch):
    (tmp_path / "broken_21.py").write_text(
        "class Broken:\n    def __init__(self):\n        {}['own']\n\n    def __call__(self, groups):\n        pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_21", raising=False)
    with pytest.raises(KeyError, match="own") as raised:
        main(["plan", "--config", "grpo_pg.yaml", f"--model.init_args.rewards=[{spec}]"])
    assert raised.traceback[-1].path.name == "broken_21.py"


def test_any_other_error_of_a_constructor_is_raised_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "broken_19.py").write_text(
        "import pl_grouprl\n\nclass Broken(pl_grouprl.GRPO):\n"
        "    def __init__(self, *args, **kwargs):\n        [][1]\n        super().__init__(*args, **kwargs)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(IndexError, match=r"^list index out of range$") as raised:
        main(["fit", "--config", "grpo_pg.yaml", "--config", "model: {class_path: broken_19.Broken}"])
    assert raised.traceback[-1].path.name == "broken_19.py"


def test_what_a_setup_refuses_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    curriculum = ["--trainer.callbacks+=pl_grouprl.callbacks.Curriculum", "--trainer.callbacks.init_args.column=none"]
    with pytest.raises(SystemExit) as done:
        main(["fit", "--config", "grpo_pg.yaml", *curriculum])
    assert done.value.code == "error: train, row 0: column 'none' is None; write the level, an integer from 0."


@pytest.mark.parametrize("bug", ["raise ValueError('own')", "self.sources = {'train': 1}; super().setup(stage)"])
def test_any_other_error_of_a_setup_is_raised_as_it_is(bug, tmp_path, monkeypatch):
    (tmp_path / "broken_20.py").write_text(
        f"import pl_grouprl\n\nclass Broken(pl_grouprl.PromptDataModule):\n    def setup(self, stage):\n        {bug}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_20", raising=False)
    with pytest.raises((ValueError, TypeError)):
        main(["fit", "--config", "grpo_pg.yaml", "--config", "data: {class_path: broken_20.Broken}"])


def test_a_missing_package_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("pl_grouprl.utilities.optional.VLLM_AVAILABLE", False)
    arguments = ["--config", "grpo_pg.yaml", "--config", "rollout/vllm_colocate.yaml"]
    assert usage_error(capsys, "fit", *arguments).splitlines()[-1].startswith("error: VLLMRolloutEngine needs an opt")
    main(["plan", *arguments])  # starts no engine
    assert "Not counted: prefill" in capsys.readouterr().out
    assert not optional.VLLM_AVAILABLE
