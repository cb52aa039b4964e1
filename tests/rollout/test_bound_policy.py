import threading

from helpers.tiny_models import tiny_model

from pl_grouprl.rollout import VLLMServerRolloutEngine
from pl_grouprl.types import Rollout, SamplingConfig


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
