"""When vLLM in the trainer's process sleeps and wakes, with an engine that only writes the calls down."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
from helpers.tiny_models import tiny_model

from pl_grouprl.rollout.vllm.colocate import VLLMRolloutEngine
from pl_grouprl.types import Rollout, SamplingConfig
from pl_grouprl.utilities import optional


class Engine:
    """vLLM's `LLMEngine` as sleeping uses it."""

    def __init__(self) -> None:
        self.calls = []

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags=None):
        self.calls.append("wake")


@pytest.fixture
def make_engine(monkeypatch):
    """Engines whose vLLM has weights, samples one token of each prompt, and what it was made to do."""
    monkeypatch.setattr(optional, "VLLM_AVAILABLE", True)

    def make(sleep_level):
        engine, vllm = VLLMRolloutEngine(sleep_level=sleep_level), Engine()
        engine.bind(tiny_model("llama"))
        engine.version = 1
        engine._vllm._engine, engine._vllm._process = vllm, SimpleNamespace(inside=nullcontext)

        def run(requests, *options):
            vllm.calls.append(f"sample {len(requests)}")
            return [[Rollout([1], [0.0], finish_reason="length") for _ in own[2]] for own in requests]

        monkeypatch.setattr(engine._vllm, "_run", run)
        return engine, vllm.calls

    return make


def sample(engine, prompts, **options):
    return engine.generate(prompts, SamplingConfig(max_new_tokens=2), num_generations=2, seed=0, **options)


@contextmanager
def interrupted():
    with pytest.raises(KeyError):
        yield


def test_without_sleeping_nothing_is_called(make_engine):
    engine, calls = make_engine(0)
    with engine.keep_caches():
        assert [len(group) for group in sample(engine, [[1], [2]])] == [2, 2]
    assert (calls, engine.version) == (["sample 2"], 1)


@pytest.mark.parametrize(("level", "version"), [(1, 1), (2, None)])
def test_it_sleeps_after_each_call(make_engine, level, version):
    engine, calls = make_engine(level)
    sample(engine, [[1]])
    assert (calls, engine.version) == (["sample 1", f"sleep {level}"], version)
    if level == 1:
        sample(engine, [[1]])
        assert calls[2:] == ["wake", "sample 1", "sleep 1"]


@pytest.mark.parametrize(("level", "version"), [(1, 1), (2, None)])
def test_it_stays_awake_for_the_turns_of_an_episode(make_engine, level, version):
    """With `sleep_level=2` the second turn would have no weights."""
    engine, calls = make_engine(level)
    with engine.keep_caches():
        for prompts in ([[1], [2]], [[1, 3]], []):
            sample(engine, prompts, max_new_tokens=[1] * len(prompts))
        assert engine.version == 1
    assert (calls, engine.version) == (["sample 2", "sample 1", f"sleep {level}"], version)
    with interrupted(), engine.keep_caches():
        raise KeyError("a tool")
    engine.version = 1
    sample(engine, [[1]])
    assert calls[-1] == f"sleep {level}"


def test_no_prompts_wake_nothing(make_engine):
    engine, calls = make_engine(1)
    sample(engine, [[1]])
    calls.clear()
    assert sample(engine, []) == []
    with engine.keep_caches():
        assert sample(engine, [], prompt_indices=[], max_new_tokens=[]) == []
    assert calls == []
