"""Fake servers, and waits that are short."""

import pytest
from helpers.fake_sampler import FakeSampler
from helpers.tiny_models import tiny_model

from pl_grouprl.rollout.vllm import client as server_module
from pl_grouprl.rollout.vllm import scheduler as scheduler_module


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch):
    monkeypatch.setattr(server_module, "_LONGEST_WAIT", 0.1)
    monkeypatch.setattr(scheduler_module, "_FIRST_PAUSE", 0.01)
    monkeypatch.delenv("PL_GROUPRL_TOKEN", raising=False)


@pytest.fixture(scope="module")
def policy():
    return tiny_model("llama", tie_word_embeddings=False)


@pytest.fixture
def servers():
    made = []

    def make(**options):
        made.append(FakeSampler(**options))
        return made[-1]

    yield make
    for server in made:
        server.close()
