"""A long run keeps no memory and leaves nothing behind."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("soak.py")


@pytest.mark.parametrize("steps", [30, pytest.param(300, marks=pytest.mark.slow)])
def test_a_run_leaves_nothing(steps, record_property):
    command = [sys.executable, str(SCRIPT), "--steps", str(steps)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    record_property("figure", done.stdout.splitlines()[-1])
