"""What the real web server reads, and how long it waits, for clients that keep to no rule. The sampler is a stub."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time

import pytest
from helpers.process_state import left_changed

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from pl_grouprl.rollout.server import bodies, connections
from pl_grouprl.rollout.server.app import make_app
from pl_grouprl.rollout.server.serve import make_server

MIB = 1 << 20
FLOOD = 400 * MIB
READ_AT_MOST = 4 * MIB
"""Of a flood: what is on its way when the connection is closed."""
TOKEN = "a-token-of-the-tests"
AUTHORIZED = f"Authorization: Bearer {TOKEN}\r\n"
JSON = "Content-Type: application/json\r\n"
GENERATE = {
    "version": 1,
    "update": "u",
    "requests": [{"prompt": [1], "seeds": [1]}],
    "sampling": {
        **{"max_new_tokens": 2, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
        **{"stop": [], "stop_token_ids": []},
    },
}


class StubSampler:
    """Answers everything; its rollouts never end."""

    transfer = "http"

    def __init__(self):
        self.closed = threading.Event()
        self.yielded = 0
        self.more = {}

    def check_alive(self):
        pass

    def info(self):
        return {"instance": "stub", **self.more}

    def check(self, *args):
        pass

    async def begin(self):
        return "u"

    async def rollouts(self, *args, **kwargs):
        try:
            while True:
                self.yielded += 1
                yield {"index": [0, 0], "token_ids": [1] * 50_000}
                await asyncio.sleep(0)
        finally:
            self.closed.set()


class Service:
    """A server on a thread, with the protocol and the options of the real one."""

    def __init__(self, monkeypatch):
        self.sampler, self.read, self.opened = StubSampler(), 0, 0
        receive = connections.LimitedProtocol.data_received

        def count(protocol, data):
            self.read += len(data)
            receive(protocol, data)

        monkeypatch.setattr(connections.LimitedProtocol, "data_received", count)
        app = make_app(self.sampler, token=TOKEN, max_bucket_bytes=8 * MIB)
        self.server = make_server(app, "127.0.0.1", 0)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.address = self.server.servers[0].sockets[0].getsockname()

    def connect(self):
        connection = socket.create_connection(self.address, timeout=20)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def ask(self, head, body=b"", connection=None):
        """Send a request, with as much of the body as the server takes; return the answer and whether it closed."""
        with contextlib.ExitStack() as stack:
            connection = connection or stack.enter_context(self.connect())
            with contextlib.suppress(OSError):
                connection.sendall(head.encode())
                for piece in [body] if isinstance(body, bytes) else body:
                    connection.sendall(piece)
            return read_answer(connection)

    def close(self):
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()


def read_answer(connection):
    """HTTP's status, the JSON of the answer (None without one) and whether the server closed the connection."""
    answer, closed = b"", True
    try:
        while part := connection.recv(65536):
            answer += part
            head, blank, body = answer.partition(b"\r\n\r\n")
            length = [line.split(b":")[1] for line in head.split(b"\r\n") if line.startswith(b"content-length")]
            if blank and length and len(body) >= int(length[0]) and b"connection: close" not in head:
                closed = False
                break
    except OSError:
        pass
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split()[1]) if head else None
    return status, json.loads(body) if body.startswith(b"{") else None, closed


def flood(piece=b"x" * MIB, chunked=False, size=FLOOD):
    """A body without end, nearly."""
    for _ in range(size // len(piece)):
        yield b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece


@pytest.fixture
def service(monkeypatch):
    with left_changed():  # uvicorn sets levels of loggers
        service = Service(monkeypatch)
        yield service
        service.close()


@pytest.mark.parametrize(
    ("head", "chunked", "status", "error"),
    [
        pytest.param(
            f"POST /weights/begin HTTP/1.1\r\nHost: h\r\n{AUTHORIZED}{JSON}"
            "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n",
            *(True, 411, "the request has a Transfer-Encoding"),
            id="a short length, and chunks",
        ),
        pytest.param(
            f"POST /weights/begin HTTP/1.1\r\nHost: h\r\n{AUTHORIZED}{JSON}Transfer-Encoding: chunked\r\n",
            *(True, 411, "the request has a Transfer-Encoding"),
            id="chunks alone",
        ),
        pytest.param(
            f"POST /weights/begin HTTP/1.1\r\nHost: h\r\nContent-Length: {FLOOD}\r\n",
            *(False, 401, "the token is missing or wrong"),
            id="no token",
        ),
        pytest.param(
            "POST /weights/begin HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n",
            *(True, 401, "the token is missing or wrong"),
            id="no token, chunks",
        ),
        pytest.param(
            f"POST /weights/begin HTTP/1.1\r\nHost: h\r\n{AUTHORIZED}{JSON}Content-Length: {FLOOD}\r\n",
            *(False, 413, f"the body has {FLOOD} bytes; at most {256 * MIB} are read"),
            id="too long",
        ),
        pytest.param(
            f"POST /weights/begin HTTP/1.1\r\nHost: h\r\n{AUTHORIZED}Content-Length: {FLOOD}\r\n",
            *(False, 415, "Content-Type is not application/json"),
            id="another type",
        ),
        pytest.param(
            f"POST /weights/bucket?update=u&index=0 HTTP/1.1\r\nHost: h\r\n{AUTHORIZED}"
            f"Content-Type: application/octet-stream\r\nContent-Length: {FLOOD}\r\n",
            *(False, 413, f"the body has {FLOOD} bytes; at most {8 * MIB} are read"),
            id="a bucket",
        ),
        pytest.param(
            f"GET /info HTTP/1.1\r\nHost: h\r\n{AUTHORIZED}Content-Length: {FLOOD}\r\n",
            *(False, 200, None),
            id="GET with a body",
        ),
        pytest.param(
            f"GET /health HTTP/1.1\r\nHost: h\r\nContent-Length: {FLOOD}\r\n", *(False, 200, None), id="GET, no token"
        ),
        pytest.param(
            f"POST /nowhere HTTP/1.1\r\nHost: h\r\n{AUTHORIZED}Content-Length: {FLOOD}\r\n",
            *(False, 404, "there is no POST /nowhere"),
            id="no such path",
        ),
    ],
)
def test_floods_are_not_read(service, record_property, head, chunked, status, error):
    found, answer, closed = service.ask(f"{head}\r\n", flood(chunked=chunked))
    assert closed
    assert service.read < READ_AT_MOST
    if found is not None:  # where the flood did not drown the answer
        assert found == status
        assert error is None or error in answer["error"]
    record_property("figure", f"{service.read / MIB:.2f} of {FLOOD // MIB} MiB were read")


def test_refusals_are_answered(service):
    """As in the floods, to clients that read the answer before they send on."""
    head = f"POST /weights/begin HTTP/1.1\r\nHost: h\r\n{AUTHORIZED}{JSON}"
    lies = f"{head}Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n"
    status, answer, closed = service.ask(lies, b"2\r\n{}\r\n0\r\n\r\n")
    assert (status, closed) == (411, True)
    assert "overrides" not in answer["error"]
    assert answer["error"].startswith("the request has a Transfer-Encoding, which announces no length; send a")
    status, answer, closed = service.ask(f"{head}Content-Length: {FLOOD}\r\n\r\n")
    assert (status, closed) == (413, True)
    assert answer["error"] == f"the body has {FLOOD} bytes; at most {256 * MIB} are read."


def test_valid_requests_share_a_connection(service):
    with service.connect() as connection:
        for _ in range(3):
            head = f"POST /weights/begin HTTP/1.1\r\nHost: h\r\n{AUTHORIZED}{JSON}Content-Length: 2\r\n\r\n"
            assert service.ask(head, b"{}", connection) == (200, {"update": "u"}, False)
            head = f"GET /info HTTP/1.1\r\nHost: h\r\n{AUTHORIZED}\r\n"
            assert service.ask(head, b"", connection) == (200, {"instance": "stub"}, False)


def test_headers_have_a_limit(service, record_property):
    pairs = (b"X-%d: %s\r\n" % (number, b"y" * 1000) for number in range(400_000))
    status, _, closed = service.ask("GET /health HTTP/1.1\r\nHost: h\r\n", pairs)
    assert status in (400, None)
    assert closed
    assert service.read < READ_AT_MOST
    record_property("figure", f"{service.read / MIB:.2f} of {FLOOD // MIB} MiB of headers were read")


def test_missing_headers_time_out(service, monkeypatch):
    monkeypatch.setattr(connections, "_REQUEST_SECONDS", 0.4)
    with service.connect() as silent, service.connect() as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\n")
        with contextlib.suppress(OSError):
            for _ in range(200):
                slow.sendall(b"X-1: 1\r\n")
                time.sleep(0.05)
            pytest.fail("the server still waits for the headers")
        assert read_answer(silent) == (None, None, True)


def test_a_missing_body_times_out(service, monkeypatch):
    monkeypatch.setattr(bodies, "_BASE_SECONDS", 0.4)
    head = f"POST /weights/begin HTTP/1.1\r\nHost: h\r\n{AUTHORIZED}{JSON}Content-Length: 20\r\n\r\n"
    with service.connect() as slow:
        status, answer, closed = service.ask(head, b'{"a":', slow)
    assert (status, closed) == (408, True)
    assert answer["error"] == "only 5 of the body's 20 bytes arrived in time."


def test_connections_have_a_limit(service, monkeypatch):
    monkeypatch.setattr(connections, "max_connections", lambda: 8)
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(service.connect()) for _ in range(40)]
        answers = [service.ask("GET /health HTTP/1.1\r\nHost: h\r\n\r\n", b"", one)[0] for one in opened]
    assert answers == [200] * 8 + [None] * 32


def test_pipelined_requests_are_not_read(service, monkeypatch, record_property):
    monkeypatch.setattr(connections, "_STALL_SECONDS", 0.5)
    service.sampler.more = {"pad": "x" * 100_000}
    request = b"GET /info HTTP/1.1\r\nHost: h\r\n" + AUTHORIZED.encode() + b"\r\n"
    with service.connect() as connection:
        connection.settimeout(10)
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            connection.sendall(b"".join(flood(request * 5000)))
    assert service.read < READ_AT_MOST
    record_property("figure", f"{service.read / MIB:.2f} of {FLOOD // MIB} MiB of pipelined requests were read")


def test_rollouts_that_are_not_read_end(service, monkeypatch):
    monkeypatch.setattr(connections, "_STALL_SECONDS", 0.5)
    body = json.dumps(GENERATE).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: h\r\n{AUTHORIZED}{JSON}Content-Length: {len(body)}\r\n\r\n"
    with service.connect() as connection:
        connection.sendall(head.encode() + body)
        assert service.sampler.closed.wait(20)
    assert service.sampler.yielded < 500  # 150 KB each: what buffers of the connection hold


def test_a_client_that_disconnects_mid_body(service):
    head = f"POST /weights/begin HTTP/1.1\r\nHost: h\r\n{AUTHORIZED}{JSON}Content-Length: 20\r\n\r\n"
    with service.connect() as connection:
        connection.sendall(head.encode() + b"{")
    assert service.ask("GET /health HTTP/1.1\r\nHost: h\r\n\r\n")[0] == 200


def test_there_are_no_websockets(service):
    upgrade = f"GET /info HTTP/1.1\r\nHost: h\r\n{AUTHORIZED}Connection: Upgrade\r\nUpgrade: websocket\r\n"
    keys = "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    assert service.ask(upgrade + keys)[:2] == (200, {"instance": "stub"})
