"""The pages about a run's output name what the default runs log, and quote messages that exist."""

import ast
import csv
import re
import sys
from pathlib import Path

import pytest
from helpers.cli_runs import ROOT, TASK, warm_started

import pl_grouprl
from pl_grouprl.algorithms import RLModule
from pl_grouprl.cli import main
from pl_grouprl.training.collector import Collector
from pl_grouprl.training.update import Updater

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import step_diagram

# The default runs, with a smaller task and model, and no files but the metrics.
SMALL = f"""
model: {{init_args: {{policy: {warm_started(".", steps=0)}, num_generations: 2}}}}
data: {{init_args: {{train: {TASK}, val: {TASK}, test: {TASK}, batch_size: 2}}}}
trainer:
  max_steps: 2
  val_check_interval: 1
  enable_progress_bar: false
  logger: {{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {{save_dir: logs, name: run}}}}
  callbacks: %s
"""
# Measured by these callbacks; the others of the configurations write files.
CALLBACKS = {
    "grpo_pg": "[{class_path: pl_grouprl.callbacks.SharedPrefixCallback, "
    "init_args: {verify: false, measure_every_n_steps: 1}}]",
    "ppo": "[]",
}


def named_on_the_page():
    text = "".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("reading_the_logs.md", "metrics.md"))
    cells = set(re.findall(r"`([^`\s]+)`", text))
    return [re.compile(re.sub(r"\\{\w+\\}", r"\\w+", re.escape(cell)).replace("@k", r"@\d+")) for cell in cells]


def is_named(metric, patterns):
    return any(pattern.fullmatch(metric) for pattern in patterns)


@pytest.mark.parametrize("config", ["grpo_pg", "ppo"])
def test_every_metric_of_a_default_run_is_documented(config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(SMALL % CALLBACKS[config])
    main(["fit", "--config", str(ROOT / "configs" / f"{config}.yaml"), "--config", "small.yaml"])
    (log,) = Path("logs").rglob("metrics.csv")
    with log.open() as file:
        logged = set(next(csv.reader(file))) - {"epoch", "step"}
    assert len(logged) > 40
    patterns = named_on_the_page()
    assert [metric for metric in sorted(logged) if not is_named(metric, patterns)] == []


def test_the_pages_do_not_name_everything():
    assert not is_named("reward/unknown", named_on_the_page())


def texts():
    """All text constants of the package, those of f-strings in parts."""
    for path in Path(pl_grouprl.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def is_joined(message, everything):
    """Whether a message consists of at most three stretches of the package's texts."""
    starts = {0}
    for _ in range(3):
        starts = {
            end
            for start in starts
            for end in range(start + 5, len(message) + 1)
            if any(message[start:end] in text for text in everything)
        } | (starts & {len(message)})
    return len(message) in starts


def test_quoted_messages_are_those_of_the_code():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    assert len(messages) > 10
    everything = ("\0".join(texts()),)
    assert [message for message in messages if not is_joined(message, everything)] == []
    assert not is_joined("out of memory in the kitchen", everything)


def test_the_diagram_is_the_tools_and_names_the_code():
    assert step_diagram.PATH.read_text(encoding="utf-8") == step_diagram.svg()
    homes = {"Collector": Collector, "Updater": Updater}
    for _, _, _, where, _ in step_diagram.ROLLOUT + step_diagram.UPDATE:
        owner, _, name = where.rpartition(".")
        assert hasattr(homes.get(owner, RLModule), name), where
