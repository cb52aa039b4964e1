"""Trains in an environment of the library verifiers, on vLLM's own server. Needs both, in two Python environments."""

import pytest

from tests.helpers.vllm_server import PlainServerEngine, vllm_python, vllm_server

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def url(model):
    if not vllm_python().exists():
        pytest.skip(f"there is no {vllm_python()}; set PL_GROUPRL_VLLM_PYTHON")
    with vllm_server(model, model.parent / "log") as url:
        yield url


def test_twenty_steps_teach_letters(example, model, url):
    rewards = example.train(model, PlainServerEngine(url), steps=20)
    assert len(rewards) == 20
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
