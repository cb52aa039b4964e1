"""Ranks of a trainer that sample with vLLM: each with an engine, or several with one."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pl_grouprl.rollout.vllm import settings as ranks
from pl_grouprl.rollout.vllm.settings import engine_arguments, engine_environment, engine_group, share_requests


@pytest.mark.vllm
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_any_sharing_of_engines_samples_the_same(tmp_path, count):
    """Also where some ranks have no episodes."""
    command = [sys.executable, Path(__file__).with_name("turns_ranks.py"), tmp_path, str(count)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]


def test_rollouts_return_to_their_ranks(monkeypatch):
    assert engine_group(1) is None
    assert share_requests([[1, 2], [3]], None) == ([[1, 2], [3]], slice(0, 2))
    everyone = [[10, 11], [], [12]]
    monkeypatch.setattr(ranks, "gather_plain", lambda value, group: everyone)
    for rank, own in enumerate(everyone):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group, rank=rank: rank)
        requests, place = share_requests(own, "group")
        assert (requests, requests[place]) == ([10, 11, 12], own)


def test_vllm_takes_the_trainers_gpu():
    """Devices are counted in this process: the rank's number on the machine may be another."""
    environment = engine_environment(torch.device("cuda", 3))
    assert environment == {"RANK": "0", "LOCAL_RANK": "3", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    assert engine_environment(torch.device("cpu"))["LOCAL_RANK"] == "0"


def test_ranks_that_an_engine_cannot_have_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="tensor_parallel_size is 2"):
        engine_arguments(2)
    monkeypatch.setattr(ranks, "num_ranks", lambda: 6)
    with pytest.raises(ValueError, match="tensor_parallel_size is 4"):
        engine_arguments(4)
    assert engine_arguments(3) == {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": 3}
