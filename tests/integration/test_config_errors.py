"""What the command line says to a misspelt name or a wrong value in a configuration."""

from pathlib import Path

import pytest
from helpers.scripts import run_script

from pl_grouprl.cli import main

ROOT = Path(__file__).resolve().parents[2]
PRETRAINED = "class_path: pl_grouprl.models.PretrainedPolicy"
NUMERIC = "class_path: pl_grouprl.rewards.NumericAnswer"
RUN_SUMMARY = "class_path: pl_grouprl.callbacks.RunSummary"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "model: {init_args: {optimizer: {learning_rat: 1.0}}}",
            "model: OptimizerConfig takes no 'learning_rat'; did you mean 'learning_rate'?",
        ),
        ("model: {class_path: pl_grouprl.GRP0}", "model: pl_grouprl has no 'GRP0'; did you mean 'GRPO'?"),
        (
            f"model: {{init_args: {{policy: {{{PRETRAINED}, init_args: {{path: x, adapter: {{alhpa: 3}}}}}}}}}}",
            "model.policy.adapter: LoRAAdapter takes no 'alhpa'; did you mean 'alpha'?",
        ),
        (
            f"model: {{init_args: {{rewards: [{{function: {{{NUMERIC}, init_args: {{metod: strict}}}}}}]}}}}",
            "model.rewards.function: NumericAnswer takes no 'metod'; did you mean 'method'?",
        ),
        (
            "model: {init_args: {rewards: [{class_path: pl_grouprl.rewards.ExactMatsh}]}}",
            "model.rewards: pl_grouprl.rewards has no 'ExactMatsh'; did you mean 'ExactMatch'?",
        ),
        (
            "model: {init_args: {loss_type: dappo}}",
            "model.loss_type: 'dappo' is not one of grpo, dr_grpo, dapo, bnpo, cispo, gspo, sapo; did you mean 'dapo'?",
        ),
        ("trainer: {precision: bf16_mixed}", "trainer.precision: 'bf16_mixed' is not one of int, transformer-engine"),
        (
            "model: {init_args: {max_tokens_per_micro_batch: many}}",
            "model.max_tokens_per_micro_batch: 'many' is not one of int, null.",
        ),
        ("model: {init_args: {num_generations: four}}", "model.num_generations: expected int, got four"),
        (
            "model: {init_arg: {num_generations: 4}}",
            "model: 'init_arg' is not 'init_args'; a class is written as class_path and init_args",
        ),
        (
            "data: {init_args: {batchsize: 3}}",
            "data: PromptDataModule takes no 'batchsize'; did you mean 'batch_size'?",
        ),
        (
            f"trainer: {{callbacks: [{{{RUN_SUMMARY}, init_args: {{every_n_step: 3}}}}]}}",
            "trainer.callbacks: RunSummary takes no 'every_n_step'; did you mean 'every_n_steps'?",
        ),
        ("model: {init_args: {num-generations: 4}}", "model: GRPO takes no 'num-generations'; did you mean 'num_gen"),
        ("model: {init_args: {sampling: hot}}", "model.sampling: 'hot' is neither a mapping of options"),
        (
            "model: {init_args: {branching: entropy}}",
            "model.branching: 'entropy' is not a mapping of the options of Branching (points, width, depth, every_n, "
            "budget); write {{points: entropy}}",
        ),
        ("model: {init_args: {branching: 3}}", "model.branching: '3' is not a mapping of the options of Branching (p"),
        ("model: {class_path: nowhere.GRPO}", "model: nowhere.GRPO cannot be imported: No module named 'nowhere'"),
        (
            "model: {init_args: {rewards: [{class_path: nowhere.Own}]}}",
            "model.rewards: nowhere.Own cannot be imported: No module named 'nowhere'",
        ),
        (
            "model: {init_args: {rewards: [{function: nowhere.own}]}}",
            "model.rewards.function: nowhere.own cannot be imported: No module named 'nowhere'; modules are searched",
        ),
        ("model: {init_args: {rewards: nowhere.own}}", "model.rewards: the function cannot be imported: No module"),
        (
            "model: {init_args: {scale_rewards: false}}",
            "one of group, batch, none, null. False is 'none' and True is",
        ),
        (
            "model: {init_args: {gradient_checkpointing: true}}",
            "model: GRPO takes no 'gradient_checkpointing'; here it is "
            "model.init_args.policy.init_args.gradient_checkpointing.",
        ),
        ("model: {init_args: {learning_rate: 0.1}}", "it is part of optimizer: optimizer: {{learning_rate: ...}}."),
        (
            "algorithm: {adv_estimator: gae}",
            "the configuration has no 'algorithm.adv_estimator'; here it is model.init_args.advantage_estimator.",
        ),
        ("model: {class_path: torch.nn.Linear}", "model: torch.nn.Linear is not a LightningModule"),
        ("model: 3", "model: '3' is not one of LightningModule, null."),
        ("- a", "{path} has no groups of options, such as `trainer: {{max_steps: 100}}`."),
        ("# all commented out", "{path} has no groups of options"),
        ("model: {init_args: [}", "{path} is not YAML: while parsing a flow node"),
    ],
)
def test_a_wrong_name_or_value_is_answered_in_one_line(text, error, tmp_path, capsys):
    path = tmp_path / "typo.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit):
        main(["fit", "--config", "grpo_pg.yaml", "--config", str(path), "--print_config"])
    printed = capsys.readouterr().err
    assert error.format(path=path) in printed.split("error: ")[1].splitlines()[0]
    assert "NestedArg" not in printed
    assert "Union subtypes" not in printed


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["actor_rollout_ref.rollout.n=4"],
            "actor_rollout_ref.rollout.n=4 is written --model.init_args.num_generations 4 ",
        ),
        (["+trainer.total_epochs=2", "x"], "+trainer.total_epochs=2 is written --trainer.max_epochs 2 x here."),
        (["--num_generations", "4"], "--num_generations is written --model.init_args.num_generations 4 here."),
        (["actor_rollout_ref.model.path=x"], "is written --model.init_args.policy x here."),
        (["critic.optim.lr=1e-5"], "is written --model.init_args.critic_optimizer.learning_rate 1e-5 here."),
        (["critic.model.path=x"], "is written --model.init_args.critic x here."),
        (["critic.model.lora_rank=8"], "unrecognized arguments: critic.model.lora_rank=8;"),
        (["actor.ppo_mini_batch_size=4"], "--model.init_args.num_mini_batches ... here. It is a number of parts"),
        (["nonsense"], "unrecognized arguments: nonsense; options are written --trainer.max_steps 100."),
        (["--trainer.max_step", "4"], "--trainer.max_step 4; did you mean --trainer.max_steps?"),
        (["--trainer.max_step=4"], "--trainer.max_step=4; did you mean --trainer.max_steps?"),
    ],
)
def test_an_option_written_as_in_trl_or_verl(arguments, error, capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--config", "base/grpo.yaml", *arguments])
    printed = capsys.readouterr().err
    assert error in printed
    assert "usage" not in printed
    assert len(printed.splitlines()) == 2


def test_an_adapter_over_a_policy_given_by_its_path(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--config", "base/grpo.yaml", "--model.init_args.policy", "x", "--config", "adapter/lora.yaml"])
    remedy = "write policy: {class_path: pl_grouprl.models.PretrainedPolicy, init_args: {path: ...}}.\n"
    assert f"error: model.policy: a path alone takes no init_args; {remedy}" in capsys.readouterr().err


def test_a_missing_sub_command_is_answered_with_the_usage(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "usage" in capsys.readouterr().err


def test_functions_are_imported_from_the_working_directory(tmp_path):
    (tmp_path / "own_rewards_26.py").write_text("def correct(completions, **columns):\n    return [0.0]\n")
    rewards = "model: {init_args: {rewards: [{function: own_rewards_26.correct}]}}"
    arguments = ["fit", "--config", "base/grpo.yaml", "--config", rewards, "--print_config"]
    done = run_script(ROOT / "cli.py", *arguments, cwd=tmp_path)
    assert "own_rewards_26.correct" in done.stdout, done.stderr


def test_a_wrong_value_of_a_class_of_ones_own(tmp_path, monkeypatch, capsys):
    (tmp_path / "own_reward_19.py").write_text(
        "class Own:\n    def __init__(self, a: int = 3): pass\n    def __call__(self, **columns): return []\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    text = "model: {init_args: {rewards: [{class_path: own_reward_19.Own, init_args: {a: x}}]}}"
    with pytest.raises(SystemExit):
        main(["fit", "--config", "grpo_pg.yaml", "--config", text, "--print_config"])
    assert "error: model.rewards.a: expected int, got x\n" in capsys.readouterr().err


def test_an_error_that_is_none_of_these_is_shown_as_it_is(capsys):
    """Only a list of nothing but wrong types may be summed up as such."""
    with pytest.raises(SystemExit):
        main(["fit", "--config", "grpo_pg.yaml", "--config", "model: {init_args: {3: 4}}", "--print_config"])
    assert "Key must be a string, got: 3." in capsys.readouterr().err


def test_a_wrong_option_on_the_command_line(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--config", "grpo_pg.yaml", "--model.init_args.num_generation", "4", "--print_config"])
    assert "error: model: GRPO takes no 'num_generation'; did you mean 'num_generations'?" in capsys.readouterr().err


@pytest.mark.parametrize("config", ["grpo", "ppo"])
def test_a_base_configuration_alone_says_what_is_missing(config, capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--config", f"base/{config}.yaml"])
    printed = capsys.readouterr().err
    assert f"error: model: pl_grouprl.{config.upper()} needs init_args.policy; add it to a configuration" in printed
    assert "Namespace" not in printed


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["plan", "--config", "grpo_pg.yaml", "--model.init_args.num_generations", "1"], "num_generations is 1; grpo"),
        (["fit", "--config", "base/grpo.yaml", "--model.init_args.policy", "x"], "rewards is None; pass a reward fun"),
    ],
)
def test_what_a_constructor_refuses_is_one_line(arguments, error, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    printed = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert printed[-1].startswith(f"error: {error}")
    assert [line for line in printed if "Seed set" not in line] == printed[-1:]


def test_any_other_error_of_a_constructor_is_raised_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "broken_19.py").write_text(
        "import pl_grouprl\n\nclass Broken(pl_grouprl.GRPO):\n"
        "    def __init__(self, *args, **kwargs):\n        [][1]\n        super().__init__(*args, **kwargs)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(IndexError, match=r"^list index out of range$") as raised:
        main(["fit", "--config", "grpo_pg.yaml", "--config", "model: {class_path: broken_19.Broken}"])
    assert raised.traceback[-1].path.name == "broken_19.py"


@pytest.mark.parametrize(("group", "example"), [("model", "pl_grouprl.GRPO"), ("data", "pl_grouprl.PromptDataModule")])
def test_options_without_their_class(group, example, capsys):
    with pytest.raises(SystemExit):
        main(["plan", f"--{group}.init_args.seed", "1"])
    assert (
        f"error: {group}: no class_path is given; pass a configuration that has one, or --{group} {example} before"
        in (capsys.readouterr().err)
    )
