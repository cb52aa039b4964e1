"""vLLM's own server, with weights sent by plain calls, for tests of what runs against it besides its engine."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from pl_grouprl.rollout.bound_policy import BoundPolicy, HoldsPolicy
from tests.helpers.serving import START_SECONDS, free_port

REPOSITORY = Path(__file__).resolve().parents[2]
OPTIONS = (
    *("--host", "127.0.0.1", "--dtype", "float32", "--runner", "generate", "--generation-config", "vllm"),
    *("--skip-tokenizer-init", "--logprobs-mode", "processed_logprobs", "--enable-prefix-caching"),
    *("--weight-transfer-config", '{"backend":"pl_grouprl"}', "--enable-scale-out", "--enforce-eager"),
    *("--worker-extension-cls", "pl_grouprl.rollout.vllm.worker.WeightReceiver"),
    *("--disable-log-stats", "--max-num-seqs", "64", "--distributed-executor-backend", "uni"),
)
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(REPOSITORY),
}


def vllm_python() -> Path:
    """The Python of an environment with vLLM, which need not be this one."""
    return Path(os.environ.get("PL_GROUPRL_VLLM_PYTHON", REPOSITORY / ".venv-vllm/bin/python"))


@contextmanager
def vllm_server(model: Path, log: Path):
    """A server's URL, until the block ends."""
    port = free_port()
    command = [vllm_python(), "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*map(str, command), *OPTIONS],
            env={**os.environ, **ENVIRONMENT},
            stdout=file,
            stderr=file,
            cwd=model,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(url):
            is_starting = process.poll() is None and time.monotonic() < deadline
            assert is_starting, log.read_text()[-3000:]
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


class PlainServerEngine(HoldsPolicy):
    """Sends weights to one server as a file; others ask it for rollouts."""

    adapter = "merged"

    def __init__(self, url: str, max_model_len: int | None = None) -> None:
        self.urls, self.token, self.max_model_len = [url], None, max_model_len
        self.version: int | None = None
        self.weight_version: str | None = None

    def bind(self, model: Any, tokenizer: Any = None) -> None:
        self._policy = BoundPolicy(model, tokenizer)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int, adapter: Any = None) -> dict:
        self.version, self.weight_version = None, f"test:{version}"
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            path = Path(folder, "weights.safetensors")
            save_file({name: weight.detach().clone().contiguous() for name, weight in weights}, path)
            self._post("/pause?mode=wait")
            self._post("/init_weight_transfer_engine", init_info={})
            self._post("/start_weight_update")
            self._post("/update_weights", update_info={"path": str(path)})
            self._post("/finish_weight_update", weight_version=self.weight_version)
            self._post("/collective_rpc", method="refresh_stale_weights")
            self._post("/reset_prefix_cache")
            self._post("/resume")
            self.version = version
            return {"bytes": float(path.stat().st_size)}

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        self.version = None

    def _post(self, path: str, **body: Any) -> None:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.urls[0] + path, json.dumps(body).encode(), headers)
        urllib.request.urlopen(request, timeout=60).close()
