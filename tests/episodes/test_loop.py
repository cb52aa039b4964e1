"""Episodes that cannot begin, and those that advance alone."""

import threading
from types import SimpleNamespace

import pytest
from helpers.worker_tools import Counter

from pl_grouprl.episodes.loop import EpisodeLimits, EpisodeLoop
from pl_grouprl.episodes.runner import ToolRunner
from pl_grouprl.types import EpisodeRows, Prompt, Rollout


def test_environments_are_released_if_a_prompt_cannot_be_rendered():
    made = []

    def factory():
        made.append(Counter())
        return made[-1]

    def encode_prompt(messages, tools):
        raise ValueError("the template refuses it")

    sampler = SimpleNamespace(max_length=None, is_concurrent=False, raise_together=lambda run: run())
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


class Chat:
    """Token 7 calls `meet`, token 8 calls `go_on`; other tokens call nothing."""

    encodes_prompts = False
    tokenizer = SimpleNamespace(decode=lambda token_ids, skip_special_tokens: str(token_ids))

    def parse(self, token_ids, history, schemas):
        name = {7: "meet", 8: "go_on"}.get(token_ids[0])
        calls = [] if name is None else [{"type": "function", "function": {"name": name, "arguments": {}}}]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    def encode_results(self, results):
        return [9]


class Turns:
    """Samples a turn of each rollout from several threads: the first turn of the two streams is 7 and 8, then 5."""

    max_length = None
    is_concurrent = True

    def __init__(self, before=lambda number, stream: None):
        self.before = before

    def sample(self, number, rollouts, limits):
        (rollout,) = rollouts
        self.before(number, rollout.stream)
        return [Rollout([5 if number else 7 + rollout.stream], finish_reason="stop")]

    def raise_together(self, run):
        run()

    def any_open(self, is_open):
        return is_open


@pytest.fixture
def run():
    """Runs two episodes of a prompt with the tools `meet`, which waits for the event, and `go_on`."""
    met, answers = threading.Event(), []

    def meet() -> str:
        """Wait for the other episode."""
        answers.append(met.wait(30))
        return "met"

    def go_on() -> str:
        """Go on at once."""
        return "yes"

    runner = ToolRunner([meet, go_on])
    prompt = Prompt([1], prompt=[{"role": "user", "content": "Hello."}], columns={})

    def run(sampler):
        _, (rollouts,) = EpisodeLoop(Chat(), runner, EpisodeLimits()).run(sampler, [prompt], [0], 8, 2)
        return [rollout.token_ids for rollout in rollouts], answers

    run.met = met
    yield run
    runner.close()


def test_no_episode_waits_for_the_tools_of_another(run):
    def before(number, stream):
        if (number, stream) == (1, 1):  # the second episode writes its last turn while the first one's tool waits
            run.met.set()

    assert run(Turns(before)) == ([[7, 9, 5], [8, 9, 5]], [True])


def test_an_error_of_one_episode_is_raised_once_all_have_ended(run):
    turns = []

    def before(number, stream):
        if (number, stream) == (1, 1):
            run.met.set()
            raise RuntimeError("the second turn fails")
        turns.append((number, stream))

    with pytest.raises(RuntimeError, match="the second turn fails"):
        run(Turns(before))
    assert (1, 0) in turns


@pytest.mark.parametrize(
    ("length", "most", "encoded", "reason"),
    [
        (2**20, 4096, [2**14], "length"),  # not a million characters
        (2**20, 50_000, [2**14, 2**17], "length"),
        (100, 4096, [100], "stop"),
        (2**15, None, [2**14, 2**15], "stop"),
    ],
)
def test_a_result_that_does_not_fit_is_not_encoded_whole(length, most, encoded, reason):
    seen = []

    class Characters(Chat):
        def encode_results(self, results):
            seen.append(len(results[0]["content"]))
            return [9] * seen[-1]

    def meet() -> str:
        """Return much."""
        return "x" * length

    runner = ToolRunner([meet])
    try:
        loop = EpisodeLoop(Characters(), runner, EpisodeLimits(max_tokens=most))
        sampler = Turns()
        sampler.is_concurrent = False
        prompt = Prompt([1], prompt=[{"role": "user", "content": "Hello."}], columns={})
        _, ((rollout,),) = loop.run(sampler, [prompt], [0], 8, 1)
    finally:
        runner.close()
    assert (seen, rollout.finish_reason) == (encoded, reason)
    assert len(rollout.token_ids) == (1 if reason == "length" else length + 2)


class Game:
    """Two calls of `meet` are worth 1 and 2, `go_on` nothing; another turn begins with 5, which ends the episode."""

    def reset(self, **row):
        self.calls, self.reward = 0, None

    def meet(self) -> str:
        """Meet."""
        self.calls += 1
        self.reward = self.calls
        return "met"

    def go_on(self) -> str:
        """Go on."""
        return "yes"

    def get_step_reward(self):
        reward, self.reward = self.reward, None
        return reward


@pytest.mark.parametrize("most", [None, 4])
def test_step_rewards_belong_to_turns(most):
    class Twice(Chat):
        def parse(self, token_ids, history, schemas):
            message = super().parse(token_ids, history, schemas)
            return {**message, "tool_calls": message["tool_calls"] * 2}

    class Plays(Turns):
        def sample(self, number, rollouts, limits):
            return [Rollout([[8, 7, 7, 5][number]], finish_reason="stop") for _ in rollouts]

    runner = ToolRunner(environment_factory=Game)
    prompt = Prompt([1], prompt=[{"role": "user", "content": "Hello."}], columns={})
    try:
        loop = EpisodeLoop(Twice(), runner, EpisodeLimits(max_tokens=most))
        _, ((rollout,),) = loop.run(Plays(), [prompt], [0], 8, 1)
    finally:
        runner.close()
    # With room for four tokens, the results of the second turn are read, and there is none for the third.
    turns = [None, 3.0, 7.0, None] if most is None else [None, 3.0]
    assert rollout.environment_step_rewards == turns
    assert len(EpisodeRows((rollout,)).turns) == len(turns)
    assert (rollout.environment_name, rollout.environment_reward) == ("Game", None)
