"""Prompts of several calls at several servers that have no model."""

import asyncio
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers.fake_sampler import FakeSampler
from helpers.server_engines import GENERATE, at
from helpers.watched_processes import until

from pl_grouprl.distributed.checksum import WeightsMismatchError
from pl_grouprl.rollout.engine import SamplerLostError, StopStrings
from pl_grouprl.rollout.vllm import client as server_module
from pl_grouprl.rollout.vllm import scheduler as scheduler_module
from pl_grouprl.rollout.vllm.client import Labels, PromptRequest, Server
from pl_grouprl.rollout.vllm.scheduler import Scheduler

LABELS = Labels("run")


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch):
    monkeypatch.setattr(server_module, "_LONGEST_WAIT", 0.1)
    monkeypatch.setattr(scheduler_module, "_FIRST_PAUSE", 0.01)


@pytest.fixture
def fakes():
    made = [FakeSampler(), FakeSampler()]
    for fake in made:
        fake.label = LABELS.of(1)
    yield made
    for fake in made:
        fake.close()


class Busy:
    """Counts the requests that a fake answers at the same time, each for a moment."""

    def __init__(self, fake):
        self.now = self.most = self.total = 0
        self._lock = threading.Lock()
        answer = fake.generate

        def generate(body):
            with self._lock:
                self.now, self.total = self.now + 1, self.total + 1
                self.most = max(self.most, self.now)
            time.sleep(0.02)
            with self._lock:
                self.now -= 1
            return answer(body)

        fake.generate = generate


def pool_of(fakes, max_concurrent=64, timeout=20.0):
    return Scheduler([Server(fake.url, timeout=timeout) for fake in fakes], max_concurrent)


def request(token, sequences=1):
    body = {"token_ids": [token], "sampling_params": {"seed": token, "max_tokens": 3, "stop_token_ids": []}}
    return PromptRequest(sequences * [body], StopStrings(None, ()), LABELS, min_version=1, vocab_size=61)


def in_threads(pool, count):
    """One call for each prompt, all at once."""
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(lambda token: pool.sample([request(token)]), range(count)))


def test_calls_of_threads_share_the_limit(fakes):
    busy = [Busy(fake) for fake in fakes]
    pool = pool_of(fakes, max_concurrent=2)
    found = in_threads(pool, 12)
    assert found == [pool.sample([request(token)]) for token in range(12)]
    assert [one.most for one in busy] == [2, 2]


def test_calls_of_threads_are_split_evenly(fakes):
    held = threading.Barrier(8, timeout=30)  # all are being answered at the same time
    for fake in fakes:
        fake.before = at(GENERATE, lambda: held.wait() and None)
    in_threads(pool_of(fakes), 8)
    assert [len(fake.asked) for fake in fakes] == [4, 4]


def test_sequences_of_a_prompt_have_one_server(fakes):
    pool_of(fakes).sample([request(1, sequences=3), request(2, sequences=3)])
    found = [Counter(body["token_ids"][0] for body in fake.asked) for fake in fakes]
    assert found[0].keys().isdisjoint(found[1])
    assert found[0] + found[1] == {1: 3, 2: 3}


def test_a_server_that_is_away_does_not_hold_up_the_others(fakes):
    away, up = fakes
    away.close()
    groups = pool_of([away, up], timeout=60.0).sample([request(token) for token in range(4)])
    assert len(groups) == len(up.asked) == 4
    assert not away.asked


def test_a_server_that_comes_back_takes_part_again(fakes):
    late, up = fakes
    late.before = lambda path: (503, {"error": "starting"})

    def count():
        if len(up.asked) == 3:
            late.before = lambda path: None
            until(lambda: late.asked)

    up.before = at(GENERATE, count)
    pool_of([late, up], max_concurrent=1).sample([request(token) for token in range(8)])
    assert late.asked
    assert len(late.asked) + len(up.asked) == 8


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_has_too_much_to_do_is_asked_again(fakes, status):
    fake, answer = fakes[0], fakes[0].generate
    refusals = iter(4 * [(status, {"error": "later"})])
    fake.before = at(GENERATE, lambda: next(refusals, None))
    assert len(pool_of([fake]).sample([request(1)])) == len(fake.asked) == 1
    refusals = iter([(status, {"error": "later"})])

    def abort(body):
        fake.before = at("/weight_info", lambda: next(refusals, None))
        fake.generate = answer
        return {"choices": [{"token_ids": [], "logprobs": None, "finish_reason": "abort", "weight_versions": None}]}

    fake.generate = abort
    assert len(pool_of([fake]).sample([request(1)])) == 1
    assert next(refusals, None) is None


def test_a_prompt_that_always_breaks_off_ends_its_call_alone(fakes):
    for fake in fakes:
        answer = fake.generate
        fake.generate = lambda body, answer=answer: (
            (500, {"error": "this one"}) if body["token_ids"] == [3] else answer(body)
        )
    pool = pool_of(fakes)
    with ThreadPoolExecutor(2) as threads:
        bad = threads.submit(pool.sample, [request(3)])
        good = [pool.sample([request(token)]) for token in (4, 5, 6)]
        with pytest.raises(RuntimeError, match="500: this one"):
            bad.result()
    assert len(good) == 3
    assert not pool._calls


def test_a_refused_request_ends_its_call_alone(fakes):
    refusals = iter([(400, {"error": {"message": "too long"}})])
    fakes[0].before = at(GENERATE, lambda: next(refusals, None))
    pool = pool_of(fakes[:1])
    with pytest.raises(ValueError, match="400: too long"):
        pool.sample([request(1)])
    assert len(pool.sample([request(1)])) == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "sampling-servers"]


def test_a_lost_server_ends_all_calls(fakes):
    lost, other = fakes
    released = threading.Event()

    def restart():
        lost.restart()
        raise ConnectionAbortedError

    lost.before, other.before = at(GENERATE, restart), at(GENERATE, lambda: released.wait(30) and None)
    pool = pool_of(fakes)
    with ThreadPoolExecutor(6) as threads:
        calls = [threads.submit(pool.sample, [request(token), request(token + 10)]) for token in range(6)]
        errors = [call.exception() for call in calls]
    released.set()
    assert [type(error) for error in errors] == 6 * [SamplerLostError]


def test_what_ends_the_watch_ends_all_calls_and_the_next_begins_anew(fakes, monkeypatch):
    held, asked = threading.Event(), threading.Event()

    async def fail(*args):
        while not asked.is_set():
            await asyncio.sleep(0.01)
        raise KeyError("the watch")

    fakes[0].before = at(GENERATE, lambda: asked.set() or (held.wait(30) and None))
    pool = pool_of(fakes[:1])
    with monkeypatch.context() as patch:
        patch.setattr(scheduler_module._Dispatcher, "_ask", fail)
        with pytest.raises(KeyError, match="the watch"):
            pool.sample([request(token) for token in range(200)])
    held.set()
    assert len(pool.sample([request(1)])) == 1


def test_after_an_interruption_the_next_call_begins_anew(fakes, monkeypatch):
    join = threading.Thread.join

    def interrupt(self, timeout=None):
        if self.name == "sampling-servers":
            raise KeyboardInterrupt
        join(self, timeout)

    pool = pool_of(fakes)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.sample([request(1)])
    assert len(pool.sample([request(1)])) == 1


def test_a_server_that_is_busy_goes_on_with_what_it_has(fakes, monkeypatch):
    monkeypatch.setattr(scheduler_module, "_HEARTBEAT", 0.01)
    fake, answer = fakes[0], fakes[0].generate
    lock, looks, looked = threading.Lock(), iter(range(3)), threading.Event()
    now = refused = 0

    def generate(body):
        nonlocal now, refused
        with lock:
            if now == 2:
                refused += 1
                return 429, {"error": "later"}
            now += 1
        looked.wait(30)
        with lock:
            now -= 1
            return answer(body)

    def look(path):
        if path == "/health" and refused >= 10 and next(looks, None) is None:
            looked.set()

    fake.generate, fake.before = generate, look
    assert len(pool_of([fake]).sample([request(token) for token in range(12)])) == 12
    assert len(fake.asked) == 12  # none was given up and begun again


def test_a_server_may_be_overloaded_for_as_long_as_its_timeout(fakes):
    fake, answer, refused = fakes[0], fakes[0].generate, []

    def generate(body):
        if len(refused) < 20:  # more often than it may break off
            refused.append(body)
            return 429, {"error": "later"}
        return answer(body)

    fake.generate = generate
    assert pool_of(fakes[:1]).sample([request(1)])[0][0].token_ids == [1, 1, 0]
    fake.generate = lambda body: (429, {"error": "later"})
    with pytest.raises(RuntimeError, match="429: later"):
        pool_of(fakes[:1], timeout=0.5).sample([request(1)])


def test_sequences_leave_files_to_the_rest_of_the_process(fakes, monkeypatch):
    monkeypatch.setattr(scheduler_module, "max_open_files", lambda: scheduler_module._OTHER_FILES + 20)
    busy = [Busy(fake) for fake in fakes]
    pool_of(fakes).sample([request(token, sequences=8) for token in range(8)])
    assert sum(one.total for one in busy) == 64
    assert max(one.most for one in busy) <= 10
    monkeypatch.setattr(scheduler_module, "max_open_files", lambda: 1)
    pool_of(fakes).sample([request(token, sequences=16) for token in range(2)])
    assert max(one.most for one in busy) <= 10


def malformed(**changes):
    def change(answer, body):
        (choice,) = answer["choices"]
        return {"choices": [{**choice, **changes}]}

    return change


MALFORMED = {
    "logprobs of other tokens": malformed(logprobs={"content": [{"token_id": 0, "logprob": -1.0}] * 3}),
    "fewer logprobs": malformed(logprobs={"content": [{"token_id": 1, "logprob": -1.0}]}),
    "no logprobs": malformed(logprobs=None),
    "unknown tokens": malformed(token_ids=[61] * 3, logprobs={"content": [{"token_id": 61, "logprob": -1.0}] * 3}),
    "more tokens": malformed(
        token_ids=[5] * 9,
        logprobs={"content": [{"token_id": 5, "logprob": -1.0}] * 9},
        weight_versions=[{"version": LABELS.of(1), "start": 0, "end": 9}],
    ),
    "no choices": lambda answer, body: {"choices": []},
    "a list": lambda answer, body: [1],
    "half a line": lambda answer, body: b'data: {"choices": [{"token_ids": [5], "logp',
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_answer_is_asked_for_again_and_then_names_the_server(fakes, kind):
    fake, answer, times = fakes[0], fakes[0].generate, []
    stop = StopStrings(SimpleNamespace(decode=lambda *_, **__: ""), ("z",) if kind == "half a line" else ())
    asked = replace(request(1), stop=stop)

    def generate(body):
        times.append(body)
        return answer(body) if len(times) == 2 else MALFORMED[kind](answer({**body, "stream": False}), body)

    fake.generate = generate
    assert pool_of(fakes[:1]).sample([asked])[0][0].token_ids == [1, 1, 0]
    with pytest.raises(RuntimeError, match=rf"{fake.url} broke off a rollout 5 times"):
        pool_of(fakes[:1]).sample([asked])


@pytest.mark.parametrize("label", [None, 7, "run:soon", "run:"])
def test_labels_that_name_no_version_are_refused(label):
    with pytest.raises(WeightsMismatchError, match="has weights"):
        LABELS.version(label, 1, "http://there")
