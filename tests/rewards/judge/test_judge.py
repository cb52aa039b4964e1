"""Grades from a server: read, retried, remembered, bounded, and without the key in sight."""

import asyncio
import copy
import gzip
import html
import json
import logging
import math
import pickle
import random
import threading
import tracemalloc
from base64 import b64encode
from urllib.parse import quote

import httpx2
import pytest
from helpers.judge_server import Answer, judge_server, reply
from helpers.rewards import group_of, rewards_of

from pl_grouprl.rewards import Judge, RewardConfigurationError, apply_rewards, check_columns
from pl_grouprl.rewards import judge as judge_module
from pl_grouprl.types import Prompt

KEY = "sk-very-secret"


@pytest.fixture
def waits(monkeypatch):
    """The pauses before retries, none of which is waited for."""
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr(judge_module, "sleep", sleep)
    return waits


def by_length(request):
    """Grades a completion `xxx` with 3."""
    return reply(f"Grade: {request.question.count('x')}")


def grade(answer, *texts, max_failed_share=1.0, **options):
    """Rewards of a group of completions, its metrics, and the server."""
    group = group_of(*texts)
    with judge_server(answer) as (server, url):
        metrics = apply_rewards([group], Judge(url, "m", "Count.", **options), max_failed_share=max_failed_share)
    return rewards_of(group), metrics, server


def in_turn(*answers):
    """One answer after another."""
    remaining = iter(answers)
    lock = threading.Lock()

    def answer(request):
        with lock:
            return next(remaining)

    return answer


def test_grades_become_rewards_from_0_to_1():
    rewards, metrics, server = grade(by_length, "x", "xxx", "xxxxx", scale=(1.0, 5.0))
    assert rewards == [0.0, 0.5, 1.0]
    assert metrics["rewards/Judge/grade"] == 3.0
    assert metrics["rewards/Judge/cached"] == 0.0
    assert metrics["rewards/Judge/prompt_tokens"] == 30.0
    assert metrics["rewards/Judge/completion_tokens"] == 5.0
    assert metrics["rewards/Judge/latency"] > 0.0
    request = server.requests[0]
    assert request.path == "/v1/chat/completions"
    assert "Authorization" not in request.headers
    assert {key: value for key, value in request.body.items() if key != "messages"} == {
        "model": "m", "temperature": 0, "max_tokens": 1024
    }  # fmt: skip


def test_structured_output_is_asked_for_and_fields_may_be_left_out():
    def answer(request):
        schema = request.body["response_format"]["json_schema"]["schema"]
        assert (schema["properties"]["score"]["minimum"], schema["properties"]["score"]["maximum"]) == (0, 10)
        return reply('{"reason": "", "score": 5}')

    body = {"temperature": None, "max_tokens": None, "max_completion_tokens": 9}
    rewards, _, server = grade(answer, "x", reply_format="json_schema", extra_body=body)
    assert rewards == [0.5]
    assert server.requests[0].body["max_completion_tokens"] == 9
    assert not {"temperature", "max_tokens"} & server.requests[0].body.keys()


CHAT = b'{"choices": [{"message": {"content": "Grade: 1"}}], "usage": {"prompt_tokens": %s}}'


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (reply("I will not say."), "there is no line `Grade: N` in the reply 'I will not say.'"),
        (reply("Grade: 11"), "the grade 11.0 is not between 0 and 10"),
        (reply("Grade: 3", finish_reason="length"), "the reply was cut off; raise max_tokens"),
        (reply(None), "the reply has no text"),
        (Answer(b"<html>"), "the answer is not a chat completion: '<html>'"),
        (Answer(b'{"choices": []}'), "the answer is not a chat completion"),
        (Answer(CHAT % b"1e999"), "the answer is not a chat completion"),
        (Answer(CHAT % (b"1" + b"0" * 999)), "the answer is not a chat completion"),
        (Answer(b" " * 5_000_000), "the answer has more than 4194304 bytes"),
        (Answer(gzip.compress(b"{}"), 200, {"Content-Encoding": "gzip"}), "the answer is compressed ('gzip')"),
        (Answer(b'{"error": "context too long"}', 400), 'status 400: \'{"error": "context too long"}\''),
        (Answer(b"elsewhere", 302, {"Location": "http://127.0.0.1:1/"}), "status 302"),
    ],
)
def test_without_a_grade_a_completion_has_no_reward_and_the_others_do(bad, reason, caplog, waits):
    rewards, metrics, server = grade(
        lambda request: bad if "bad" in request.question else by_length(request), "bad", "x"
    )
    assert rewards == [None, 0.1]
    assert metrics["rewards/Judge/invalid"] == 1.0
    assert f"gave no grade for 1 of 2 completions: {reason}" in caplog.text
    assert (len(server.requests), waits) == (2, [])  # asked once each


def test_refusals_that_pass_are_retried_with_growing_pauses(waits):
    failures = [Answer(status=500), Answer(status=0), Answer(status=503), Answer(status=429)]
    state = random.getstate()
    rewards, _, server = grade(in_turn(*failures, reply("Grade: 4")), "x")
    assert random.getstate() == state  # pauses draw no random numbers of the run
    assert rewards == [0.4]
    assert len(server.requests) == 5
    for wait, longest in zip(waits, [1.0, 2.0, 4.0, 8.0], strict=True):
        assert longest / 2 <= wait <= longest


def test_a_server_says_how_long_to_wait(waits):
    answers = [Answer(status=429, headers={"Retry-After": after}) for after in ("7", "soon")]
    assert grade(in_turn(*answers, reply("Grade: 4")), "x")[0] == [0.4]
    assert waits[0] == 7.0
    assert 1.0 <= waits[1] <= 2.0


def test_a_wait_beyond_a_minute_is_a_failure(waits, caplog):
    rewards, _, server = grade(lambda request: Answer(b"quota", 429, {"Retry-After": "3600"}), "x")
    assert (rewards, len(server.requests), waits) == ([None], 1, [])
    assert "status 429: 'quota', and asks to wait 3600 seconds" in caplog.text


def test_retries_end_and_the_run_where_too_many_fail(waits, caplog):
    rewards, _, server = grade(lambda request: Answer(status=500), "x", max_retries=2)
    assert (rewards, len(server.requests), len(waits)) == ([None], 3, 2)
    assert "status 500: '' (attempt 3 of 3)" in caplog.text
    with pytest.raises(RuntimeError, match=r"'Judge' .* failed for 2 of 3 rollouts"):
        grade(lambda request: reply("Grade: 1" if "x" in request.question else "?"), *"abx", max_failed_share=0.5)


def test_a_slow_answer_is_given_up_and_asked_for_again(waits):
    done = threading.Event()
    slow = reply("Grade: 9")
    slow.after = done
    try:
        rewards, metrics, server = grade(in_turn(slow, reply("Grade: 4")), "x", timeout=1.0)
    finally:
        done.set()
    assert (rewards, len(server.requests), len(waits)) == ([0.4], 2, 1)
    assert metrics["rewards/Judge/latency"] >= 1.0


def test_requests_at_a_time_are_bounded():
    """Each request is held until three are under way; a fourth would have arrived by then."""
    full = threading.Event()

    def answer(request):
        with server.changed:
            if server.changed.wait_for(lambda: server.under_way >= 3 or full.is_set(), timeout=60):
                server.changed.wait_for(lambda: server.under_way > 3 or full.is_set(), timeout=0.2)
            full.set()
            server.changed.notify_all()
        return by_length(request)

    group = group_of(*("x" * count for count in range(1, 11)))
    with judge_server(answer) as (server, url):
        apply_rewards([group], Judge(url, "m", "Count.", max_concurrent=3))
    assert rewards_of(group) == [count / 10 for count in range(1, 11)]
    assert server.most_at_a_time == 3


def test_the_same_completion_is_asked_for_once_and_again_without_a_grade():
    with judge_server(in_turn(reply("?"), reply("Grade: 1"), reply("Grade: 2"))) as (server, url):
        judge, group = Judge(url, "m", "Count.", max_concurrent=1), group_of("x", "x", "xx", "x")
        assert apply_rewards([group_of("x")], judge, max_failed_share=1.0)["rewards/Judge/invalid"] == 1.0
        metrics = apply_rewards([group], judge)
    assert rewards_of(group) == [0.1, 0.1, 0.2, 0.1]
    assert len(server.requests) == 3
    assert metrics["rewards/Judge/cached"] == 0.5


def test_replies_are_remembered_on_disk(tmp_path):
    with judge_server(by_length) as (server, url):
        for number in range(3):
            group = group_of("x", "xx")
            metrics = apply_rewards([group], Judge(url, "m", "Count.", cache_dir=str(tmp_path / "cache")))
            assert rewards_of(group) == [0.1, 0.2]
            assert (len(server.requests), metrics["rewards/Judge/cached"]) == (2, float(number > 0))
        for other in ({"model": "n"}, {"rubric": "Count well."}, {"extra_body": {"seed": 1}}):
            options = {"base_url": url, "model": "m", "rubric": "Count.", "cache_dir": str(tmp_path / "cache")}
            apply_rewards([group_of("x")], Judge(**options | other))
    assert len(server.requests) == 5


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"reply": 3}', b'{"reply": "no grade"}'])
def test_a_damaged_file_is_asked_for_again(tmp_path, content):
    with judge_server(by_length) as (server, url):
        for _ in range(2):
            apply_rewards([group_of("x")], Judge(url, "m", "Count.", cache_dir=str(tmp_path)))
            (file,) = tmp_path.glob("*/*")
            assert json.loads(file.read_bytes()) == {"reply": "Grade: 1"}
            file.write_bytes(content)
    assert len(server.requests) == 2


def test_a_cache_that_cannot_be_written_costs_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="Judge cannot write to cache_dir"):
        assert grade(by_length, "x", cache_dir=str(tmp_path / "file"))[0] == [0.1]


def test_memory_keeps_the_latest_replies(monkeypatch):
    monkeypatch.setattr("pl_grouprl.rewards.judge._MAX_IN_MEMORY", 2)
    with judge_server(by_length) as (server, url):
        judge = Judge(url, "m", "Count.")
        for text in ("x", "xx", "x", "xxx", "x", "xx"):
            apply_rewards([group_of(text)], judge)
    assert len(server.requests) == 4  # "xx" was forgotten, "x" was not


def test_the_key_is_sent_and_shown_nowhere(monkeypatch, caplog):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    answers = in_turn(reply("Grade: 1"), Answer(f"wrong key {KEY}".encode(), 401), Answer(f"{' ' * 290}{KEY}".encode()))
    with caplog.at_level(logging.DEBUG), judge_server(answers) as (server, url):
        judge = Judge(url, "m", "Count.", api_key_env="JUDGE_KEY")
        apply_rewards([group_of("x")], judge)
        for text in ("xx", "xxx"):
            apply_rewards([group_of(text)], judge, max_failed_share=1.0)
    assert [request.headers["Authorization"] for request in server.requests] == [f"Bearer {KEY}"] * 3
    assert "status 401: 'wrong key ***'" in caplog.text
    assert KEY[:8] not in caplog.text  # nor a part of it, where an answer is cut
    assert KEY not in repr(vars(judge)) + repr(judge.run_options()) + str(pickle.dumps(judge))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_an_escaped_key_is_neither_logged_nor_cached(monkeypatch, caplog, tmp_path, encoding):
    key = 'sk/very+"secret"'
    monkeypatch.setenv("JUDGE_KEY", key)
    forms = [
        key,
        json.dumps(key),
        "".join(f"\\u{ord(character):04x}" for character in key),
        quote(key),
        quote(quote(key, safe="")),
        html.escape(key),
        "".join(f"&#{ord(character)};" for character in key),
        key.encode().hex(),
        *(b64encode((start + key).encode()).decode() for start in ("", "Bearer ", "user:")),
    ]
    quoted = " ".join(forms)
    answers = in_turn(
        Answer(json.dumps({"error": quoted}).encode(encoding), 401),
        Answer(quoted.encode(encoding), 400),
        reply(f"{quoted}\nGrade: 1"),
    )
    with caplog.at_level(logging.DEBUG), judge_server(answers) as (_, url):
        judge = Judge(url, "m", "Count.", api_key_env="JUDGE_KEY", cache_dir=str(tmp_path))
        for text in ("x", "xx", "xxx"):
            apply_rewards([group_of(text)], judge, max_failed_share=1.0)
    (cached,) = tmp_path.rglob("*.json")
    shown = caplog.text + json.loads(cached.read_bytes())["reply"]
    assert shown.count("***") == 3 * len(forms)
    for form in [*forms[:-3], *(form[12:] for form in forms[-3:])]:  # not even a part of it, after "Bearer "
        assert not [form[start : start + 8] for start in range(len(form) - 8) if form[start : start + 8] in shown]


def test_an_answer_that_is_compressed_twice_is_not_unpacked(waits, caplog):
    bomb = gzip.compress(gzip.compress(bytes(64 << 20)))
    assert len(bomb) < 1000
    answer = Answer(bomb, 200, {"Content-Encoding": "gzip, gzip"})
    tracemalloc.start()
    try:
        rewards, _, server = grade(lambda request: answer, "x")
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert (rewards, len(server.requests)) == ([None], 1)
    assert "the answer is compressed ('gzip, gzip'), which the request did not accept" in caplog.text
    assert server.requests[0].headers["Accept-Encoding"] == "identity"


@pytest.mark.parametrize("value", [None, "", "a\nb"])
def test_a_missing_or_malformed_key_ends_the_run(monkeypatch, value):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    judge = Judge("http://localhost:1/v1", "m", "Count.", api_key_env="JUDGE_KEY")
    with pytest.raises(RewardConfigurationError, match=r"JUDGE_KEY \(api_key_env\)"):
        judge.set_up()
    with pytest.raises(RewardConfigurationError, match="JUDGE_KEY"):
        apply_rewards([group_of("x")], judge)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            Answer(b'{"error": "no such model"}', 404),
            "status 404: .*no such model.* check base_url .*, model, api_key_env",
        ),
        (Answer(b"", 401), "status 401"),
        (reply("Hello!"), "no line `Grade: N` in the reply 'Hello!'"),
    ],
)
def test_a_trial_fails_before_the_run_does(answer, reason):
    with judge_server(lambda request: answer) as (_, url):
        judge = Judge(url, "m", "Count.")
        with pytest.raises(RewardConfigurationError, match=reason):
            check_columns([Prompt([1], prompt="p")], judge, "train")


def test_no_server_at_all_is_found_by_the_trial(waits):
    with pytest.raises(RewardConfigurationError, match=r"Judge\('http.*ConnectError"):
        Judge("http://127.0.0.1:1/v1", "m", "Count.", max_retries=1).set_up()
    assert len(waits) == 1


def test_the_trial_is_made_once_even_inside_a_running_loop():
    async def set_up():
        judge.set_up()

    with judge_server(by_length) as (server, url):
        judge = Judge(url, "m", "Is {completion} like {reference}?")
        asyncio.run(set_up())
        check_columns([Prompt([1], columns={"answer": "x"}, prompt="p")], judge, "train")
    assert len(server.requests) == 1
    assert "{" not in server.requests[0].question


def test_rows_must_have_what_the_rubric_shows():
    with judge_server(by_length) as (_, url):
        judge = Judge(url, "m", "Is {completion} like {reference}, by {style}?")
        with pytest.raises(
            ValueError, match=r"Judge.rubric has the fields \['reference', 'style'\], and the row has \['a'\]"
        ):
            check_columns([Prompt([1], columns={"a": 1}, prompt="p")], judge, "train")
        group = group_of("xx", reward_model={"ground_truth": "x"}, style="x")
        apply_rewards([group, group_of("x", answer="4", style=None)], judge)
    assert rewards_of(group) == [0.4]


def test_a_value_that_is_none_means_that_the_reward_does_not_apply():
    with judge_server(by_length) as (server, url):
        group = group_of("x", answer=None)
        metrics = apply_rewards([group], Judge(url, "m", "Is {completion} like {answer}?"))
    assert (server.requests, metrics["rewards/Judge/none"]) == ([], 1.0)


def test_huge_and_odd_texts_arrive_as_they_are():
    texts = ["{prompt}" * 100_000, "é🤖\u2028\0", "\ud800"]
    _, _, server = grade(lambda request: reply("Grade: 1"), *texts)
    asked = sorted(request.question.split("completion]\n")[1].rsplit("\n[")[0] for request in server.requests)
    assert asked == sorted(texts)


def test_connections_are_closed_after_the_batch(monkeypatch):
    clients, make = [], httpx2.AsyncClient

    def record(**options):
        clients.append(make(**options))
        return clients[-1]

    monkeypatch.setattr(httpx2, "AsyncClient", record)

    async def overlapping(*texts):
        await asyncio.gather(*(judge(["p"], [text]) for text in texts))

    with judge_server(by_length) as (_, url):
        judge = Judge(url, "m", "Count.")
        for texts in (["x", "xx", "xxx"], ["x", "xx", "xxx"], ["xxxx"]):  # the second time from memory
            asyncio.run(overlapping(*texts))
    assert [client.is_closed for client in clients] == [True, True]


def test_copies_work_and_remember_nothing():
    with judge_server(by_length) as (server, url):
        judge = Judge(url, "m", "Count.")
        for own in (judge, copy.deepcopy(judge), pickle.loads(pickle.dumps(judge))):
            own.set_up()
            assert apply_rewards([group_of("x")], own)["rewards/Judge/mean"] == 0.1
    assert len(server.requests) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": (5.0, 1.0)}, "Judge.scale is"), ({"scale": (0.0, math.inf)}, "Judge.scale is"),
        ({"max_concurrent": 0}, "Judge.max_concurrent is 0"), ({"timeout": 0.0}, "Judge.timeout is 0"),
        ({"max_retries": -1}, "Judge.max_retries is -1"), ({"max_tokens": 0}, "Judge.max_tokens is 0"),
        ({"extra_body": {"stream": True}}, r"Judge.extra_body has \['stream'\]"), ({"rubric": " "}, "Judge.rubric"),
        ({"rubric": "Is it {answer}?"}, r"Judge.rubric has the fields \['answer'\]"),
        ({"base_url": f"http://user:{KEY}@h/v1"}, "Judge.*variable"),
        ({"base_url": f"user:{KEY}@h/v1"}, "Judge.*variable"),
        ({"base_url": f"http://h/v1?api_key={KEY}"}, "Judge.*variable"),
        ({"base_url": f" http:u:{KEY}@h/v1"}, "Judge.*variable"), ({"api_key_env": KEY}, "Judge.*variable"),
    ],
)  # fmt: skip
def test_malformed_options_are_refused_without_showing_secrets(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        Judge(**{"base_url": "http://localhost/v1", "model": "m", "rubric": "Count."} | options)
    assert KEY not in str(caught.value)
