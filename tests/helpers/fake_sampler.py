"""The routes of a sampling server without a model: rollouts that say what was asked for, weights kept as sent."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from safetensors.torch import load

from pl_grouprl.sync.checksum import checksum


class FakeSampler:
    """Serves on a port of its own, or on a given one.

    Attributes:
        weights: What it was sent.
        asked: Requests for rollouts.
        spoil: Called with the loaded weights before their checksums are taken.
        before: Called with the path of each request before it is answered.
    """

    def __init__(self, port: int = 0, instance: str = "first", **info) -> None:
        model = {"model_type": "llama", "vocab_size": 61, "max_model_len": 512, "dtype": "float32"}
        self.state = {"instance": instance, "version": None, "update": None, "updating": False}
        self.info = {"transfer": "http", "workers": 1, "model": {**model, **info}}
        self.weights, self.asked = {}, []
        self.spoil = self.before = lambda _: None
        self._count = 0
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                fake.before(self.path)
                self.reply(200, {**fake.state, **fake.info})

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                fake.before(self.path)
                try:
                    self.reply(*getattr(fake, "_" + urlsplit(self.path).path.strip("/").replace("/", "_"))(self, body))
                except PermissionError as refusal:
                    self.reply(409, {"error": str(refusal), **fake.state})

            def reply(self, status, answer):
                answer = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def _weights_begin(self, handler, body):
        self._count += 1
        update = f"{self.state['instance']}-{self._count}"
        self.state.update(version=None, update=update, updating=True)
        self.weights = {}
        return 200, {"update": update}

    def _weights_bucket(self, handler, body):
        query = parse_qs(urlsplit(handler.path).query)
        self._check(self.state["updating"] and query["update"][0] == self.state["update"])
        self.weights.update(load(body))
        return 200, {}

    def _weights_end(self, handler, body):
        told = json.loads(body)
        self._check(self.state["updating"] and told["update"] == self.state["update"])
        self.state.update(version=told["version"], updating=False)
        self.spoil(self.weights)
        assert sorted(told["names"]) == sorted(self.weights)
        return 200, {"workers": [[[name, [name], checksum(value), "sum"] for name, value in self.weights.items()]]}

    def _weights_abort(self, handler, body):
        if json.loads(body)["update"] == self.state["update"]:
            self.state.update(version=None, update=None, updating=False)
        return 200, {}

    def _generate(self, handler, body):
        told = json.loads(body)
        same = told["version"] == self.state["version"] and told["update"] == self.state["update"]
        self._check(same and not self.state["updating"])
        self.asked.append(told)
        lines = [{"version": told["version"], "instance": self.state["instance"]}]
        for place, request in enumerate(told["requests"]):
            for number, seed in enumerate(request["seeds"]):
                limit, size = told["sampling"]["max_new_tokens"], self.info["model"]["vocab_size"]
                tokens = [sum(request["prompt"]) % size, seed % size, seed // size % size][:limit]
                logprobs = [-1.0, -2.0, -3.0][: len(tokens)]
                reason = "stop" if tokens[-1] in told["end_ids"] else "length"
                rollout = {"token_ids": tokens, "logprobs": logprobs, "finish_reason": reason}
                lines.append({"index": [place, number], **rollout})
        return 200, b"\n".join(json.dumps(line).encode() for line in [*lines, {"done": True}])

    def _check(self, fits: bool) -> None:
        if not fits:
            raise PermissionError("other weights")
