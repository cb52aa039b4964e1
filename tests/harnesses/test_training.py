"""Trains in an environment of the library verifiers, on a sampling server. Needs both, in two Python environments."""

import os
from pathlib import Path

import pytest
from helpers.serving import Server

from pl_grouprl.rollout import VLLMServerRolloutEngine

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

REPOSITORY = Path(__file__).resolve().parents[2]
VLLM_PYTHON = Path(os.environ.get("PL_GROUPRL_VLLM_PYTHON", REPOSITORY / ".venv-vllm/bin/python"))


@pytest.fixture(scope="module")
def url(model):
    if not VLLM_PYTHON.exists():
        pytest.skip(f"there is no {VLLM_PYTHON}; set PL_GROUPRL_VLLM_PYTHON")
    server = Server(model, model.parent / "log", python=VLLM_PYTHON).start()
    try:
        yield server.wait().url
    finally:
        server.stop()


def test_twenty_steps_teach_letters(example, model, url):
    rewards = example.train(model, VLLMServerRolloutEngine(url), steps=20)
    assert len(rewards) == 20
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
