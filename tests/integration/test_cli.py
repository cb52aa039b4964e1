"""Whole runs through the command line, in the small."""

import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from helpers.cli_runs import LAYER, ROOT, SIZES, config_of, print_config, usage_error
from helpers.scripts import run_script
from helpers.sweeps import sweep, sweep_pairs
from jsonargparse import Namespace

from pl_grouprl.cli import RLCLI, find_config, last_checkpoint, main

SMALL = f"""
model:
  init_args:
    policy:
      init_args:
        demonstrations: {{init_args: {{prompt_length: 20}}}}
        architecture: {LAYER}
        steps: 5
        batch_size: 4
        cache_dir: %(folder)s/cache
        progress_bar: false
    num_generations: 4
    evaluation: {{num_generations: 2}}
    sampling: {{max_new_tokens: 4}}
data:
  init_args:
    train: {{init_args: {{{SIZES}}}}}
    val: {{init_args: {{{SIZES}}}}}
    test: {{init_args: {{{SIZES}}}}}
    batch_size: 2
trainer:
  max_steps: 4
  val_check_interval: 2
  enable_progress_bar: false
  logger:
    - {{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {{save_dir: %(folder)s/runs, name: small}}}}
    - {{class_path: lightning.pytorch.loggers.TensorBoardLogger, init_args: {{save_dir: %(folder)s/runs, name: small}}}}
  callbacks:
    - class_path: pl_grouprl.callbacks.SafeCheckpoint
      init_args: {{every_n_train_steps: 2, save_top_k: -1, save_last: true}}
    - class_path: pl_grouprl.callbacks.ValidateAtStart
    - {{class_path: pl_grouprl.callbacks.SharedPrefixCallback, init_args: {{measure_every_n_steps: 2}}}}
    - {{class_path: pl_grouprl.callbacks.CompletionsTable, init_args: {{every_n_steps: 2}}}}
    - class_path: pl_grouprl.callbacks.ExportPolicy
    - class_path: pl_grouprl.callbacks.RunSummary
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The default run in the small: its own configuration and a fragment over it."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "small.yaml").write_text(SMALL % {"folder": folder})
    return ["--config", "grpo_pg.yaml", "--config", str(folder / "small.yaml")]


@pytest.fixture(scope="module")
def run(small):
    """The folder of a finished run."""
    main(["fit", *small])
    return Path(small[-1]).parent / "runs" / "small" / "version_0"


def versions(run):
    return sorted(run.parent.iterdir(), key=lambda path: int(path.name.split("_")[1]))


def weights(checkpoint):
    return torch.load(checkpoint, weights_only=True)["state_dict"]


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def test_fit_leaves_everything_in_one_folder(run, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    names = {path.name for path in run.iterdir()}
    files = {"completions.jsonl", "config.yaml", "curves.png", "options.json", "metrics.csv", "summary.json"}
    assert files | {"checkpoints", "policy"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    metrics = summary(run)["metrics"]
    assert metrics["val/rewards/exact_match/mean"]["count"] == 3  # steps 0, 2, 4
    assert metrics["reward"]["count"] == 4
    assert metrics["prefix/token_ratio"]["mean"] > 1
    assert {"perf/tokens_per_second", "prefix/measured_speedup", "time/rollout"} <= set(metrics)
    assert all(math.isfinite(value) for values in metrics.values() for value in values.values())
    trained = weights(run / "checkpoints" / "last.ckpt")
    for name, value in AutoModelForCausalLM.from_pretrained(run / "policy").state_dict().items():
        assert torch.equal(value, trained[f"policy.{name}"]), name
    assert AutoTokenizer.from_pretrained(run / "policy").decode([2, 3], skip_special_tokens=True) == "01"
    assert config_of(capsys, run / "config.yaml") == yaml.safe_load((run / "config.yaml").read_text())


def test_resume_from_a_path_ends_where_the_whole_run_ended(run, small):
    (halfway,) = (run / "checkpoints").glob("*step=2.ckpt")
    main(["fit", *small, "--ckpt_path", str(halfway)])
    resumed = versions(run)[-1]
    assert resumed != run
    whole, again = (weights(folder / "checkpoints" / "last.ckpt") for folder in (run, resumed))
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_resume_from_the_last_checkpoint_goes_on(run, small):
    main(["fit", *small, "--ckpt_path", "last", "--trainer.max_steps", "5"])
    found = summary(versions(run)[-1])
    assert (found["steps"], found["metrics"]["reward"]["count"]) == (5, 5)


def test_a_checkpoint_brings_no_options_over_the_command_line(run, small, capsys):
    options = ["--ckpt_path", run / "checkpoints" / "last.ckpt", "--model.init_args.beta", "0.125"]
    assert print_config(capsys, "fit", *small, *options)[0]["model"]["init_args"]["beta"] == 0.125


def test_the_last_checkpoint_of_a_trainer_without_a_logger(tmp_path):
    from lightning.pytorch import Trainer

    trainer = Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path)
    other, own = (folder / "checkpoints" / "last.ckpt" for folder in (tmp_path / "other_project", tmp_path))
    other.parent.mkdir(parents=True)
    other.touch()
    with pytest.raises(ValueError, match="no complete checkpoint below"):
        last_checkpoint(trainer)
    own.parent.mkdir()
    torch.save({}, own)
    own.with_name("torn.ckpt").write_bytes(own.read_bytes()[:-20])
    with pytest.warns(UserWarning, match=r"skips .*torn\.ckpt"):
        assert last_checkpoint(trainer) == str(own)


def test_last_of_a_run_with_other_options_is_refused(run, small):
    with pytest.raises(ValueError, match=r"num_generations is 3 \(was 4\)"):
        main(["fit", *small, "--ckpt_path", "last", "--model.init_args.num_generations", "3"])


@pytest.fixture(scope="module")
def damaged(run, tmp_path_factory):
    """A copy of a checkpoint with one byte of its weights changed."""
    path = tmp_path_factory.mktemp("damaged") / "last.ckpt"
    content = bytearray((run / "checkpoints" / "last.ckpt").read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)
    shutil.copy(run / "checkpoints" / "last.ckpt.manifest.json", path.parent)
    return path


@pytest.mark.parametrize("command", sweep(["fit", "validate", "test", "parity"], quick=["fit", "parity"]))
def test_a_damaged_checkpoint_and_code_in_one_are_refused_by_every_command(run, damaged, small, command):
    with pytest.raises(ValueError, match=rf"{re.escape(str(damaged))} is damaged"):
        main([command, *small, "--ckpt_path", str(damaged)])
    with pytest.raises(ValueError, match="weights_only is False"):
        main([command, *small, "--ckpt_path", str(run / "checkpoints" / "last.ckpt"), "--weights_only", "false"])


def test_a_run_without_a_logger_saves_its_config_in_a_folder_of_its_own(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("mine")
    options = ["--trainer.max_steps", "1", "--trainer.callbacks", "null", "--trainer.val_check_interval", "1"]
    options += ["--trainer.logger", "false", "--trainer.enable_checkpointing", "false"]
    for command in ("fit", "validate"):
        main([command, *small, *options])
        assert Path("config.yaml").read_text() == "mine"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "version_0"]
    assert yaml.safe_load(Path("version_0", "config.yaml").read_text())["trainer"]["max_steps"] == 1


def test_a_config_that_the_run_has_not_saved_is_untouched(small, tmp_path):
    mine = tmp_path / "fixed" / "config.yaml"
    mine.parent.mkdir()
    mine.write_text("mine")
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger"}
    logger["init_args"] = {"save_dir": str(tmp_path), "name": "", "version": "fixed"}
    with pytest.raises(SystemExit, match=r"^error: SaveConfig would write to .*fixed/config\.yaml"):
        main(["fit", *small, "--trainer.callbacks", "null", "--trainer.logger", yaml.safe_dump([logger])])
    assert mine.read_text() == "mine"


@pytest.mark.parametrize(
    ("command", "prefix"), sweep_pairs([("validate", "val"), ("test", "test")], quick=[("test", "test")])
)
def test_evaluation_reports_every_metric_and_completion(run, small, command, prefix, capsys):
    main([command, *small, "--ckpt_path", str(run / "checkpoints" / "last.ckpt")])
    shown = capsys.readouterr().out
    metrics = ("mean@2", "best@2", "maj@2", "pass@1", "pass@2")
    assert all(f"{prefix}/most_frequent_digit/{metric}" in shown for metric in metrics)
    assert re.search("data source +" + " +".join(metrics), shown)
    rows = (versions(run)[-1] / f"{prefix}_completions.jsonl").read_text().splitlines()
    assert [json.loads(row)["group"] for row in rows] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_file_is_tested_with_the_last_checkpoint_and_more_rollouts(run, small, tmp_path, capsys):
    rows = [{"prompt": "1223", "answer": "two"}, {"prompt": "4445", "answer": "four", "data_source": "fours"}]
    (tmp_path / "file.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--ckpt_path", "last", "--data.init_args.test", str(tmp_path / "file.jsonl")]
    main(["test", *small, *options, "--model.init_args.evaluation.num_generations", "8"])
    shown = capsys.readouterr().out
    metrics = ("mean@8", "maj@8", *(f"pass@{k}" for k in (1, 2, 4, 8)))
    assert all(f"test/{source}/{metric}" in shown for source in ("default", "fours") for metric in metrics)
    assert len((versions(run)[-1] / "test_completions.jsonl").read_text().splitlines()) == 16


def test_fast_dev_run_leaves_nothing_behind(run, small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = versions(run)
    main(["fit", *small, "--trainer.fast_dev_run", "1"])
    assert versions(run) == before
    assert list(tmp_path.iterdir()) == []


def test_printed_config_is_a_config(small, capsys, tmp_path):
    config, text = print_config(capsys, "fit", *small)
    (tmp_path / "whole.yaml").write_text(text)
    assert config == config_of(capsys, tmp_path / "whole.yaml")
    assert config["trainer"]["max_steps"] == 4  # the fragment's
    assert config["model"]["init_args"]["epsilon"] == 0.2  # the first file's


CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize(
    ("name", "fragment"),
    sweep_pairs(
        itertools.product(CONFIGS, [None, "strategy/ddp"]),
        quick=[*((name, None) for name in CONFIGS), ("group_ppo", "strategy/ddp")],
    ),
)
def test_every_config_parses_without_network(name, fragment, capsys):
    config = config_of(capsys, *(file for file in (name, fragment) if file))
    algorithm = {"grpo": "GRPO", "ppo": "PPO", "group": "GroupPPO", "distillation": "Distillation"}[name.split("_")[0]]
    assert config["model"]["class_path"] == f"pl_grouprl.{algorithm}"
    assert config["trainer"]["strategy"] == ("auto" if fragment is None else "ddp")


def test_config_names_are_found_below_the_working_directory_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert find_config("grpo_pg") == str(ROOT / "configs" / "grpo_pg.yaml")
    Path("configs").mkdir()
    Path("configs/grpo_pg.yaml").touch()
    assert find_config("grpo_pg") == "configs/grpo_pg.yaml"
    assert find_config("{trainer: {max_steps: 1}}") == "{trainer: {max_steps: 1}}"
    shown = usage_error(capsys, "fit", "--config", "grpo_gp.yaml")
    assert "grpo_gp.yaml" in shown
    assert str(ROOT / "configs") in shown


def test_parity_of_a_run_and_of_a_folder(run, small, capsys, monkeypatch):
    from pl_grouprl.checks import ParityReport

    main(["parity", *small, "--model.init_args.sharing.backend", "reference"])
    assert re.search(r"whole model +\d+ +reference", capsys.readouterr().out)
    main(["parity", *small, "--ckpt_path", str(run / "checkpoints" / "last.ckpt")])
    main(["parity", "--config", str(run / "config.yaml")])  # as a run has saved it
    main(["parity", "--model", str(run / "policy")])
    assert capsys.readouterr().out.count("Qwen3ForCausalLM") >= 3
    with pytest.raises(ValueError, match="model is a path; pass --config"):
        main(["parity", "--model", str(run / "policy"), "--ckpt_path", "x.ckpt"])
    monkeypatch.setattr(ParityReport, "passed", property(lambda report: False))
    with pytest.raises(SystemExit) as stop:
        main(["parity", "--model", str(run / "policy")])
    assert stop.value.code == 1


def test_help_imports_little_beyond_lightning():
    done = run_script(ROOT / "cli.py", "--help", cwd=ROOT)
    assert all(f"\n    {command} " in done.stdout for command in ("fit", "validate", "test", "parity", "plan"))
    assert "chat --policy PATH" in " ".join(done.stdout.split())
    code = (
        "import sys, lightning.pytorch.cli\n"
        "before = set(sys.modules)\n"
        "from pl_grouprl.cli import main\n"
        "try: main(['fit', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before} & set(sys.argv[1:])))"
    )
    heavy = ["transformers", "tokenizers", "matplotlib", "pyarrow", "datasets", "prefix_grouper", "tensorboard"]
    done = subprocess.run([sys.executable, "-c", code, *heavy], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("command", "options", "expected"),
    [
        ("fit", {}, "bf16-mixed"),
        ("validate", {}, "bf16-mixed"),
        ("fit", {"accelerator": "cpu"}, "32-true"),
        ("fit", {"precision": "32-true"}, "32-true"),
        ("fit", {"plugins": [object()]}, None),  # may be a precision
        ("parity", {}, None),
    ],
)
def test_a_precision_is_chosen_where_none_is_set(command, options, expected, monkeypatch):
    """On a machine that says it has a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    cli = RLCLI.__new__(RLCLI)
    trainer = {"precision": None, "accelerator": "auto", "plugins": None, **options}
    cli.subcommand, cli.config = command, {command: {"trainer": trainer}}
    cli.before_instantiate_classes()
    assert trainer["precision"] == expected


@pytest.mark.parametrize(
    ("device", "accelerator", "expected"),
    [("h100", "cpu", "bf16-mixed"), (None, "auto", "bf16-mixed"), (None, "cpu", "32-true")],
)
def test_a_plan_for_a_gpu_has_its_precision_anywhere(device, accelerator, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cli = RLCLI.__new__(RLCLI)
    trainer = Namespace(precision=None, accelerator=accelerator, plugins=None)
    cli.subcommand, cli.config = "plan", {"plan": {"trainer": trainer, "device": device}}
    cli.before_instantiate_classes()
    assert cli._planned_options["precision"] == expected
