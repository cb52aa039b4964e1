"""Completions end where the chat template ends the model's turns, whatever the engine."""

import logging

import pytest

from pl_grouprl.demo.tasks import digit_tokenizer
from pl_grouprl.types import Rollout, SamplingConfig

ENDED = "{% for m in messages %}{{ m.content }}z{% endfor %}"
ENDLESS = "{% for m in messages %}{{ m.content }}{% endfor %}"


class Recording:
    """Notes the stop tokens of each call."""

    def __init__(self):
        self.stops = set()

    def bind(self, model, tokenizer=None):
        pass

    def generate(self, prompts, sampling, *, num_generations, seed):
        self.stops.add(sampling.stop_token_ids)
        return [[Rollout([2 + number, 1]) for number in range(num_generations)] for _ in prompts]


def with_template(tiny_policy, template):
    class Policy(tiny_policy):
        def load_tokenizer(self):
            tokenizer = digit_tokenizer()
            tokenizer.add_tokens(["z"], special_tokens=True)  # which the vocabulary has
            tokenizer.chat_template = template
            return tokenizer

    return Policy()


def test_the_token_that_ends_a_turn_ends_completions(make_module, make_data, make_trainer, tiny_policy, caplog):
    engine, policy = Recording(), with_template(tiny_policy, ENDED)
    module = make_module(policy=policy, engine=engine, sampling=SamplingConfig(max_new_tokens=5, stop_token_ids=(4,)))
    with caplog.at_level(logging.INFO):
        make_trainer(max_steps=1).fit(module, make_data(val=True))
    (end,) = policy.load_tokenizer()("z", add_special_tokens=False)["input_ids"]
    assert engine.stops == {(4, end)}
    assert caplog.text.count("The chat template ends the model's turns with 'z'; completions end there") == 1


def test_a_template_without_such_a_token_is_told(make_module, make_data, make_trainer, tiny_policy):
    engine = Recording()
    with pytest.warns(UserWarning, match="The chat template ends the model's turns without an end token"):
        make_trainer(max_steps=1).fit(
            make_module(policy=with_template(tiny_policy, ENDLESS), engine=engine), make_data()
        )
    assert engine.stops == {()}
