"""Rewards that depend on the length and on repetitions: overlong, repetition, cosine."""

import math

import pytest
from jsonargparse import ArgumentParser

from pl_grouprl.rewards import ExactMatch, RewardFunction, Weighted, apply_rewards
from pl_grouprl.rewards.penalties import (
    CosineLengthReward,
    OverlongPenalty,
    RepetitionPenalty,
    cosine_between,
    repeated_share,
)
from pl_grouprl.types import Rollout, RolloutGroup


def call(reward, *texts, lengths=None, **columns):
    """Call with TRL's convention; a completion has as many tokens as `lengths` says, or as it has characters."""
    lengths = [len(text) for text in texts] if lengths is None else lengths
    return reward(["p"] * len(texts), list(texts), [list(range(length)) for length in lengths], **columns)


def overlong(reward, *lengths):
    return call(reward, *[""] * len(lengths), lengths=lengths)


def test_overlong_penalty_by_hand():
    # L = 10, C = 4: free up to 6 tokens, a quarter of the penalty for each further one, all of it from 10 on.
    assert overlong(OverlongPenalty(10, 4), 0, 6, 7, 8, 9, 10, 11, 99) == [0, 0, -0.25, -0.5, -0.75, -1, -1, -1]
    assert overlong(OverlongPenalty(10, 4, penalty=2.0), 6, 7, 10, 11) == [0, -0.5, -2, -2]
    assert overlong(OverlongPenalty(10, 0), 9, 10, 11) == [0, 0, -1]
    assert overlong(OverlongPenalty(4, 4), 0, 1, 4) == [0, -0.25, -1]


def test_overlong_penalty_agrees_with_its_two_other_forms():
    limit, buffer, factor = 20, 7, 0.3
    for length in range(limit + 1):
        (reward,) = overlong(OverlongPenalty(limit, buffer, factor), length)
        exceeded = length - (limit - buffer)
        assert reward == pytest.approx(min(-exceeded / buffer * factor, 0), abs=1e-15)  # verl's
        below = 0.0 if length <= limit - buffer else (limit - buffer - length) / buffer
        assert reward == pytest.approx(factor * below, abs=1e-15)  # eq. 13 of the paper, and TRL's


@pytest.mark.parametrize(
    ("units", "size", "share"),
    [("abab", 2, 1 / 3), ("aaaa", 2, 2 / 3), ("aaaa", 1, 3 / 4), ("abcd", 2, 0.0), ("a", 2, 0.0), ("", 1, 0.0)],
)
def test_repeated_share(units, size, share):
    assert repeated_share(units, size) == pytest.approx(share, abs=1e-15)


def test_repetition_penalty_of_words():
    texts = ["To be or  not to\nBE", "to be", "one two three four", ""]
    # to be, be or, or not, not to, to be: one of five came before.
    assert call(RepetitionPenalty(2, -1.0), *texts) == pytest.approx([-0.2, 0, 0, 0])
    assert call(RepetitionPenalty(2, -0.5), *texts) == pytest.approx([-0.1, 0, 0, 0])
    assert math.copysign(1, call(RepetitionPenalty(2, -1.0), "a b")[0]) == 1  # no negative zero
    messages = [[{"role": "assistant", "content": texts[0]}]]
    assert RepetitionPenalty(2, -1.0)(["p"], messages, [[1]]) == pytest.approx([-0.2])


def test_repetition_penalty_of_tokens():
    reward = RepetitionPenalty(3, -2.0, unit="token")
    ids = [[1, 2, 3, 1, 2, 3], [1, 2], [1, 2, 3, 4]]  # 123, 231, 312, 123
    assert reward(["p"] * 3, ["x x x x x"] * 3, ids) == pytest.approx([-0.5, 0, 0])


def contains_answer(completions, answer, **columns):
    return [float(own in completion) for completion, own in zip(completions, answer, strict=True)]


# Half a cosine over 12 tokens: 1 at 0, 0.75 at 4, 0.5 at 6, 0.25 at 8, 0 at 12 (cos 60 degrees is 1/2).
LENGTHS = (0, 4, 6, 8, 12, 30)


def cosine(correct, answer, **options):
    reward = CosineLengthReward(correct, 12, **options)
    return call(reward, *["yes"] * len(LENGTHS), lengths=LENGTHS, answer=[answer] * len(LENGTHS))


def test_cosine_between():
    assert [cosine_between(3.0, 1.0, step / 12) for step in LENGTHS] == pytest.approx([3, 2.5, 2, 1.5, 1, 1])


@pytest.mark.parametrize("correct", [contains_answer, ExactMatch()], ids=["trl", "verl"])
def test_cosine_length_reward_by_hand(correct):
    assert cosine(correct, "yes") == pytest.approx([1.0, 0.875, 0.75, 0.625, 0.5, 0.5])
    assert cosine(correct, "no") == pytest.approx([-1.0, -0.875, -0.75, -0.625, -0.5, -0.5])
    bounds = {"min_value_wrong": -10, "max_value_wrong": 0, "min_value_correct": 1, "max_value_correct": 2}
    assert cosine(correct, "yes", **bounds) == pytest.approx([2, 1.75, 1.5, 1.25, 1, 1])
    assert cosine(correct, "no", **bounds) == pytest.approx([-10, -7.5, -5, -2.5, 0, 0])


def test_cosine_reward_at_the_limit():
    assert cosine(contains_answer, "yes", exceed_value=-10.0) == pytest.approx([1, 0.875, 0.75, 0.625, -10, -10])
    assert cosine(contains_answer, "no", exceed_value=-10.0)[-2:] == [-10, -10]


def test_cosine_reward_of_characters():
    reward = CosineLengthReward(contains_answer, 12, unit="character")
    assert call(reward, "yes" + "." * 3, "maybe...", lengths=[0, 0], answer=["yes"] * 2) == pytest.approx(
        [0.75, -0.625]
    )
    messages = [[{"role": "assistant", "content": "yes..."}]]
    assert reward(["p"], messages, [[]], answer=["yes"]) == pytest.approx([0.75])


def test_cosine_reward_with_an_async_function_and_a_threshold():
    async def grade(completions, **columns):
        return [0.5, 0.6, None]

    assert call(CosineLengthReward(grade, 12), "", "", "") == [-1.0, 1.0, None]

    async def half(data_source, solution_str, ground_truth):
        return {"score": float(solution_str), "length": 1}

    assert call(CosineLengthReward(half, 12), "0.50", "0.51", lengths=[0, 0], answer=["", ""]) == [-1.0, 1.0]
    assert call(CosineLengthReward(half, 12, threshold=0.1), "0.50", lengths=[0], answer=[""]) == [1.0]


def test_cosine_reward_where_the_other_does_not_apply_or_fails():
    def grade(data_source, solution_str, ground_truth):
        if solution_str == "bad":
            raise RuntimeError("no")
        return None if solution_str == "skip" else 1.0

    group = RolloutGroup([1], [Rollout([], text=text) for text in ("good", "skip", "bad")], columns={"answer": "x"})
    metrics = apply_rewards([group], CosineLengthReward(grade, 12))
    assert [rollout.reward for rollout in group.rollouts] == [1.0, None, None]
    name = "rewards/CosineLengthReward/"
    assert (metrics[name + "none"], metrics[name + "invalid"]) == (1.0, 1.0)


def test_cosine_reward_hands_prompts_columns_and_source_on():
    seen = []

    def trl(prompts, completions, completion_ids, level, **columns):
        seen.append((prompts, completions, completion_ids, level, columns))
        return [1.0] * len(prompts)

    def verl(data_source, solution_str, ground_truth, extra_info=None):
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return 1.0

    columns = {"level": [1, 2], "data_source": ["s", None], "answer": ["x", "y"], "extra_info": [{"i": 0}, None]}
    call(CosineLengthReward(trl, 12), "a", "bc", **columns)
    rest = {name: values for name, values in columns.items() if name != "level"}
    assert seen == [(["p", "p"], ["a", "bc"], [[0], [0, 1]], [1, 2], rest)]
    seen.clear()
    call(CosineLengthReward(verl, 12), "a", "bc", **columns)
    assert seen == [("s", "a", "x", {"i": 0}), ("default", "bc", "y", None)]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: OverlongPenalty(0, 0), "OverlongPenalty.max_length"),
        (lambda: OverlongPenalty(10, 11), "overlong_buffer"),
        (lambda: OverlongPenalty(10, -1), "overlong_buffer"),
        (lambda: OverlongPenalty(10, 4, -1.0), "penalty"),
        (lambda: OverlongPenalty(10, 4, math.nan), "penalty"),
        (lambda: RepetitionPenalty(0, -1.0), "RepetitionPenalty.ngram_size"),
        (lambda: RepetitionPenalty(2, 1.0), "max_penalty"),
        (lambda: RepetitionPenalty(2, -math.inf), "max_penalty"),
        (lambda: RepetitionPenalty(2, -1.0, "line"), "RepetitionPenalty.unit"),
        (lambda: CosineLengthReward(contains_answer, 0), "CosineLengthReward.max_len"),
        (lambda: CosineLengthReward(contains_answer, 12, unit="word"), "CosineLengthReward.unit"),
        (lambda: CosineLengthReward(contains_answer, 12, min_value_wrong=0.0), "min_value_wrong"),
        (lambda: CosineLengthReward(contains_answer, 12, min_value_correct=2.0), "min_value_correct"),
        (lambda: CosineLengthReward(contains_answer, 12, max_value_wrong=0.7), "max_value_wrong"),
        (lambda: CosineLengthReward(contains_answer, 12, max_value_correct=math.inf), "max_value_correct"),
        (lambda: CosineLengthReward(contains_answer, 12, exceed_value=math.nan), "exceed_value"),
        (lambda: CosineLengthReward(ExactMatch, 12), "'ExactMatch' has the signature"),
        (lambda: CosineLengthReward(Weighted(contains_answer), 12), "Weighted"),
        (lambda: CosineLengthReward(lambda text: 1.0, 12), "'reward_1'.* signature"),
        (lambda: CosineLengthReward(lambda groups: [[1.0]], 12), "'reward_1'.* signature"),
        (lambda: call(CosineLengthReward(contains_answer, 12), "a"), r"'contains_answer' requires \['answer'\]"),
    ],
)
def test_what_cannot_work_is_refused_by_name(make, name):
    with pytest.raises((ValueError, TypeError), match=name):
        make()


class Trainer:
    def __init__(self, rewards: list[Weighted | RewardFunction] | RewardFunction):
        self.rewards = rewards


def test_all_three_together_and_in_yaml():
    parts = "pl_grouprl.rewards."
    shaped = {"correct": {"class_path": parts + "ExactMatch"}, "max_len": 12}
    repetition = {"ngram_size": 1, "max_penalty": -1.0, "unit": "token"}
    rewards = [
        {"class_path": parts + "CosineLengthReward", "init_args": shaped},
        {"class_path": parts + "OverlongPenalty", "init_args": {"max_length": 12, "overlong_buffer": 8}},
        {"function": {"class_path": parts + "RepetitionPenalty", "init_args": repetition}, "weight": 0.5},
    ]
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Trainer, "model")
    dumped = parser.dump(parser.parse_object({"model": {"rewards": rewards}}))
    made = parser.instantiate(parser.parse_string(dumped)).model.rewards
    group = RolloutGroup([1], [Rollout([7, 8, 8, 9, 7, 7], text="yes")], columns={"answer": "yes"}, prompt="p")
    apply_rewards([group], made)
    # Cosine: 0.75 halfway. Overlong: 2 of 8 tokens of the buffer. Repetition: 3 distinct of 6 tokens, at half weight.
    assert group.rollouts[0].rewards == pytest.approx(
        {"CosineLengthReward": 0.75, "OverlongPenalty": -0.25, "RepetitionPenalty": -0.5}
    )
    assert group.rollouts[0].reward == pytest.approx(0.75 - 0.25 - 0.25)
