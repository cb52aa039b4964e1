"""A long run keeps no memory and leaves nothing behind."""

from pathlib import Path

import pytest
from helpers.scripts import run_script

SCRIPT = Path(__file__).with_name("soak.py")


@pytest.mark.parametrize("steps", [10, pytest.param(300, marks=pytest.mark.slow)])
def test_a_run_leaves_nothing(steps, record_property):
    done = run_script(SCRIPT, "--steps", steps, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    record_property("figure", done.stdout.splitlines()[-1])
