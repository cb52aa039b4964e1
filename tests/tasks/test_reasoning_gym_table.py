"""Tasks of the library build, split and score, in every process alike, or the page says why not."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import reasoning_gym_table as table

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_page_has_every_task_of_the_library():
    page = (ROOT / "docs" / "reasoning_gym_tasks.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(rows) == sorted([*table.task_names(), *table.NOT_TASKS])
    good, names = re.search(r"(\d+) of (\d+) tasks build, split and score", page).groups()
    assert (int(good), int(names)) == (len(table.task_names()) - len(table.FAULTY), len(table.task_names()))
    assert table.conditions().split(", ")[0] in page


@pytest.mark.slow
def test_every_task_builds_splits_and_scores(capfd):
    found = table.examine(table.task_names())
    problems = {name: findings.problems for name, findings in found.items() if findings.problems}
    assert problems.keys() == table.FAULTY.keys(), problems
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "reasoning_gym_table.py"), "--scores"],
        check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONHASHSEED": "11"},
    )  # fmt: skip
    scores = json.loads(done.stdout.splitlines()[-1])
    assert scores == {name: findings.scores for name, findings in found.items()}
