"""A sampling server as a process of its own, for tests."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

START_SECONDS = 480


def free_port() -> int:
    """One that nobody listens on, below those that connections get: a server takes it only after a long start."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Server:
    """`python -m pl_grouprl.rollout.vllm` on a port that stays the same when it is started again."""

    def __init__(
        self, model: Path, log: Path, *options: str, token: str | None = None, python: str | Path = sys.executable
    ) -> None:
        self.model, self.log, self.options, self.token, self.python = model, log, options, token, python
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Server:
        """Start it; `wait` until it answers."""
        command = [str(self.python), "-m", "pl_grouprl.rollout.vllm", "--model", str(self.model)]
        command += ["--port", str(self.port), "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "32"]
        command += ["--distributed-executor-backend", "uni"]  # the worker shares the engine's process: sooner there
        environment = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            **({"PL_GROUPRL_TOKEN": self.token} if self.token else {}),
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*command, *self.options], env=environment, stdout=log, stderr=log)
        return self

    def wait(self) -> Server:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return self
            except OSError:
                time.sleep(0.2)
        raise AssertionError(f"the server did not start:\n{self.log.read_text()[-3000:]}")

    def kill(self) -> None:
        """As if the machine's memory had run out."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
