"""Why a completion ends, where, and what its text is."""

import itertools

import pytest
from helpers.engines import on
from helpers.rollouts import PROMPTS
from helpers.tiny_tokenizers import END, TURN


def flat(groups):
    return list(itertools.chain(*groups))


@on("letters")
def test_end_tokens_and_length(subject):
    """End tokens are those of the generation config (3), the tokenizer (5) and the request (9)."""
    ends = {3, END, 9}
    rollouts = flat(subject.sample(PROMPTS, 20, max_new_tokens=6, stop_token_ids=(9,), temperature=2.0))
    for rollout in rollouts:
        assert not ends & set(rollout.token_ids[:-1])
        stopped = rollout.token_ids[-1] in ends
        assert rollout.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(rollout.token_ids) == 6
        assert len(rollout.logprobs) == len(rollout.token_ids)
        letters = [chr(ord("a") + token) for token in rollout.token_ids if token not in (END, TURN)]
        assert rollout.text == "".join(letters)
    assert any(len(r.token_ids) == 6 and r.finish_reason == "stop" for r in rollouts)
    assert {r.token_ids[-1] for r in rollouts if r.finish_reason == "stop"} == ends
    assert {len(r.token_ids) for r in rollouts} == {1, 2, 3, 4, 5, 6}
    singles = flat(subject.sample(PROMPTS, 20, max_new_tokens=1, temperature=2.0))
    assert {len(rollout.token_ids) for rollout in singles} == {1}
    ended = [rollout.token_ids[0] in (3, END) for rollout in singles]
    assert [rollout.finish_reason == "stop" for rollout in singles] == ended
    assert set(ended) == {True, False}


def stopped_at(subject, long, strings):
    """Where the tokens of a rollout that ran on have completed one of the strings first; None if nowhere."""
    for count in range(1, len(long.token_ids) + 1):
        text = subject.tokenizer.decode(long.token_ids[:count], skip_special_tokens=False)
        found = [string for string in strings if string in text]
        if found:
            return count, found[0]
    return None


def assert_stopped(subject, strings, **options):
    """Compare with the same rollouts without stop strings; returns which strings ended some, None for none."""
    unstopped = flat(subject.sample(PROMPTS, 20, seed=4, temperature=2.0, **options))
    stopped = flat(subject.sample(PROMPTS, 20, seed=4, temperature=2.0, stop=tuple(strings), **options))
    by_string = set()
    for long, short in zip(unstopped, stopped, strict=True):
        place = stopped_at(subject, long, strings)
        count, string = place or (len(long.token_ids), None)
        assert short.token_ids == long.token_ids[:count]
        assert short.logprobs == pytest.approx(long.logprobs[:count], abs=1e-4)
        assert short.finish_reason == (long.finish_reason if place is None else "stop")
        assert short.text == subject.tokenizer.decode(short.token_ids, skip_special_tokens=True)
        by_string.add(string)
    return by_string


@on("letters")
def test_stop_strings(subject):
    letters = [chr(ord("a") + token) for token in range(24) if token not in (3, END, TURN)]
    pairs = tuple(left + right for left in letters[:8] for right in letters)
    found = assert_stopped(subject, ("q", *pairs), max_new_tokens=8)
    assert {"q", None} <= found
    assert len(found) > 5


@on("letters")
def test_special_tokens_can_be_stop_strings(subject):
    assert assert_stopped(subject, ("<turn>", "zzz"), max_new_tokens=10) == {"<turn>", None}
    assert "<end>" in assert_stopped(subject, ("<end>", "c"), max_new_tokens=10)


@on("letters")
def test_stop_strings_across_special_tokens(subject):
    """What stands on both sides of a special token is not a string of its own."""
    letters = [chr(ord("a") + token) for token in range(24) if token not in (3, END, TURN)]
    strings = tuple(f"{letter}<turn>" for letter in letters[:12])
    assert len(assert_stopped(subject, strings, max_new_tokens=20)) > 3
    pairs = tuple(left + right for left in letters for right in letters[:6])
    assert assert_stopped(subject, pairs, max_new_tokens=4)


@on("bytes")
def test_stop_strings_of_several_bytes(subject):
    """Characters of several tokens, amid tokens that make none."""
    assert len(assert_stopped(subject, ("a", "b", "c", "!"), max_new_tokens=40)) > 3
    wide = tuple(chr(code) for code in range(0x80, 0x180))  # of two bytes each
    assert {None} < assert_stopped(subject, wide, max_new_tokens=24)


@on("digits")
def test_text_of_the_built_in_task(subject):
    """The policy knows more tokens than the tokenizer, which has no text for them."""
    unknown = range(len(subject.tokenizer), 32)
    rollouts = flat(subject.sample([[3, 4, 5], [2], [30, 2]], 20, temperature=2.0, max_new_tokens=12))
    for rollout in rollouts:
        assert rollout.text == subject.tokenizer.decode(rollout.token_ids, skip_special_tokens=True)
        assert rollout.finish_reason == ("stop" if rollout.token_ids[-1] == 1 else "length")
    assert any(token in unknown for rollout in rollouts for token in rollout.token_ids)
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}
    assert assert_stopped(subject, ("e", "7"), max_new_tokens=12) == {"e", "7", None}


@on("letters")
def test_prompts_of_a_chat_template(subject):
    messages = [{"role": "user", "content": "abcd"}]
    encoded = subject.tokenizer.apply_chat_template(messages, tokenize=True)["input_ids"]
    assert encoded == [0, 1, 2, 3, TURN]  # tokens that end a completion may stand in a prompt
    (first, second), (third, _) = subject.sample([encoded, [0, 1, 2, 3, TURN]], 2, max_new_tokens=8, temperature=0.0)
    assert first.token_ids == second.token_ids == third.token_ids
