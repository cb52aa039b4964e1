"""Runners of tools that are closed in the end."""

import threading

import pytest

from pl_grouprl.episodes.runner import ToolRunner


@pytest.fixture
def gate():
    """Blocks until the test is over."""
    gate = threading.Event()
    before = set(threading.enumerate())
    yield gate
    gate.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)


@pytest.fixture
def make(gate):
    runners = []

    def make(*args, **kwargs):
        runners.append(ToolRunner(*args, **kwargs))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()
