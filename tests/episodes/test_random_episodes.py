"""Random scripted episodes: what the model wrote stays as it is, the mask marks it, and messages say the same.

Every turn, call and result is known: the model writes by a script, and an oracle knows what the tools answer.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from helpers.qwen_tokenizer import qwen_tokenizer
from helpers.random_tools import TEXTS, TOOLS, Call, Oracle, Walk, write_call
from helpers.sampled_episodes import mask_of, open_episodes, prompt_of, without_seconds
from helpers.scripted_engine import ScriptedEngine, logprob
from helpers.tiny_models import tiny_model

from pl_grouprl.types import Rollout, RolloutGroup, SamplingConfig

END = "<|im_end|>"
MOST_TURNS = 6
Turns = list[tuple[list[int], list[int]]]
"""Prompt and answer of each turn."""


@dataclass(frozen=True)
class WrittenTurn:
    """What the script writes, and the message that it means."""

    text: str
    content: str
    calls: tuple[Call, ...]


def write_turn(rng: random.Random, is_last: bool) -> WrittenTurn:
    """A turn with text, thoughts, and, if it is not the last one, calls."""
    thought = rng.choice(("", "", "<think>\nWell.\n</think>\n\n"))
    before = rng.choice(TEXTS)
    calls = () if is_last else tuple(write_call(rng) for _ in range(rng.randint(1, 3)))
    written = [json.dumps({"name": name, "arguments": values}, ensure_ascii=False) for name, values in calls]
    text = thought + before + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)
    if is_last and rng.random() < 0.2:
        text += before + "<tool_call>\n{broken\n</tool_call>"
        return WrittenTurn(text, text, ())
    return WrittenTurn(text, before.strip(), calls)


@dataclass(frozen=True)
class Batch:
    """Random episodes and how they were limited."""

    seed: int
    limits: dict[str, int | None]
    sampling: SamplingConfig
    with_environment: bool
    groups: list[RolloutGroup]
    engine: ScriptedEngine


def scripted_turn(seed: int, index: int, turn: int) -> WrittenTurn:
    last = random.Random(f"{seed} {index}").randint(1, MOST_TURNS) - 1
    return write_turn(random.Random(f"{seed} {index} {turn}"), is_last=turn >= last)


def run_batch(seed: int, tokenizer: Any, policy: Any) -> Batch:
    """25 episodes of 5 prompts, under random limits."""
    rng = random.Random(seed)
    limits = {
        "max_turn_tokens": rng.choice((None, None, 400, 150)),
        "max_tokens": rng.choice((None, 2000, 600, 300)),
        "max_tool_calling_iterations": rng.choice((None, None, 3, 1, 0)),
    }
    sampling = SamplingConfig(max_new_tokens=rng.choice((4000, 1000, 400)))
    with_environment = rng.random() < 0.5
    engine = ScriptedEngine(lambda prompt_ids, index, turn: scripted_turn(seed, index, turn).text)
    rows = [{"prompt": [{"role": "user", "content": rng.choice(TEXTS) + "?"}], "number": n} for n in range(5)]
    Walk.made = 0
    with open_episodes(
        policy,
        tokenizer,
        engine,
        tools=TOOLS,
        environment_factory=Walk if with_environment else None,
        chat_template="qwen3",
        **limits,
    ) as sample:
        groups = sample(rows, sampling, num_generations=5, seed=seed)
    return Batch(seed, limits, sampling, with_environment, groups, engine)


def check_batch(batch: Batch, tokenizer: Any) -> Counter[str]:
    """Check all episodes of a batch; returns how many there were of each kind."""
    kinds: Counter[str] = Counter()
    pairs = [(group, rollout) for group in batch.groups for rollout in group.rollouts]
    for index, (group, rollout) in enumerate(pairs):
        turns = batch.engine.turns[index]
        check_tokens(group, rollout, turns)
        check_limits(rollout, turns, batch)
        kinds.update(check_messages(rollout, turns, index, batch, tokenizer))
        kinds[f"{len(turns)} turns"] += 1
    return kinds


def check_tokens(group: RolloutGroup, rollout: Rollout, turns: Turns) -> None:
    """Each turn continues the one before token for token; mask and log-probabilities mark what was sampled."""
    sequence = group.prompt_ids + rollout.token_ids
    histories = [prompt + answer for prompt, answer in turns]
    assert turns[0][0] == prompt_of(group, rollout)
    for history, (prompt, _) in zip(histories, [*turns[1:], (sequence, [])], strict=True):
        assert prompt[: len(history)] == history
    sampled = [0] * len(sequence)
    for prompt, answer in turns:
        sampled[len(prompt) : len(prompt) + len(answer)] = [1] * len(answer)
    start = len(group.prompt_ids)
    assert (rollout.loss_mask or [1] * len(rollout.token_ids)) == sampled[start:]
    assert rollout.logprobs == [
        logprob(token) if own else 0.0 for token, own in zip(sequence[start:], sampled[start:], strict=True)
    ]


def check_limits(rollout: Rollout, turns: Turns, batch: Batch) -> None:
    limits = batch.limits
    assert sum(mask_of(rollout)) <= batch.sampling.max_new_tokens
    assert len(rollout.completion_ids) <= (limits["max_tokens"] or 10**9)
    assert all(len(answer) <= (limits["max_turn_tokens"] or 10**9) for _, answer in turns)
    assert len(turns) <= 1 + min(limits["max_tool_calling_iterations"] or MOST_TURNS, MOST_TURNS)
    if limits["max_tool_calling_iterations"] == 0:
        assert len(turns) == 1


def check_messages(rollout: Rollout, turns: Turns, index: int, batch: Batch, tokenizer: Any) -> list[str]:
    """Messages, counts, reward and finish reason follow from what the script wrote; returns kinds of ends."""
    oracle = Oracle(index if batch.with_environment else None)
    messages, counts = iter(rollout.messages), Counter({"calls": 0})
    gaps = [after[len(prompt) + len(answer) :] for (prompt, answer), (after, _) in pairwise(turns)]
    sequence_end = len(turns[-1][0]) + len(turns[-1][1])
    total = len(turns[0][0]) + len(rollout.completion_ids)
    last_gap = rollout.completion_ids[sequence_end - len(turns[0][0]) :]
    assert total >= sequence_end
    end = ""
    for turn, ((_, answer), gap) in enumerate(zip(turns, [*gaps, last_gap], strict=True)):
        written = scripted_turn(batch.seed, index, turn)
        is_whole = tokenizer.decode(answer) == written.text + END
        check_assistant(next(messages), written, is_whole)
        most = batch.limits["max_tool_calling_iterations"]
        if not is_whole or not written.calls or (most is not None and turn >= most):
            assert gap == []
            end = "whole" if is_whole else "cut"
            break
        results = oracle.answer(written.calls)
        counts["calls"] += len(results)
        counts.update(failure for _, _, failure in results if failure is not None)
        if not gap:
            end = "result left out"
            break
        expected = [{"role": "tool", "name": name, "content": content} for name, content, _ in results]
        assert [next(messages) for _ in results] == expected
        assert tokenizer.decode(gap) == _between_turns([content for _, content, _ in results])
        end = "no room for a turn"
    assert next(messages, None) is None
    assert rollout.finish_reason == ("stop" if end == "whole" else "length")
    assert {**counts, "seconds": rollout.tool_counts["seconds"]} == {"calls": 0, **rollout.tool_counts}
    assert rollout.environment_reward == oracle.place
    return [end]


def check_assistant(message: dict[str, Any], written: WrittenTurn, is_whole: bool) -> None:
    assert message["role"] == "assistant"
    if is_whole:
        called = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
        assert called == list(written.calls)
        assert message["content"] == written.content


def _between_turns(contents: list[str]) -> str:
    """What the template of Qwen3 writes between two turns of the model."""
    results = "".join(f"\n<tool_response>\n{content}\n</tool_response>" for content in contents)
    return f"\n<|im_start|>user{results}{END}\n<|im_start|>assistant\n"


ENDS = ("whole", "cut", "result left out", "no room for a turn")


@pytest.mark.parametrize("batches", [range(8), pytest.param(range(100, 140), marks=pytest.mark.slow)])
def test_random_scripted_episodes(batches: range) -> None:
    tokenizer = qwen_tokenizer()
    policy = tiny_model("qwen3", vocab_size=len(tokenizer), max_position_embeddings=1 << 16)
    kinds: Counter[str] = Counter()
    for seed in batches:
        batch = run_batch(seed, tokenizer, policy)
        kinds += check_batch(batch, tokenizer)
    assert sum(kinds[end] for end in ENDS) == 25 * len(batches)
    assert all(kinds[kind] for kind in ("whole", "cut", "result left out", "1 turns", "6 turns"))
    again = run_batch(seed, tokenizer, policy)
    assert [without_seconds(group) for group in batch.groups] == [without_seconds(group) for group in again.groups]
