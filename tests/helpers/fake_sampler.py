"""The routes of vLLM's server that the engine uses, without a model: rollouts that say what was asked for."""

from __future__ import annotations

import base64
import json
import secrets
import tempfile
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from helpers.http_servers import PatientHTTPServer
from safetensors.torch import load_file

from pl_grouprl.distributed.checksum import checksum


class FakeSampler:
    """Serves on a port of its own, or on a given one.

    Attributes:
        label: The label of its weights.
        weights: What it was sent.
        adapters: Names of adapters, and what vLLM reads of each from its folder: config and weights.
        asked: Requests for rollouts.
        calls: Paths of the other calls, in order.
        paused: Mode of the pause, or None.
        spoil: Called with the loaded weights before their checksums are taken.
        before: Called with the path of each request before it is answered; what it returns is the answer.
        info: What its workers say about themselves.
        headers: Of the last request.
    """

    def __init__(self, port: int = 0, instance: str | None = None, folder: str | None = None, **info) -> None:
        model = {"model_type": "llama", "vocab_size": 61, "max_model_len": 512, "dtype": "float32"}
        self._own_folder = tempfile.TemporaryDirectory()
        self.info = {
            **{"instance": instance or secrets.token_hex(8), "folder": folder or self._own_folder.name},
            **{"backend": "pl_grouprl", "logprobs_mode": "processed_logprobs", "device": "cpu", "max_lora_rank": None},
            **{**model, **info},
        }
        self.label, self.owner, self.paused, self.updating = "default", None, None, False
        self.weights, self.adapters, self.asked, self.calls, self.headers = {}, {}, [], [], {}
        self.spoil = self.before = lambda _: None
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_any(self):
                content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                parts = urlsplit(self.path)
                fake.headers = dict(self.headers)
                try:
                    answer = fake.before(parts.path)
                    answer = answer or fake.answer(parts.path, parse_qs(parts.query), json.loads(content or b"{}"))
                except ConnectionAbortedError:  # the connection ends without an answer
                    self.close_connection = True
                    return
                status, answer = answer if isinstance(answer, tuple) else (200, answer)
                answer = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_POST = do_any

            def log_message(self, *args):
                pass

        self.server = PatientHTTPServer(("127.0.0.1", port), Handler)
        self.server.handle_error = lambda *_: None  # clients that go away
        self.port = self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._own_folder.cleanup()

    def restart(self) -> None:
        """Forget everything, as a process that was killed and started again."""
        self.label, self.owner, self.paused, self.updating = "default", None, None, False
        self.weights, self.adapters = {}, {}
        self.info["instance"] += " again"

    def answer(self, path, query, body):
        if path == "/weight_info":
            return {"weight_version": self.label}
        name = path.strip("/").replace("/", "_")
        if name not in ("inference_v1_generate", "health", "v1_models"):
            self.calls.append(body.get("method", name))
        return getattr(self, f"_{name}", lambda *_: {"message": "done"})(query, body)

    def _inference_v1_generate(self, query, body):
        return self.generate(body)

    def _sleep(self, query, body):
        self.paused = query["mode"][0]
        return {"status": "sleeping"}

    def _resume(self, query, body):
        self.paused = None
        return {"status": "resumed"}

    def _update_weight_version(self, query, body):
        self.label = body["new_version"]
        return {"success": True}

    def _start_weight_update(self, query, body):
        assert self.paused, "updates while it samples hang vLLM"
        self.updating, self.weights = True, {}
        return {"message": "Weight update started"}

    def _update_weights(self, query, body):
        return self.load(body["update_info"])

    def _finish_weight_update(self, query, body):
        if not self.updating:
            return 500, {"error": {"message": "finish_weight_update called without a start"}}
        self.updating = False
        self.spoil(self.weights)
        return {"message": "Weight update finished"}

    def _v1_models(self, query, body):
        return {"data": [{"id": "model"}, *({"id": name} for name in self.adapters)]}

    def _v1_unload_lora_adapter(self, query, body):
        del self.adapters[body["lora_name"]]
        return 200, b"Success"

    def _v1_load_lora_adapter(self, query, body):
        assert body["lora_name"] not in self.adapters
        folder = Path(body["lora_path"])
        config = json.loads(Path(folder, "adapter_config.json").read_text())
        self.adapters[body["lora_name"]] = config, load_file(folder / "adapter_model.safetensors")
        return 200, b"Success"

    def _reset_prefix_cache(self, query, body):
        return {"success": True}

    def _collective_rpc(self, query, body):
        return {"results": [getattr(self, body["method"])(*body["args"])]}

    def load(self, info):
        if not self.updating or info.get("owner") != self.owner:
            return 500, {"error": {"message": "another trainer has begun an update of this sampler's weights"}}
        self.weights.update(load_file(info["path"]))
        return {"message": "Weights updated"}

    def describe(self):
        return self.info

    def begin_update(self, owner):
        self.owner, self.updating = owner, False

    def refresh_stale_weights(self):
        assert not self.updating

    def weight_checksums(self, names):
        return [[name, [name], checksum(value), "sum"] for name, value in self.weights.items()]

    def receive_adapter(self, owner, file, contents, is_start):
        assert owner == self.owner
        folder = Path(self.info["folder"], "adapter")
        folder.mkdir(exist_ok=True)
        with Path(folder, file).open("wb" if is_start else "ab") as written:
            written.write(base64.b64decode(contents))

    def adapter_checksums(self, names):
        ((config, weights),) = self.adapters.values()
        self.spoil(weights)
        scaled = {
            name: weight * (config["lora_alpha"] / config["r"] if "lora_B" in name else 1)
            for name, weight in weights.items()
        }
        return [[name, [name], checksum(value), "sum"] for name, value in scaled.items()]

    def generate(self, body):
        if body.get("model", "model") not in ("model", *self.adapters):
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist.", "param": "model"}}
        self.asked.append(body)
        options, size = body["sampling_params"], self.info["vocab_size"]
        seed = options["seed"]
        tokens = [sum(body["token_ids"]) % size, seed % size, seed // size % size][: options["max_tokens"]]
        content = [{"token_id": token, "logprob": -1.0 - place} for place, token in enumerate(tokens)]
        choice = {
            "token_ids": tokens,
            "logprobs": {"content": content},
            "finish_reason": "stop" if tokens[-1] in options["stop_token_ids"] else "length",
            "weight_versions": [{"version": self.label, "start": 0, "end": len(tokens)}],
        }
        if not body["stream"]:
            return {"choices": [choice]}
        return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\ndata: [DONE]\n\n"
