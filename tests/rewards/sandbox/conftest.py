"""A sandbox for each file, and a mark by which its programs are found."""

import os
import time

import pytest
from helpers.sandboxes import make_sandbox


@pytest.fixture(scope="module")
def sandbox():
    return make_sandbox()


@pytest.fixture
def marker():
    """A word in the command lines of what a program starts, by which survivors are found."""
    return f"marked-{os.getpid()}-{time.monotonic_ns()}"
