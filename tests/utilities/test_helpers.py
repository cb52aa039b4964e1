"""What tests rely on: scripts run in processes of their own, and the process is put back after each test."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest
import torch
from helpers.process_state import left_changed
from helpers.scripts import ScriptFailedError, run_script


@pytest.fixture
def script(tmp_path):
    def write(text):
        (tmp_path / "script.py").write_text(text)
        return tmp_path / "script.py"

    return write


def test_ranks_are_processes_that_find_each_other(script, tmp_path):
    own = script(
        "import os, sys, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "ids = [None, None]\n"
        "dist.all_gather_object(ids, (__name__, os.getpid(), os.getcwd(), sys.argv[1:]))\n"
        "print(ids)\n"
        "dist.destroy_process_group()\n"
    )
    done = run_script(own, "a", 2, ranks=2, cwd=tmp_path)
    first, second = (eval(line) for line in done.stdout.splitlines() if line.startswith("[("))  # gloo may report, too
    assert first == second
    assert [own[::2] for own in first] == [("__main__", str(tmp_path))] * 2
    assert len({pid for _, pid, *_ in first} | {os.getpid()}) == 3
    assert first[0][3] == ["a", "2"]


def test_a_run_leaves_nothing_to_the_next(script):
    own = script(
        "import os, torch\n"
        "print(hasattr(torch, 'left'), os.environ.get('LEFT'))\n"
        "torch.left = os.environ['LEFT'] = '1'\n"
    )
    assert [run_script(own).stdout for _ in range(2)] == ["False None\n"] * 2


def test_an_error_of_a_rank_is_shown(script):
    own = script("import os\nif os.environ['RANK'] == '1': raise OSError('no space')\nos.kill(os.getpid(), 11)")
    message = r"rank 0 was ended by signal 11(.|\n)*rank 1 ended with 1:\n(.|\n)*no space"
    with pytest.raises(ScriptFailedError, match=message):
        run_script(own, ranks=2)


def test_at_the_timeout_all_that_a_script_has_started_ends(script, tmp_path):
    own = script(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        "open(sys.argv[1], 'w').write(str(child.pid))\n"
        "time.sleep(1000)\n"
    )
    with pytest.raises(ScriptFailedError, match="rank 0 was killed at the timeout"):
        run_script(own, tmp_path / "pid", timeout=1.5)
    status = Path("/proc", (tmp_path / "pid").read_text(), "status")
    while status.exists() and "zombie" not in status.read_text():
        time.sleep(0.01)


def test_what_is_left_changed_is_named_and_put_back():
    logger = logging.getLogger("left")
    before = logger.level, os.getcwd(), torch.get_num_threads()
    with left_changed() as changes:
        os.environ["PL_GLOBAL_SEED"] = "17"  # put back without a word
        logger.setLevel(logging.CRITICAL)
        os.environ["LEFT"] = "1"
        os.chdir("/")
        torch.set_num_threads(3)
        torch.set_default_dtype(torch.float64)
    assert [change.partition(" (was")[0] for change in changes] == [
        "the logger left with level 50",
        "the variable LEFT '1'",
        "the folder /",
        "torch's default dtype torch.float64",
        "torch's number of threads 3",
    ]
    assert (logger.level, os.getcwd(), torch.get_num_threads()) == before
    assert not {"LEFT", "PL_GLOBAL_SEED"} & os.environ.keys()
    assert torch.get_default_dtype() == torch.float32
