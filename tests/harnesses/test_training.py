"""Trains in an environment of the library verifiers, on vLLM's own server. Needs both, in two Python environments."""

import importlib
import sys
from pathlib import Path

import pytest

from tests.helpers.vllm_server import PlainServerEngine, vllm_python, vllm_server

pytest.importorskip("verifiers")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(EXAMPLES))  # verifiers imports the environment by name
    yield importlib.import_module("verifiers_environment")
    sys.path.remove(str(EXAMPLES))
    del sys.modules["verifiers_environment"]


@pytest.fixture(scope="module")
def model(example, tmp_path_factory):
    folder = tmp_path_factory.mktemp("letters") / "model"
    example.prepare(folder)
    return folder


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
