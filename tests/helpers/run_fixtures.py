"""Fixtures of small runs, for the `conftest.py` of folders that train."""

from __future__ import annotations

from functools import partial

import pytest
from helpers import tiny_runs
from lightning.pytorch import seed_everything


@pytest.fixture(autouse=True)
def _seeded():
    seed_everything(1, verbose=False)


@pytest.fixture
def make_module():
    return tiny_runs.make_module


@pytest.fixture
def make_data():
    return tiny_runs.make_data


@pytest.fixture
def make_trainer(tmp_path):
    return partial(tiny_runs.make_trainer, tmp_path)


@pytest.fixture
def fit(tmp_path):
    """Train some steps; see `tiny_runs.fit`."""
    return partial(tiny_runs.fit, tmp_path)
