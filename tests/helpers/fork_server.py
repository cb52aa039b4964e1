"""A process that has imported everything once, and forks the ranks of scripts on request.

`helpers.scripts` starts one for each test process and talks to it: a request is a line of JSON on stdin, its answer a
line on stdout. Each rank is a fork of its own: it has its own session, environment, folder and log, and runs its script
as `__main__` from start to end. Only a process with one thread can be forked safely, so nothing is computed here.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

Request = dict[str, Any]
IMPORTED = (
    "pytest",  # by conftest.py files, whose models scripts use
    "torch.distributed._tensor",
    "transformers.models.qwen3.modeling_qwen3",
    *(
        f"pl_grouprl.{name}"
        for name in ("algorithms", "callbacks", "data", "demo", "rollout", "distributed.strategies")
    ),
    "pl_grouprl.models.critic",
    "quick_fits",
)


def serve(requests: Any, answers: Any) -> tuple[Request, int] | None:
    """Answer requests until there are no more: then None. In a forked rank, the request and the rank."""
    import_everything()
    threads = Path("/proc/self/task")
    if threads.is_dir() and len(list(threads.iterdir())) > 1:
        sys.exit("An import has started a thread: this process cannot be forked safely.")
    for line in requests:
        request = json.loads(line)
        with reserved_port() as port:
            pids = []
            for rank in range(request["ranks"]):
                pid = os.fork()
                if pid == 0:
                    become_rank(request, rank, port.getsockname()[1])
                    return request, rank
                pids.append(pid)
            codes = wait_for(pids, request["timeout"])
        print(json.dumps(codes), file=answers, flush=True)
    return None


def import_everything() -> None:
    """All of it stays, so garbage collection leaves it out, here and in the ranks."""
    gc.disable()
    for name in IMPORTED:
        importlib.import_module(name)
    with contextlib.suppress(ImportError):
        importlib.import_module("peft")
    import torch
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    torch.set_num_threads(1)
    # After a fork torch makes its pool of threads anew, and fails if two threads come to that at the same time.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))
    get_checkpoint_conversion_mapping("qwen3")  # builds the table of all models: a quarter of a second
    gc.freeze()
    gc.enable()


def reserved_port() -> socket.socket:
    """A socket on a free port that no one else is given, and on which rank 0 can listen all the same."""
    reserved = socket.socket()
    reserved.bind(("127.0.0.1", 0))
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return reserved


def become_rank(request: Request, rank: int, port: int) -> None:
    """Give a fork the session, environment, folder and streams of a process of its own."""
    os.setsid()
    os.environ.clear()
    os.environ |= request["environment"]
    if request["ranks"] > 1:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": request["ranks"], "NODE_RANK": 0}
        os.environ |= {name: str(value) for name, value in ranks.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.chdir(request["cwd"])
    streams = [(os.devnull, os.O_RDONLY)]
    streams += [(log[rank], os.O_WRONLY | os.O_CREAT | os.O_APPEND) for log in (request["stdout"], request["stderr"])]
    for number, (name, mode) in enumerate(streams):
        file = os.open(name, mode)
        os.dup2(file, number)
        os.close(file)


def wait_for(pids: list[int], limit: float) -> list[int | None]:
    """Exit codes, or the negative of the signal that ended a rank, or None for one killed at the limit, in seconds.

    All are killed, too, once the test process has gone. Whatever a rank has left behind ends with it.
    """
    codes: dict[int, int | None] = {}
    end = time.monotonic() + limit
    while len(codes) < len(pids):
        for pid in (pid for pid in pids if pid not in codes):
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            late = time.monotonic() > end or bool(select.select([0], [], [], 0)[0])
            if ended or late:
                kill_session(pid)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                codes[pid] = code if ended else None
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def kill_session(pid: int) -> None:
    """Kill a rank, which may have ended, and what it has started."""
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def main() -> None:
    """Serve; a forked rank ends as its script does."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    forked = serve(os.fdopen(os.dup(0)), answers)
    if forked is None:
        return
    request, _ = forked
    answers.close()
    script = request["script"]
    sys.argv = [script, *request["arguments"]]
    sys.path[0] = str(Path(script).parent)
    from quick_fits import quick_fits

    with quick_fits():
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
