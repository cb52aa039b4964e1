"""Episodes that cannot begin."""

from types import SimpleNamespace

import pytest
from helpers.worker_tools import Counter

from pl_grouprl.episodes.limits import EpisodeLimits
from pl_grouprl.episodes.loop import EpisodeLoop
from pl_grouprl.episodes.runner import ToolRunner
from pl_grouprl.types import Prompt


def test_environments_are_released_if_a_prompt_cannot_be_rendered():
    made = []

    def factory():
        made.append(Counter())
        return made[-1]

    def encode_prompt(messages, tools):
        raise ValueError("the template refuses it")

    sampler = SimpleNamespace(max_length=None, raise_together=lambda run: run())
    runner = ToolRunner(environment_factory=factory)
    loop = EpisodeLoop(SimpleNamespace(encodes_prompts=True, encode_prompt=encode_prompt), runner, EpisodeLimits())
    prompts = [Prompt([1], prompt=[{"role": "user", "content": "Hello."}], columns={}) for _ in range(2)]
    try:
        for _ in range(2):
            with pytest.raises(ValueError, match="the template refuses it"):
                loop.run(sampler, prompts, [0, 1], 8, 3)
        assert len(made) == 6  # the second time, those of the first are used again
    finally:
        runner.close()
