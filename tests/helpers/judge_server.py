"""A local server of OpenAI's chat protocol, with answers written by the test."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from helpers.http_servers import PatientHTTPServer


@dataclass
class Answer:
    """What the server does with a request: drops it if `status` is 0, otherwise answers once `after` is set."""

    content: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    after: threading.Event | None = None


def reply(text: str | None, finish_reason: str = "stop") -> Answer:
    """A chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return Answer(json.dumps({"choices": [choice], "usage": {"prompt_tokens": 30, "completion_tokens": 5}}).encode())


@dataclass
class Request:
    """What arrived."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def question(self) -> str:
        """The user's message."""
        return self.body["messages"][1]["content"]


class JudgeServer:
    """Answers requests with `answer(request)`, and records them with the largest number under way at a time."""

    def __init__(self, answer: Callable[[Request], Answer]) -> None:
        self.answer = answer
        self.requests: list[Request] = []
        self.most_at_a_time = 0
        self.under_way = 0
        self.changed = threading.Condition()

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        request = Request(handler.path, dict(handler.headers), body)
        with self.changed:
            self.requests.append(request)
            self.under_way += 1
            self.most_at_a_time = max(self.most_at_a_time, self.under_way)
            self.changed.notify_all()
        answer = self.answer(request)
        if answer.after is not None:
            answer.after.wait(60)
        with self.changed:
            self.under_way -= 1
        with contextlib.suppress(OSError):
            _send(handler, answer)


def _send(handler: BaseHTTPRequestHandler, answer: Answer) -> None:
    if answer.status == 0:
        handler.close_connection = True
        return
    handler.send_response(answer.status)
    for name, value in {**answer.headers, "Content-Length": str(len(answer.content))}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(answer.content)


@contextlib.contextmanager
def judge_server(answer: Callable[[Request], Answer]) -> Iterator[tuple[JudgeServer, str]]:
    """The server and its base URL."""
    server = JudgeServer(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            server.handle(self)

        def log_message(self, *args: Any) -> None:
            pass

    http = PatientHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{http.server_port}/v1"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
