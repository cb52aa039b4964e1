"""Runners of tools that are closed in the end."""

import pytest

from pl_grouprl.episodes.runner import ToolRunner


@pytest.fixture
def make():
    runners = []

    def make(*args, **kwargs):
        runners.append(ToolRunner(*args, **kwargs))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()
