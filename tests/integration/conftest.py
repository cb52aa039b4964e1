"""Modules of benchmarks/, which is no package that is installed."""

import importlib
import sys

import pytest
from helpers.cli_runs import ROOT
from helpers.process_state import left_changed


@pytest.fixture
def load(monkeypatch):
    """Import a module of benchmarks/ by name; what its command sets up is put back."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(sys, "argv", ["pytest"])
    with left_changed():
        yield lambda name: importlib.import_module(f"benchmarks.{name}")
