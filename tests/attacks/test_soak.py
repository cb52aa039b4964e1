"""A long run keeps no memory and leaves nothing behind."""

from pathlib import Path

import pytest
from helpers.scripts import run_script

SCRIPT = """import sys
if __name__ == "__main__":  # reward workers import this script again
    sys.path.insert(0, sys.argv.pop(1))
    import soak
    sys.exit(soak.main())
"""


@pytest.mark.parametrize(
    ("steps", "tools"),
    [
        (5, ["--tools", "worker"]),
        pytest.param(5, [], marks=pytest.mark.slow),
        pytest.param(5, ["--tools", "threads"], marks=pytest.mark.slow),
        pytest.param(300, [], marks=pytest.mark.slow),
        pytest.param(300, ["--tools", "threads"], marks=pytest.mark.slow),
        pytest.param(300, ["--tools", "worker"], marks=pytest.mark.slow),
    ],
)
def test_a_run_leaves_nothing(steps, tools, record_property, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    options = [Path(__file__).parent, "--steps", steps, *tools]
    done = run_script(tmp_path / "script.py", *options, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    record_property("figure", done.stdout.splitlines()[-1])
