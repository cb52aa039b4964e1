"""Episodes that servers sample, which have no model: any number of them, and one that restarts between two turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from helpers.chance_episodes import ChancePolicy, double, register_chance_calls
from helpers.fake_sampler import FakeSampler
from helpers.rollouts import num_turns
from helpers.sampled_episodes import open_episodes, without_seconds
from helpers.tiny_models import tiny_model

from pl_grouprl.rollout import VLLMServerRolloutEngine
from pl_grouprl.rollout.vllm import client as server_module
from pl_grouprl.training.sampler import Sampler
from pl_grouprl.types import RolloutGroup, SamplingConfig

ROWS = [{"prompt": [{"role": "user", "content": "how much " * times}]} for times in (1, 2, 3, 40)]
LONGEST = 400
"""Longest sequence of the servers; that of the model is longer."""


@pytest.fixture(autouse=True)
def _chance_calls_and_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers invent their log-probabilities."""
    monkeypatch.setattr("pl_grouprl.chat.parsing._PARSERS", [])
    register_chance_calls()
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
    tokenizer = ChancePolicy().load_tokenizer()
    policy = tiny_model("llama", vocab_size=len(tokenizer), tie_word_embeddings=False, max_position_embeddings=600)
    sampling = SamplingConfig(max_new_tokens=200, stop_token_ids=tuple(range(len(tokenizer))))
    with servers(count, len(tokenizer)) as started:
        prepare(started)
        engine = VLLMServerRolloutEngine([server.url for server in started], timeout=5, max_concurrent_requests=2)
        with open_episodes(policy, tokenizer, engine, tools=[double]) as sample_rows:
            groups = sample_rows(ROWS, sampling, 3)
        engine.close()
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        rollout.weight_versions = None
    return [without_seconds(group) for group in groups]


@pytest.mark.filterwarnings("ignore:the sampler was lost")
def test_any_number_of_servers_samples_the_same_until_the_longest_sequence() -> None:
    """Also one that restarts between two turns: it gets the weights again, and all episodes are sampled again."""
    restarts = []

    def restart(server: FakeSampler, path: str) -> None:
        if path == "/inference/v1/generate" and len(server.asked) >= 3 * (4 + 3) and not restarts:  # in a later turn
            restarts.append(path)
            server.restart()

    def prepare(started: list[FakeSampler]) -> None:
        started[0].before = lambda path: restart(started[0], path)

    alone = sample(1)
    rollouts = [rollout for group in alone for rollout in group.rollouts]
    assert {1, 2, 3} <= {num_turns(rollout) for rollout in rollouts}
    lengths = [len(group.prompt_ids) + len(rollout.token_ids) for group in alone for rollout in group.rollouts]
    assert LONGEST - 60 < max(lengths) <= LONGEST  # a call and its result do not fit in
    assert any(rollout.finish_reason == "length" for rollout in alone[-1].rollouts)
    assert sample(3) == alone
    assert sample(1, prepare) == alone
    assert restarts
