"""The example with an environment of the library verifiers, where that is installed."""

import importlib
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def example():
    pytest.importorskip("verifiers")
    sys.path.insert(0, str(EXAMPLES))  # verifiers imports the environment by name
    yield importlib.import_module("verifiers_environment")
    sys.path.remove(str(EXAMPLES))
    del sys.modules["verifiers_environment"]


@pytest.fixture(scope="module")
def model(example, tmp_path_factory):
    folder = tmp_path_factory.mktemp("letters") / "model"
    example.prepare(folder)
    return folder
