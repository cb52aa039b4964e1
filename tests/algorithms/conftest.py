import sys
from pathlib import Path

import pytest

if (tests := str(Path(__file__).resolve().parents[1])) not in sys.path:  # scripts of ranks import this file, too
    sys.path.insert(0, tests)

from helpers.run_fixtures import _seeded, fit, make_data, make_module, make_trainer  # noqa: F401
from helpers.tiny_runs import History, RaggedEngine, ScriptedEngine, TinyPolicy, gradients_of, share_of_letters  # noqa: F401


@pytest.fixture
def tiny_policy():
    return TinyPolicy


@pytest.fixture
def scripted_engine():
    return ScriptedEngine()


@pytest.fixture
def parameters():
    """Copy of a module's trained weights."""
    return lambda module: [p.detach().clone() for p in module.policy.parameters()]


@pytest.fixture
def ragged_engine():
    return RaggedEngine


@pytest.fixture
def history():
    return History


@pytest.fixture
def gradients():
    return gradients_of
