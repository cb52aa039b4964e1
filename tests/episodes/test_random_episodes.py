"""Random episodes: what is sampled stays as it is, the mask says what was sampled, and messages say the same as tokens.

First with a scripted model, whose every turn is known; then with a real one, whose turns are parsed into random calls.
"""

from __future__ import annotations

import json
import random
import zlib
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.qwen_tokenizer import qwen_tokenizer
from helpers.sampled_episodes import mask_of, open_episodes, prompt_of
from helpers.scripted_engine import ScriptedEngine, logprob
from helpers.tiny_models import tiny_model

from pl_grouprl.chat import ToolParser, register_tool_parser
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.types import Rollout, RolloutGroup, SamplingConfig

END = "<|im_end|>"
MOST_TURNS = 6


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: First summand.
        b: Second summand.

    Returns:
        The sum.
    """
    return a + b


async def turn_round(text: str) -> str:
    """Turn a text round.

    Args:
        text: Any text.

    Returns:
        It, from its end.
    """
    return text[::-1]


def fill(text: str, times: int) -> str:
    """Repeat a text.

    Args:
        text: Any text.
        times: How often.

    Returns:
        The long text.
    """
    return text * times


def crash(why: str) -> str:
    """Fail.

    Args:
        why: The message.

    Returns:
        Nothing.
    """
    raise RuntimeError(why)


class Walk:
    """An environment that counts steps and says where it starts, which differs between rollouts of a prompt."""

    made = 0

    def __init__(self) -> None:
        self._start = Walk.made
        Walk.made += 1

    def reset(self, **columns: Any) -> str | None:
        self._place = self._start
        return None if self._start % 3 == 0 else f" You stand at {self._start}."

    def walk(self, steps: int) -> int:
        """Walk on.

        Args:
            steps: How many steps.

        Returns:
            The new place.
        """
        self._place += steps
        return self._place

    def get_reward(self) -> float:
        return float(self._place)


TEXTS = ("", "So.", "Größe 数 🧮", "two\n\nlines ", "the tool <result>", '{"a": 1}', "  spaces  ", "\n")


@dataclass(frozen=True)
class WrittenTurn:
    """What the script writes, and the message that it means."""

    text: str
    content: str
    calls: tuple[tuple[str, dict[str, Any]], ...]


def write_turn(rng: random.Random, is_last: bool) -> WrittenTurn:
    """A turn with text, thoughts, and, if it is not the last one, calls."""
    thought = rng.choice(("", "", "<think>\nWell.\n</think>\n\n"))
    before = rng.choice(TEXTS)
    calls = () if is_last else tuple(_write_call(rng) for _ in range(rng.randint(1, 3)))
    written = [json.dumps({"name": name, "arguments": values}, ensure_ascii=False) for name, values in calls]
    text = thought + before + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)
    if is_last and rng.random() < 0.2:
        text += before + "<tool_call>\n{broken\n</tool_call>"
        return WrittenTurn(text, text, ())
    return WrittenTurn(text, before.strip(), calls)


def _write_call(rng: random.Random) -> tuple[str, dict[str, Any]]:
    text, number = rng.choice(TEXTS), rng.randint(0, 9)
    return rng.choice(
        (
            ("add", {"a": number, "b": rng.randint(0, 9)}),
            ("add", {"a": number}),
            ("turn_round", {"text": text}),
            ("turn_round", {"txt": text}),
            ("fill", {"text": text, "times": number}),
            ("fill", {"text": "long ", "times": 10 * number}),
            ("crash", {"why": text}),
            ("walk", {"steps": number}),
            ("nowhere", {"text": text}),
        )
    )


class Oracle:
    """What the tools answer in one episode, in the order of their results."""

    def __init__(self, place: int | None) -> None:
        self.place = place

    def answer(self, calls: tuple[tuple[str, dict[str, Any]], ...]) -> list[tuple[str, str, str | None]]:
        """Name, content and failure of each result: those of async tools come last."""
        results = [(name, *self._one(name, values)) for name, values in calls]
        return sorted(results, key=lambda result: result[0] == "turn_round" and "keyword" not in result[1])

    def _one(self, name: str, values: dict[str, Any]) -> tuple[str, str | None]:
        if name == "nowhere" or (name == "walk" and self.place is None):
            return str({"error": f"Tool {name} not found."}), "unknown"
        if name == "crash":
            return str({"error": values["why"]}), "raised"
        if name == "walk":
            self.place += values["steps"]
            return str(self.place), None
        if values.keys() == {"a"}:
            return str({"error": "add() missing 1 required positional argument: 'b'"}), "arguments"
        if values.keys() == {"txt"}:
            return str({"error": "turn_round() got an unexpected keyword argument 'txt'"}), "arguments"
        return str({"add": _sum, "turn_round": _reversed, "fill": _filled}[name](**values)), None


def _sum(a: int, b: int) -> int:
    return a + b


def _reversed(text: str) -> str:
    return text[::-1]


def _filled(text: str, times: int) -> str:
    return text * times


@dataclass(frozen=True)
class Batch:
    """Random episodes and how they were limited."""

    seed: int
    limits: dict[str, int | None]
    sampling: SamplingConfig
    with_environment: bool
    groups: list[RolloutGroup]
    engine: ScriptedEngine

    def written(self, index: int, turn: int) -> WrittenTurn:
        """What the script had for a turn."""
        return scripted_turn(self.seed, index, turn)


def scripted_turn(seed: int, index: int, turn: int) -> WrittenTurn:
    last = random.Random(f"{seed} {index}").randint(1, MOST_TURNS) - 1
    return write_turn(random.Random(f"{seed} {index} {turn}"), is_last=turn >= last)


def run_batch(seed: int, tokenizer: Any, policy: Any) -> Batch:
    """25 episodes of 5 prompts, under random limits."""
    rng = random.Random(seed)
    limits = {
        "max_turn_tokens": rng.choice((None, None, 400, 150)),
        "max_episode_tokens": rng.choice((None, 2000, 600, 300)),
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
        tools=(add, turn_round, fill, crash),
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


def check_tokens(group: RolloutGroup, rollout: Rollout, turns: list[tuple[list[int], list[int]]]) -> None:
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


def check_limits(rollout: Rollout, turns: list[tuple[list[int], list[int]]], batch: Batch) -> None:
    limits = batch.limits
    assert sum(mask_of(rollout)) <= batch.sampling.max_new_tokens
    assert len(rollout.completion_ids) <= (limits["max_episode_tokens"] or 10**9)
    assert all(len(answer) <= (limits["max_turn_tokens"] or 10**9) for _, answer in turns)
    assert len(turns) <= 1 + min(limits["max_tool_calling_iterations"] or MOST_TURNS, MOST_TURNS)
    if limits["max_tool_calling_iterations"] == 0:
        assert len(turns) == 1


def check_messages(
    rollout: Rollout, turns: list[tuple[list[int], list[int]]], index: int, batch: Batch, tokenizer: Any
) -> list[str]:
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
        written = batch.written(index, turn)
        is_whole = tokenizer.decode(answer) == written.text + END
        check_assistant(next(messages), written, is_whole, tokenizer.decode(answer))
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


def check_assistant(message: dict[str, Any], written: WrittenTurn, is_whole: bool, decoded: str) -> None:
    assert message["role"] == "assistant"
    if not is_whole:
        return
    called = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    assert called == list(written.calls)
    assert message["content"] == written.content


def _between_turns(contents: list[str]) -> str:
    """What the template of Qwen3 writes between two turns of the model."""
    results = "".join(f"\n<tool_response>\n{content}\n</tool_response>" for content in contents)
    return f"\n<|im_start|>user{results}{END}\n<|im_start|>assistant\n"


def scripted_episodes(batches: range) -> Counter[str]:
    tokenizer = qwen_tokenizer()
    policy = tiny_model("qwen3", vocab_size=len(tokenizer), max_position_embeddings=1 << 16)
    kinds: Counter[str] = Counter()
    for seed in batches:
        kinds += check_batch(run_batch(seed, tokenizer, policy), tokenizer)
    return kinds


ENDS = ("whole", "cut", "result left out", "no room for a turn")


def test_random_scripted_episodes() -> None:
    kinds = scripted_episodes(range(8))
    assert sum(kinds[end] for end in ENDS) == 200
    assert all(kinds[kind] for kind in ("whole", "cut", "result left out", "1 turns", "6 turns"))


@pytest.mark.slow
def test_a_thousand_scripted_episodes() -> None:
    kinds = scripted_episodes(range(100, 140))
    assert sum(kinds[end] for end in ENDS) == 1000
    assert all(kinds[kind] for kind in ("whole", "cut", "result left out", *(f"{n + 1} turns" for n in range(6))))


def test_the_same_seeds_give_the_same_episodes() -> None:
    tokenizer = qwen_tokenizer()
    policy = tiny_model("qwen3", vocab_size=len(tokenizer), max_position_embeddings=1 << 16)
    first, second = (run_batch(3, tokenizer, policy).groups for _ in range(2))
    assert [without_seconds(group) for group in first] == [without_seconds(group) for group in second]


def without_seconds(group: RolloutGroup) -> RolloutGroup:
    """The group without what the clock decides."""
    return replace(
        group, rollouts=[replace(own, tool_counts={**own.tool_counts, "seconds": 0.0}) for own in group.rollouts]
    )


TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Names no tools, so that prompts with and without tools are the same."""

STOPS = tuple(range(40))
"""Every seventh token of a random model ends a turn."""


class WithoutCaches(HFRolloutEngine):
    """Encodes the whole conversation again in every turn."""

    keeps_caches = False


@pytest.fixture
def chance_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse any text into calls: three turns of four have one or two, of which some fail."""
    monkeypatch.setattr("pl_grouprl.chat.families._PARSERS", [])
    register_tool_parser(ToolParser("chance", ("<tool_call>",), "<|im_start|>assistant\n", parse_by_chance))


def parse_by_chance(text: str, tools: Any = ()) -> dict[str, Any]:
    rng = random.Random(zlib.crc32(text.encode("utf-8", "replace")))
    calls = [_write_call(rng) for _ in range(rng.choice((0, 1, 1, 2)))]
    called = [{"type": "function", "function": {"name": name, "arguments": values}} for name, values in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": called} if called else {})}


def sample_real(
    engine: Any, seed: int, *, prompts: int = 5, tools: bool = True, **limits: int
) -> tuple[Any, list[RolloutGroup]]:
    """The policy, and 5 episodes of each prompt."""
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = TEMPLATE
    policy = tiny_model("qwen3", seed=seed, vocab_size=len(tokenizer), max_position_embeddings=4096)
    sampling = SamplingConfig(max_new_tokens=60, stop_token_ids=STOPS)
    rows = [{"prompt": [{"role": "user", "content": "The prompt. " * (n + 1)}]} for n in range(prompts)]
    options = {"tools": (add, turn_round, fill, crash), **limits} if tools else {}
    with open_episodes(policy, tokenizer, engine, **options) as sample:
        return policy, sample(rows, sampling, 5, seed)


@torch.no_grad()
def worst_logprob_error(policy: Any, groups: list[RolloutGroup]) -> float:
    """Largest difference between the reported log-probabilities and those of a forward over the whole conversation."""
    worst = 0.0
    for group in groups:
        for rollout in group.rollouts:
            sequence = torch.tensor([group.prompt_ids + rollout.token_ids])
            logits = policy(sequence).logits[0, len(group.prompt_ids) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, sequence[0, len(group.prompt_ids) :, None])[:, 0]
            mask = torch.tensor(rollout.loss_mask or [1] * len(rollout.token_ids), dtype=torch.bool)
            reported = torch.tensor(rollout.logprobs)
            assert (reported[~mask] == 0).all()
            worst = max(worst, (reported - expected)[mask].abs().max().item())
    return worst


def num_turns(rollout: Rollout) -> int:
    return sum(message["role"] == "assistant" for message in rollout.messages)


def check_real(engine_class: type, seeds: range, prompts: int) -> None:
    turns: Counter[int] = Counter()
    for seed in seeds:
        policy, groups = sample_real(engine_class(), seed, prompts=prompts, max_tool_calling_iterations=MOST_TURNS - 1)
        assert worst_logprob_error(policy, groups) < 1e-4
        turns.update(num_turns(rollout) for group in groups for rollout in group.rollouts)
    assert turns.total() == 5 * prompts * len(seeds)
    assert turns.keys() == set(range(1, MOST_TURNS + 1))


@pytest.mark.usefixtures("chance_calls")
@pytest.mark.parametrize("engine_class", [HFRolloutEngine, WithoutCaches])
def test_logprobs_of_real_episodes_are_those_of_a_forward(engine_class: type) -> None:
    check_real(engine_class, range(2), prompts=10)


@pytest.mark.slow
@pytest.mark.usefixtures("chance_calls")
@pytest.mark.parametrize("engine_class", [HFRolloutEngine, WithoutCaches])
def test_logprobs_of_a_thousand_real_episodes_are_those_of_a_forward(engine_class: type) -> None:
    check_real(engine_class, range(10), prompts=20)


@pytest.mark.usefixtures("chance_calls")
def test_kept_caches_change_no_token() -> None:
    first, second, third = (sample_real(make(), 3)[1] for make in (HFRolloutEngine, HFRolloutEngine, WithoutCaches))
    assert [without_seconds(group) for group in first] == [without_seconds(group) for group in second]
    assert tokens(first) == tokens(third)


@pytest.mark.usefixtures("chance_calls")
def test_the_first_turn_is_what_a_plain_run_samples() -> None:
    _, episodes = sample_real(HFRolloutEngine(), 4)
    _, plain = sample_real(HFRolloutEngine(), 4, tools=False)
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


def tokens(groups: list[RolloutGroup]) -> list[list[list[int]]]:
    return [[rollout.token_ids for rollout in group.rollouts] for group in groups]
