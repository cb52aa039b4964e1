"""What the command line says of the data, and does with a length limit that is added later."""

import json

import pytest
from helpers.cli_runs import LAYER, ROOT
from helpers.scripts import run_script

from pl_grouprl.cli import main

FRAGMENT = f"""
model:
  init_args:
    policy:
      init_args:
        demonstrations: {{init_args: {{prompt_length: 20}}}}
        architecture: {LAYER[:-1]}, max_position_embeddings: 64}}
        steps: 2
        batch_size: 4
        cache_dir: %(folder)s/cache
        progress_bar: false
    num_generations: 2
    num_mini_batches: 2
    sampling: {{max_new_tokens: 4}}
    sharing: {{verify: false}}
data:
  init_args:
    train: %(folder)s/train.jsonl
    val: %(folder)s/train.jsonl
    test: null
    batch_size: 4
trainer:
  max_steps: 3
  val_check_interval: 100
  limit_val_batches: 0
  num_sanity_val_steps: 0
  enable_progress_bar: false
  logger:
    - class_path: lightning.pytorch.loggers.CSVLogger
      init_args: {{save_dir: %(folder)s/runs, name: small}}
  callbacks:
    - class_path: pl_grouprl.callbacks.SafeCheckpoint
      init_args: {{every_n_train_steps: 3}}
"""


@pytest.fixture
def arguments(tmp_path):
    """100 rows of 20 to 29 digits, ten of each length."""
    rows = [{"prompt": f"{number:02d}" + "7" * (18 + number % 10), "answer": "seven"} for number in range(100)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "fragment.yaml").write_text(FRAGMENT % {"folder": tmp_path})
    return ["--config", str(ROOT / "configs" / "grpo_pg.yaml"), "--config", str(tmp_path / "fragment.yaml")]


LIMIT = "--data.init_args.max_prompt_length"


def test_the_command_line_prints_what_is_dropped(arguments, tmp_path):
    options = [*arguments, LIMIT, "23", "--trainer.fast_dev_run", "1"]
    done = run_script(ROOT / "cli.py", "fit", *options, cwd=tmp_path)
    printed = (done.stdout + done.stderr).splitlines()
    assert "train: 100 rows, 40 kept, 60 dropped (longer than max_prompt_length=23), 0 truncated" in printed


def test_a_limit_that_is_added_resumes_in_the_middle_of_rollouts(arguments, tmp_path):
    main(["fit", *arguments])
    (checkpoint,) = tmp_path.glob("runs/small/version_0/checkpoints/*.ckpt")
    resumed = ["fit", *arguments, "--ckpt_path", str(checkpoint), "--trainer.max_steps", "6"]
    main([*resumed, LIMIT, "23"])
    assert (tmp_path / "runs" / "small" / "version_1" / "metrics.csv").read_text()
    assert list(tmp_path.glob("runs/small/version_1/checkpoints/*step=6*.ckpt"))


def test_a_prompt_beyond_the_model_is_refused_before_the_policy_is_made(arguments, tmp_path):
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('{"prompt": "' + "1" * 61 + '", "answer": "one"}\n')
    with pytest.raises(SystemExit, match=r"^error: .*train\.jsonl, line 101: .* max_prompt_length=60"):
        main(["fit", *arguments])
    assert not (tmp_path / "cache").exists()
