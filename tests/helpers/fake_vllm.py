"""The routes of vLLM's own server that a harness's turns need, and an engine with such servers."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

import torch
from helpers.http_servers import PatientHTTPServer

from pl_grouprl.rollout.engine import PolicyEngine


class FakeVLLM:
    """Serves until `close`.

    Attributes:
        model: The model that answers.
        version: Its weights' name.
        asked: The requests for turns, and their headers.
        answered: The requests, and the tokens that were answered.
        spoil: Changes an answer before it is sent; may raise, which is answered by 500.
    """

    def __init__(self, token: str | None = None) -> None:
        self.model: Any = None
        self.version = "default"
        self.asked: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.answered: list[tuple[dict[str, Any], list[int]]] = []
        self.spoil: Callable[[dict[str, Any]], None] = lambda answer: None
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.reply({"weight_version": fake.version})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake._lock:
                    fake.asked.append((body, dict(self.headers)))
                    self.reply(fake.answer(body))

            def reply(self, answer):
                status = 200 if token is None or self.headers["Authorization"] == f"Bearer {token}" else 401
                try:
                    fake.spoil(answer)
                except RuntimeError:
                    status = 500
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *args):
                pass

        self._server = PatientHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *args: None  # a client that hangs up
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        params, ids = body["sampling_params"], list(body["token_ids"])
        generator = torch.Generator().manual_seed(params["seed"])
        content, reason = [], "length"
        for _ in range(params["max_tokens"]):
            with torch.no_grad():
                logits = self.model(torch.tensor([ids])).logits[0, -1] / params["temperature"]
            token = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
            ids.append(token)
            content.append({"token_id": token, "logprob": float(logits.log_softmax(-1)[token])})
            if token in params["stop_token_ids"]:
                reason = "stop"
                break
        written = ids[len(body["token_ids"]) :]
        self.answered.append((body, written))
        choice = {"token_ids": written, "finish_reason": reason, "logprobs": {"content": content}}
        choice["weight_versions"] = [{"version": self.version, "start": 0, "end": len(written)}]
        return {"request_id": "one", "choices": [choice]}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class ServedPolicy(PolicyEngine):
    """An engine whose servers are fakes; the policy's weights go there by assignment."""

    adapter, served_model = "merged", None

    def __init__(self, *servers: FakeVLLM, token: str | None = None) -> None:
        self.servers, self.urls, self.token = servers, [server.url for server in servers], token
        self.version: int | None = None
        self.weight_version: str | None = None

    def update_weights(self, weights: Any, *, version: int, adapter: Any = None) -> dict[str, float]:
        self.version, self.weight_version = version, f"test:{version}"
        for server in self.servers:
            server.model, server.version = copy.deepcopy(self.model).eval(), self.weight_version
        return {"bytes": 0.0}

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        self.version = None
