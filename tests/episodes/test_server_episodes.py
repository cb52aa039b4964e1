"""Episodes that servers sample, which have no model: any number of them, and one that restarts between two turns."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from helpers.fake_sampler import FakeSampler
from helpers.qwen_tokenizer import qwen_tokenizer
from helpers.sampled_episodes import open_episodes
from helpers.tiny_models import tiny_model

from pl_grouprl.chat import ToolParser, register_tool_parser
from pl_grouprl.rollout import VLLMServerRolloutEngine
from pl_grouprl.rollout.vllm import client as server_module
from pl_grouprl.training.sampler import Sampler
from pl_grouprl.types import Rollout, RolloutGroup, SamplingConfig

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROWS = [{"prompt": [{"role": "user", "content": "how much " * times}]} for times in (1, 2, 3, 40)]
LONGEST = 400
"""Longest sequence of the servers; that of the model is longer."""


def look_up(key: str) -> str:
    """Look a key up.

    Args:
        key: The key.

    Returns:
        Its value.
    """
    return key * 2


def parse_by_chance(text: str, tools: Any = ()) -> dict[str, Any]:
    """Two texts of three are a call."""
    number = zlib.crc32(text.encode())
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"key": "abc"[number % 3]}}}
    return {"role": "assistant", "content": text, **({"tool_calls": [call]} if number % 3 else {})}


@pytest.fixture(autouse=True)
def _chance_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pl_grouprl.chat.parsing._PARSERS", [])
    register_tool_parser(ToolParser("chance", ("<tool_call>",), "<|im_start|>assistant\n", parse_by_chance))


@pytest.fixture(autouse=True)
def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers invent their log-probabilities."""
    monkeypatch.setattr(Sampler, "compare", lambda *arguments, **options: None)
    monkeypatch.setattr(server_module, "_LONGEST_WAIT", 0.1)
    monkeypatch.delenv("PL_GROUPRL_TOKEN", raising=False)


@contextmanager
def servers(count: int, size: int) -> Iterator[list[FakeSampler]]:
    started = [FakeSampler(instance=str(number), vocab_size=size, max_model_len=LONGEST) for number in range(count)]
    try:
        yield started
    finally:
        for server in started:
            server.close()


def sample(count: int, prepare: Callable[[list[FakeSampler]], None] = lambda _: None) -> list[RolloutGroup]:
    """Three episodes of each prompt."""
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = TEMPLATE
    policy = tiny_model("llama", vocab_size=len(tokenizer), tie_word_embeddings=False, max_position_embeddings=600)
    sampling = SamplingConfig(max_new_tokens=200, stop_token_ids=tuple(range(len(tokenizer))))
    with servers(count, len(tokenizer)) as started:
        prepare(started)
        engine = VLLMServerRolloutEngine([server.url for server in started], timeout=5, max_concurrent_requests=2)
        with open_episodes(policy, tokenizer, engine, tools=[look_up]) as sample_rows:
            groups = sample_rows(ROWS, sampling, 3)
        engine.close()
    return [replace(group, rollouts=[without_seconds(rollout) for rollout in group.rollouts]) for group in groups]


def without_seconds(rollout: Rollout) -> Rollout:
    return replace(rollout, tool_counts={**rollout.tool_counts, "seconds": 0.0}, weight_versions=None)


def turns(rollout: Rollout) -> int:
    return sum(message["role"] == "assistant" for message in rollout.messages)


def test_any_number_of_servers_samples_the_same() -> None:
    alone = sample(1)
    rollouts = [rollout for group in alone for rollout in group.rollouts]
    assert {1, 2, 3} <= {turns(rollout) for rollout in rollouts}
    assert sample(3) == alone


def test_the_longest_sequence_of_the_servers_ends_an_episode() -> None:
    groups = sample(1)
    lengths = [len(group.prompt_ids) + len(rollout.token_ids) for group in groups for rollout in group.rollouts]
    assert LONGEST - 20 < max(lengths) <= LONGEST  # a call and its result take 20 tokens
    assert any(rollout.finish_reason == "length" for rollout in groups[-1].rollouts)


@pytest.mark.filterwarnings("ignore:the sampler was lost")
def test_a_server_that_restarts_between_turns_gets_the_weights_again() -> None:
    """All episodes are sampled again, to the same result."""
    restarts = []

    def restart(server: FakeSampler, path: str) -> None:
        if path == "/inference/v1/generate" and len(server.asked) >= 3 * (4 + 3) and not restarts:  # in a later turn
            restarts.append(path)
            server.restart()

    def prepare(started: list[FakeSampler]) -> None:
        started[0].before = lambda path: restart(started[0], path)

    assert sample(1, prepare) == sample(1)
    assert restarts
