"""Runs the scripts that stand beside tests, each in processes of its own, without a new interpreter for each.

`run_script` is `subprocess.run` for scripts that need torch and Lightning, whose imports take longer than most scripts
run: `fork_server.py` has imported them, and each rank is a fork of it.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

SERVER = Path(__file__).with_name("fork_server.py")


class ScriptFailedError(AssertionError):
    """Says how each rank of a script ended, and what it printed last."""


def run_script(
    script: str | Path,
    *arguments: Any,
    ranks: int = 1,
    cwd: str | Path | None = None,
    timeout: float = 120.0,
    check: bool = True,
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a script as `__main__` in forked processes.

    Args:
        script: A Python file.
        arguments: Its arguments, as strings or what `str` makes one of.
        ranks: Number of processes. Two and more find each other through the variables that Lightning and torchrun
            set, so that a Trainer starts none itself.
        cwd: Folder to run in; the current one by default.
        timeout: Seconds after which the ranks, and all they have started, are killed.
        check: Raise unless all ranks end with 0.
        environment: Variables in addition to those of this process.

    Returns:
        The exit code of the first rank that failed, or 0 (the negative of a signal's number for a rank ended by one),
        and what all ranks printed, one rank after the other.

    Raises:
        ScriptFailedError: If a rank still ran at the timeout, or, with `check`, did not end with 0.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = {name: [f"{folder}/{name}-{rank}" for rank in range(ranks)] for name in ("stdout", "stderr")}
        request = {
            "script": str(Path(script).resolve()),
            "arguments": [str(argument) for argument in arguments],
            "ranks": ranks,
            "cwd": str(Path(cwd or ".").resolve()),
            "timeout": timeout,
            "environment": {**os.environ, **(environment or {})},
            **logs,
        }
        codes = _ask(request)
        printed = {name: [Path(log).read_text(errors="replace") for log in own] for name, own in logs.items()}
    command = [request["script"], *request["arguments"]]
    if None in codes or (check and any(codes)):
        raise ScriptFailedError(" ".join(command) + "\n" + _report(codes, printed["stderr"]))
    out, err = ("".join(own) for own in printed.values())
    return subprocess.CompletedProcess(command, next(filter(None, codes), 0), out, err)


def _report(codes: Sequence[int | None], errors: Sequence[str]) -> str:
    return "\n".join(
        f"rank {rank} {_end(code)}:\n{text[-3000:]}"
        for rank, (code, text) in enumerate(zip(codes, errors, strict=True))
    )


def _end(code: int | None) -> str:
    if code is None:
        return "was killed at the timeout"
    return f"was ended by signal {-code}" if code < 0 else f"ended with {code}"


def _ask(request: dict[str, Any]) -> list[int | None]:
    server = _server(os.getpid())
    assert server.stdin is not None
    assert server.stdout is not None
    print(json.dumps(request), file=server.stdin, flush=True)
    answer = server.stdout.readline()
    if not answer:
        _server.cache_clear()
        raise RuntimeError(f"The fork server has ended with {server.wait()}; what it printed stands above.")
    return json.loads(answer)


@cache
def _server(owner: int) -> subprocess.Popen[str]:
    """The server of this process; it ends when its stdin does, however this process ends."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    server = subprocess.Popen(
        [sys.executable, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    atexit.register(server.communicate)
    return server
