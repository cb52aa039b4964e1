"""A policy and a critic with adapters through the command line, in the small."""

import peft
import pytest
import torch
import yaml
from helpers.cli_runs import TASK, usage_error, warm_started
from helpers.sweeps import sweep, sweep_pairs

from pl_grouprl.cli import main

SMALL = f"""
model:
  class_path: pl_grouprl.PPO
  init_args:
    policy: {warm_started("%(folder)s", more=", adapter: {r: 4, alpha: 8, use_dora: true}")}
    critic:
      class_path: pl_grouprl.models.LoRACritic
      init_args: {{r: 4, target_modules: [q_proj, up_proj], head_std: 0.05, seed: 3}}
    rewards: [{{class_path: pl_grouprl.rewards.LeadingCorrectCharacters}}]
    num_generations: 4
    sampling: {{max_new_tokens: 4}}
    beta: 0.05
    optimizer: {{learning_rate: 1.0e-2}}
data:
  class_path: pl_grouprl.PromptDataModule
  init_args: {{train: {TASK}, val: {TASK}, batch_size: 4, val_batch_size: 4}}
trainer:
  accelerator: cpu
  max_steps: 2
  num_sanity_val_steps: 0
  limit_val_batches: 1
  enable_progress_bar: false
  logger:
    - class_path: lightning.pytorch.loggers.CSVLogger
      init_args: {{save_dir: %(folder)s, name: runs}}
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {{save_last: true}}
    - class_path: pl_grouprl.callbacks.ExportPolicy
      init_args: {{adapter: separate}}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    (folder / "config.yaml").write_text(SMALL % {"folder": folder})
    main(["fit", "--config", str(folder / "config.yaml")])
    return folder / "config.yaml"


def test_what_a_run_leaves(config):
    run = config.parent / "runs" / "version_0"
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["state_dict"]
    assert all("lora_" in name or name.startswith("critic.head.") for name in saved["state_dict"])
    options = peft.PeftConfig.from_pretrained(run / "policy")
    assert (options.r, options.lora_alpha, options.use_dora) == (4, 8, True)
    written = yaml.safe_load((run / "config.yaml").read_text())["model"]["init_args"]
    assert written["policy"]["init_args"]["adapter"]["r"] == 4
    assert written["critic"]["init_args"]["target_modules"] == ["q_proj", "up_proj"]


@pytest.mark.parametrize("command", sweep(["validate", "parity", "fit"], quick=["parity", "fit"]))
def test_its_checkpoint_is_used(config, command):
    """`parity` exits where a report fails, and the others where the checkpoint does not fit."""
    more = ["--trainer.max_steps", "3"] if command == "fit" else []
    main([command, "--config", str(config), "--ckpt_path", "last", *more])


OTHERS = [
    ("policy.init_args.adapter.alpha=64", r"policy .*: default.alpha is 64 \(was 8\)"),
    ("critic.init_args.alpha=64", r"critic .*: critic.alpha is 64 \(was 32\)"),
    ("policy.init_args.steps=3", "is a different model"),
]


@pytest.mark.parametrize(
    ("command", "other", "difference"),
    sweep_pairs(
        [(command, *other) for command in ("parity", "validate") for other in OTHERS],
        quick=[("parity", *OTHERS[0]), ("validate", *OTHERS[1]), ("parity", *OTHERS[2])],
    ),
)
def test_a_checkpoint_of_another_base_or_adapter_is_refused(config, tmp_path, command, other, difference):
    options = [f"--model.init_args.{other}", "--model.init_args.policy.init_args.cache_dir", str(tmp_path)]
    with pytest.raises(ValueError, match=difference):
        main([command, "--config", str(config), "--ckpt_path", "last", *options])


def test_a_pretrained_policy_with_an_adapter(config, capsys, tmp_path):
    run = config.parent / "runs" / "version_0"
    (base,) = (config.parent / "cache").iterdir()
    policy = {
        "class_path": "pl_grouprl.models.PretrainedPolicy",
        "init_args": {"path": str(base), "adapter": {"path": str(run / "policy")}},
    }
    over = {"model": {"init_args": {"policy": policy, "critic": None}}}
    (tmp_path / "over.yaml").write_text(yaml.safe_dump(over))
    main(["parity", "--config", str(config), "--config", str(tmp_path / "over.yaml")])
    rank = "--model.init_args.policy.init_args.adapter.rank"
    assert "rank" in usage_error(capsys, "parity", "--config", config, rank, "4")
