"""What other systems cannot do is refused with the remedy, or done in another way."""

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pl_grouprl.rewards.workers import RewardWorkers
from pl_grouprl.rollout.vllm.__main__ import main as start_server
from pl_grouprl.utilities import checkpoint_files, optional, reaper
from pl_grouprl.utilities import processes as worker_process
from pl_grouprl.utilities.checkpoint_files import commit, corruption_reason, link, read_manifest, remove_leftovers


def test_workers_where_there_are_no_process_groups(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delattr(os, "killpg")
    with pytest.raises(ValueError, match=r"tool_workers=2 does not work on win32: without.*; set it to 0"):
        worker_process.check_process_groups("tool_workers", 2)
    with pytest.raises(ValueError, match=r"reward_calls.workers=1 does not work on win32"):
        RewardWorkers([], 1, timeout=1.0)


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_a_memory_limit_outside_linux(system, monkeypatch):
    monkeypatch.setattr(sys, "platform", system)
    with pytest.raises(ValueError, match=rf"reward_calls.memory_limit_mb=99 does not work on {system}"):
        RewardWorkers([], 1, timeout=1.0, memory_limit_mb=99)


def test_vllm_where_it_cannot_be_installed(monkeypatch, capsys):
    monkeypatch.setattr(optional, "VLLM_AVAILABLE", False)
    optional.check_vllm_system("VLLMRolloutEngine")  # on Linux, the install command is the remedy
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match=r"VLLMRolloutEngine does not work on darwin: .*; sample with transformers"):
        optional.check_vllm_system("VLLMRolloutEngine")
    with pytest.raises(SystemExit):
        start_server(["--model", "m"])
    assert "the sampling server does not work on darwin: vLLM is built for Linux only" in capsys.readouterr().err


def test_killing_a_tree_whose_processes_cannot_be_listed(monkeypatch):
    """Then its process group is what is killed."""
    sent = []
    root = SimpleNamespace(
        pid=123456,
        suspend=lambda: sent.append(("kill", 123456, signal.SIGSTOP)),
        is_running=lambda: True,
        children=lambda recursive: [],
        kill=lambda: sent.append(("kill", 123456, signal.SIGKILL)),
    )
    monkeypatch.setattr(reaper.os, "killpg", lambda *target: sent.append(("killpg", *target)))
    reaper.kill_tree(root)
    assert sent == [
        ("kill", 123456, signal.SIGSTOP),
        ("killpg", 123456, signal.SIGKILL),
        ("kill", 123456, signal.SIGKILL),
    ]


@pytest.fixture
def saved(tmp_path):
    """A checkpoint with its manifest."""
    unfinished, target = tmp_path / "unfinished", tmp_path / "step=1.ckpt"
    torch.save({"weights": torch.ones(3)}, unfinished)
    commit(unfinished, target, {"step": 1})
    return target


@pytest.fixture
def no_links(monkeypatch):
    def refuse(*arguments, **options):
        raise OSError("a required privilege is not held")

    monkeypatch.setattr(Path, "symlink_to", refuse)


@pytest.mark.usefixtures("no_links")
def test_last_is_a_copy_where_links_are_not_allowed(saved, monkeypatch):
    last = saved.with_name("last.ckpt")
    with pytest.raises(OSError, match="privilege"):
        link(saved, last)
    monkeypatch.setattr(sys, "platform", "win32")
    for _ in range(2):  # the second replaces the first
        link(saved, last)
    assert not last.is_symlink()
    assert last.read_bytes() == saved.read_bytes()
    assert corruption_reason(last) is None
    assert read_manifest(last) == {"step": 1}


def test_no_signal_is_sent_to_find_out_who_lives(tmp_path, monkeypatch):
    """On Windows, signal 0 is a Ctrl-C."""

    def kill(process, number):
        raise AssertionError(f"signal {number} to {process}")

    leftover = tmp_path / f".last.ckpt.unfinished-{checkpoint_files.socket.gethostname()}-{os.getppid()}"
    leftover.touch()
    remove_leftovers(tmp_path)
    assert leftover.exists()  # its process lives
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(checkpoint_files.os, "kill", kill)
    remove_leftovers(tmp_path)
    assert not leftover.exists()
