"""The client against a server of the test's own, which answers what it is told to."""

import contextlib
import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from helpers.serving import free_port

from pl_grouprl.rollout.server import client as client_module
from pl_grouprl.rollout.server.client import RefusedError, ServerClient

ROLLOUT = {"token_ids": [1, 2], "logprobs": [-0.5, -0.25], "finish_reason": "stop"}
REQUEST = {"version": 3, "update": "u", "requests": [{"prompt": [1], "seeds": [5]}]}
"""One prompt and one rollout."""


def lines(*messages):
    return b"".join(json.dumps(message).encode() + b"\n" for message in messages)


WHOLE = lines({"version": 3, "instance": "a"}, {"index": [0, 0], **ROLLOUT}, {"done": True})


@contextmanager
def serve(*script, port=0):
    """Answers requests by `script`, one entry each and the last for all that follow: (status, body), or None, which
    closes the connection without an answer. A body that is cut has its whole length announced."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            step = script[min(len(asked), len(script) - 1)]
            asked.append((self.command, self.path, body, dict(self.headers)))
            if step is None:
                self.connection.close()
                return
            status, answer, *announced = step
            answer = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(announced[0] if announced else len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = handle_any

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch):
    monkeypatch.setattr(client_module, "_FIRST_WAIT", 0.01)
    monkeypatch.setattr(client_module, "_LONGEST_WAIT", 0.1)


def test_rollouts_arrive_in_order_between_heartbeats():
    answer = lines({"version": 3}) + b"\n\n" + lines({"index": [1, 0], **ROLLOUT, "token_ids": [9, 9]})
    answer += lines({"index": [0, 1], **ROLLOUT}) + b"\n" + lines({"index": [0, 0], **ROLLOUT}, {"done": True})
    request = {**REQUEST, "requests": [{"prompt": [1], "seeds": [5, 6]}, {"prompt": [2], "seeds": [7]}]}
    with serve((200, answer)) as (url, asked):
        found = ServerClient(url).generate(request)
    assert [[rollout["token_ids"] for rollout in group] for group in found] == [[[1, 2], [1, 2]], [[9, 9]]]
    assert [(method, path, json.loads(body)) for method, path, body, _ in asked] == [("POST", "/generate", request)]


@pytest.mark.parametrize(
    "failure",
    [
        None,
        (503, {"error": "the engine is dead"}),
        (500, b"<html>"),
        (200, WHOLE[:20]),
        (200, WHOLE[:40], 1000),
        (200, lines({"version": 3}, {"done": True})),
        (200, lines({"version": 3}, {"status": 500, "error": "out of memory"})),
        (200, b"what"),
    ],
)
def test_broken_answers_are_retried(failure):
    with serve(failure, failure, (200, WHOLE)) as (url, asked):
        found = ServerClient(url, timeout=20).generate(REQUEST)
    assert found[0][0]["logprobs"] == ROLLOUT["logprobs"]
    assert len(asked) == 3


def test_a_server_that_returns_in_time_is_used():
    port = free_port()
    client = ServerClient(f"http://127.0.0.1:{port}", timeout=20)
    found = []
    thread = threading.Thread(target=lambda: found.append(client.info()))
    thread.start()
    time.sleep(0.2)
    with serve((200, {"instance": "a"}), port=port):
        thread.join(10)
    assert found == [{"instance": "a"}]


class Clock:
    """Time that passes in sleeps alone."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_a_server_that_stays_away_is_named(monkeypatch):
    port, clock = free_port(), Clock()
    monkeypatch.setattr(client_module, "time", clock)
    with pytest.raises(RuntimeError) as error:
        ServerClient(f"http://127.0.0.1:{port}", token="secret", timeout=0.5).info()
    assert 0.2 < clock.now <= 0.5
    assert f"http://127.0.0.1:{port} did not come back within 0.5 seconds" in str(error.value)
    assert f"python -m pl_grouprl.rollout.server --model ... --host 127.0.0.1 --port {port}" in str(error.value)
    assert "secret" not in str(error.value)


def test_a_silent_server_times_out(monkeypatch):
    import socket

    waited, connect = [], ServerClient._connect
    monkeypatch.setattr(ServerClient, "_connect", lambda own, timeout: waited.append(timeout) or connect(own, timeout))

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(RuntimeError, match=r"did not come back within 0.1 seconds .*[tT]ime"):
            ServerClient(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.1).info()
    assert waited == [0.1]


def test_rollouts_may_take_longer_than_the_timeout(monkeypatch):
    monkeypatch.setattr(client_module, "_LEAST_SILENCE", 2.0)  # instead of three signs of life

    class Slow(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            for line in (lines({"version": 3}), b"\n", WHOLE):
                self.wfile.write(line)
                time.sleep(0.2)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        found = ServerClient(f"http://127.0.0.1:{server.server_port}", timeout=0.1).generate(REQUEST)
        server.shutdown()
    assert found[0][0]["token_ids"] == ROLLOUT["token_ids"]


def test_rollouts_that_always_break_off_end_the_run():
    with (
        serve((200, lines({"version": 3}, {"status": 500, "error": "out of memory"}))) as (url, asked),
        pytest.raises(RuntimeError, match="broke off a rollout 5 times, most recently: out of memory"),
    ):
        ServerClient(url).generate(REQUEST)
    assert len(asked) == 5


@pytest.mark.parametrize("status", [302, 400, 401, 409, 413, 422])
def test_refusals_are_not_retried(status):
    with (
        serve((status, {"error": "because", "version": 7})) as (url, asked),
        pytest.raises(RefusedError, match=f"at {url} answers {status}: because") as error,
    ):
        ServerClient(url).begin_weights()
    assert (error.value.status, error.value.answer["version"]) == (status, 7)
    assert len(asked) == 1


@pytest.mark.parametrize("first", [{"version": 4}, {"status": 409, "error": "an update has begun", "version": None}])
def test_rollouts_of_another_version_are_refused(first):
    with serve((200, lines(first, {"index": [0, 0], **ROLLOUT}, {"done": True}))) as (url, _):
        with pytest.raises(RefusedError) as error:
            ServerClient(url).generate(REQUEST)
        assert error.value.status == 409


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            lines({"version": 3}, *[{"index": [0, 0], **ROLLOUT}] * 2),
            r"rollout \[0, 0\] was not requested, or has already arrived",
        ),
        (lines({"version": 3}, {"index": [0, -1], **ROLLOUT}), r"rollout \[0, -1\] was not requested"),
        (lines({"version": 3}, {"index": [7, 0], **ROLLOUT}), r"rollout \[7, 0\] was not requested"),
        (lines({"version": 3}, {"index": {"0": 0}, **ROLLOUT}), "was not requested"),
        (lines({"version": 3}, {"status": "lost"}), "TypeError"),
        (lines([1, 2]), "a line is not a JSON object; is this a sampling server"),
        (lines({"version": 3}, {"pad": "x" * 5000}), "a line has more than 4000 bytes; is this a sampling server"),
    ],
)
def test_answers_that_do_not_match_the_request_are_refused(answer, message, monkeypatch):
    monkeypatch.setattr(client_module, "_MAX_LINE", 4000)
    with (
        serve((200, answer)) as (url, asked),
        pytest.raises(RuntimeError, match=f"5 times, most recently: .*{message}"),
    ):
        ServerClient(url, timeout=20).generate(REQUEST)
    assert len(asked) == 5


def test_answers_have_a_size_limit(monkeypatch, record_property):
    """A server that never ends its answer: what is read of it is bounded."""
    monkeypatch.setattr(client_module, "MAX_JSON", 1 << 20)
    sent = 0

    class Endless(BaseHTTPRequestHandler):
        def do_GET(self):
            nonlocal sent
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while sent < 400 << 20:
                    sent += self.wfile.write(b"x" * (1 << 18))

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        with pytest.raises(RuntimeError, match="the answer has more than 1048576 bytes; is this a sampling server"):
            ServerClient(f"http://127.0.0.1:{server.server_port}", timeout=0.05).info()
        server.shutdown()
    assert sent < 64 << 20
    record_property("figure", f"{sent / (1 << 20):.0f} of 400 MiB were sent, at a limit of 1 MiB")


def test_weights_are_sent_as_they_are():
    with serve((200, {"update": "u 1"}), (200, {}), (200, {"workers": [[["w", ["w"], 5, "copy"]]]}), (200, {})) as (
        url,
        asked,
    ):
        client = ServerClient(url + "/", token="secret")
        assert client.begin_weights() == "u 1"
        client.send_bucket("u 1", 2, b"\x00\xff")
        assert client.end_weights("u 1", 4, ["w"]) == [[["w", ["w"], 5, "copy"]]]
        client.abort_weights("u 1")
    assert [path for _, path, _, _ in asked] == [
        "/weights/begin",
        "/weights/bucket?update=u+1&index=2",
        "/weights/end",
        "/weights/abort",
    ]
    assert asked[1][2] == b"\x00\xff"
    assert {headers["Authorization"] for *_, headers in asked} == {"Bearer secret"}


def test_answers_of_other_kinds_of_servers_are_refused(monkeypatch):
    monkeypatch.setattr(client_module, "time", Clock())
    with serve((200, b"hello")) as (url, _), pytest.raises(RuntimeError, match="is this a sampling server"):
        ServerClient(url, timeout=3).info()


@pytest.mark.parametrize(
    "url",
    [
        *("127.0.0.1:8000", "ftp://host", "http://", "http://user:word@host:1", "http://:word@h:1", "http://h?a=b"),
        *("http://h#a", "http://h:0", "http://h:99999", "http://h:abc"),
    ],
)
def test_malformed_urls_are_refused(url):
    with pytest.raises(ValueError, match=r"it must be like http://127\.0\.0\.1:8000") as error:
        ServerClient(url)
    assert "word" not in str(error.value)


def test_ipv6_addresses():
    with pytest.raises(RuntimeError, match=r"at http://\[::1\]:9 did not come back within .*--host ::1 --port 9"):
        ServerClient("http://[::1]:9", timeout=0.1).info()


def test_a_token_must_fit_into_a_header():
    with pytest.raises(ValueError, match="characters not allowed in headers") as error:
        ServerClient("http://127.0.0.1:1", token="sec\nret")
    assert "ret" not in str(error.value).replace("carry", "")
