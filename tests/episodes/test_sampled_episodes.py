"""Episodes of a real model, whose turns are parsed into random calls: sampled tokens keep their log-probabilities."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from typing import Any

import pytest
from helpers.chance_episodes import STOPS, ChancePolicy
from helpers.random_tools import TOOLS, write_call
from helpers.rollouts import WithoutCaches, num_turns, worst_logprob_error
from helpers.sampled_episodes import open_episodes
from helpers.sweeps import sweep
from helpers.tool_cases import OwnTask

from pl_grouprl.chat import ToolParser, register_tool_parser
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.types import RolloutGroup, SamplingConfig

MOST_TURNS = 6


@pytest.fixture
def chance_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse any text into calls: three turns of four have one or two, of which some fail."""
    monkeypatch.setattr("pl_grouprl.chat.parsing._PARSERS", [])
    register_tool_parser(ToolParser("chance", ("<chance>",), "<|im_start|>assistant\n", parse_by_chance))


def parse_by_chance(text: str, tools: Any = ()) -> dict[str, Any]:
    rng = random.Random(zlib.crc32(text.encode("utf-8", "replace")))
    calls = [write_call(rng) for _ in range(rng.choice((0, 1, 1, 2)))]
    called = [{"type": "function", "function": {"name": name, "arguments": values}} for name, values in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": called} if called else {})}


def sample_real(
    engine: Any, seed: int, *, prompts: int = 5, tools: bool = True, **limits: int
) -> tuple[Any, list[RolloutGroup]]:
    """The policy, and 5 episodes of each prompt."""
    chance = ChancePolicy(seed, max_position_embeddings=4096)
    policy, tokenizer = chance.load(), chance.load_tokenizer()
    sampling = SamplingConfig(max_new_tokens=60, stop_token_ids=STOPS)
    rows = [{"prompt": [{"role": "user", "content": "The prompt. " * (n + 1)}]} for n in range(prompts)]
    options = {"tools": TOOLS, **limits} if tools else {}
    with open_episodes(policy, tokenizer, engine, **options) as sample:
        return policy, sample(rows, sampling, 5, seed)


@pytest.mark.usefixtures("chance_calls")
@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(10), marks=pytest.mark.slow)])
@pytest.mark.parametrize("engine_class", sweep([HFRolloutEngine, WithoutCaches], quick=[HFRolloutEngine]))
def test_logprobs_of_real_episodes_are_those_of_a_forward(engine_class: type, seeds: range) -> None:
    turns: Counter[int] = Counter()
    for seed in seeds:
        policy, groups = sample_real(engine_class(), seed, prompts=10, max_tool_calling_iterations=MOST_TURNS - 1)
        assert worst_logprob_error(policy, groups) < 1e-4
        turns.update(num_turns(rollout) for group in groups for rollout in group.rollouts)
    assert turns.total() == 50 * len(seeds)
    assert turns.keys() == set(range(1, MOST_TURNS + 1))


@pytest.mark.usefixtures("chance_calls")
def test_kept_caches_change_no_token_and_the_first_turn_is_what_a_plain_run_samples() -> None:
    episodes, apart = (sample_real(make(), 4, prompts=3)[1] for make in (HFRolloutEngine, WithoutCaches))
    assert tokens(episodes) == tokens(apart)
    _, plain = sample_real(HFRolloutEngine(), 4, prompts=3, tools=False)
    pairs = [
        (episode, rollout)
        for group, other in zip(episodes, plain, strict=True)
        for episode, rollout in zip(group.rollouts, other.rollouts, strict=True)
    ]
    assert len({num_turns(episode) for episode, _ in pairs}) > 2
    for episode, rollout in pairs:
        length = len(rollout.token_ids)
        assert episode.token_ids[:length] == rollout.token_ids
        assert episode.logprobs[:length] == rollout.logprobs
        if num_turns(episode) == 1:
            assert (len(episode.token_ids), episode.finish_reason) == (length, rollout.finish_reason)
            assert episode.loss_mask is None


def test_an_environment_without_tools_needs_no_template_for_them() -> None:
    chance = ChancePolicy()
    tokenizer = chance.load_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with open_episodes(chance.load(), tokenizer, environment_factory=OwnTask) as sample:
        rows = [{"prompt": [{"role": "user", "content": "Hello. "}]}]
        (group,) = sample(rows, SamplingConfig(max_new_tokens=5), 2)
    assert tokenizer.decode(group.prompt_ids) == "Hello. Guess the word."
    assert all(rollout.loss_mask is None and len(rollout.messages) == 1 for rollout in group.rollouts)
    with (
        pytest.raises(ValueError, match="Tools need another chat template"),
        open_episodes(chance.load(), tokenizer, tools=TOOLS),
    ):
        pass


def tokens(groups: list[RolloutGroup]) -> list[list[list[int]]]:
    return [[rollout.token_ids for rollout in group.rollouts] for group in groups]
