import threading
from types import SimpleNamespace

import pytest
from helpers.tiny_models import tiny_model

from pl_grouprl.rollout import VLLMServerRolloutEngine
from pl_grouprl.rollout.engine import StopStrings, end_token_ids
from pl_grouprl.types import Rollout, SamplingConfig


def test_end_tokens_come_from_model_tokenizer_and_request():
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[5, 3]), config=None)
    tokenizer = SimpleNamespace(eos_token_id=9)
    assert end_token_ids(model, tokenizer, SamplingConfig(stop_token_ids=(1, 3))) == [1, 3, 5, 9]
    assert end_token_ids(model, None, SamplingConfig()) == [3, 5]
    without = SimpleNamespace(config=SimpleNamespace(eos_token_id=4))
    assert end_token_ids(without, SimpleNamespace(eos_token_id=None), SamplingConfig()) == [4]
    assert end_token_ids(SimpleNamespace(config=SimpleNamespace()), None, SamplingConfig()) == []


def test_stop_strings_are_found_in_the_tail(letters):
    stop = StopStrings(letters(eos_token_id=25), ("abc", "<end>"))
    assert stop
    assert not StopStrings(None, ())
    assert stop.window == len("<end>") + StopStrings.MARGIN
    assert StopStrings(letters(), ("é",)).window == 2 + StopStrings.MARGIN  # in bytes
    assert stop.found([[9, 0, 1, 2], [0, 1, 9, 2], [25], []]) == [True, False, True, False]


def test_refusals(letters):
    with pytest.raises(ValueError, match="no tokenizer"):
        StopStrings(None, ("x",))
    with pytest.raises(ValueError, match="empty string"):
        StopStrings(letters(), ("a", ""))


class OneAtATime:
    """A tokenizer that counts the threads in its `decode`; the first one stays until it is released."""

    def __init__(self):
        self.inside = self.most = 0
        self.entered, self.released = threading.Event(), threading.Event()

    def decode(self, token_ids, skip_special_tokens):
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.entered.set()
        self.released.wait(30)
        self.inside -= 1
        return "text"


def test_threads_take_turns_with_the_tokenizer():
    tokenizer = OneAtATime()
    engine, rollout, found = VLLMServerRolloutEngine(), Rollout([1]), []
    engine.model, engine.tokenizer = tiny_model("qwen3"), tokenizer
    engine.sample = lambda requests, sampling, seed: [[rollout]]
    stop = engine.check([], SamplingConfig(stop=("ex",)))
    threads = [
        threading.Thread(target=lambda: engine.generate([[1]], SamplingConfig(), num_generations=1, seed=0)),
        threading.Thread(target=lambda: found.extend(stop.found([[2]]))),
    ]
    threads[0].start()
    assert tokenizer.entered.wait(30)
    threads[1].start()
    threads[1].join(0.2)  # time to get in, if it could
    tokenizer.released.set()
    for thread in threads:
        thread.join(30)
    assert (rollout.text, found, tokenizer.most) == ("text", [True], 1)
