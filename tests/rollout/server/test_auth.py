"""Who may ask a server, and what is left of one that is killed."""

import asyncio
import subprocess
import sys
import time

import psutil
import pytest

from pl_grouprl.rollout.vllm.access import TokenAuth


@pytest.fixture
def status_of(monkeypatch):
    """HTTP's status of an answer; the application itself says 200."""

    def ask(path="/info", token="", kind="http", **headers):
        sent = []

        async def app(scope, receive, send):
            await send({"status": 200})

        async def send(message):
            sent.append(message)

        monkeypatch.setenv("PL_GROUPRL_TOKEN", token)
        named = [(name.encode(), value.encode()) for name, value in headers.items()]
        asyncio.run(TokenAuth(app)({"type": kind, "path": path, "headers": named}, None, send))
        return sent[0].get("status", sent[0].get("code"))

    return ask


def test_a_token_is_required(status_of):
    assert status_of(token="t", authorization="Bearer t", host="sampler.example") == 200
    for given in ("Bearer T", "Bearer t ", "t", "Basic t", ""):
        assert status_of(token="t", authorization=given) == 401
    assert status_of(token="t") == 401
    assert status_of("/health", token="t") == 200
    assert status_of("//health", token="t") == 401


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 200) for host in ("127.0.0.1:8000", "localhost", "LOCALHOST:80", "[::1]:8000", "127.3.2.1")),
        *((host, 403) for host in ("evil.example:8000", "localhost.evil.example", "10.0.0.1", "[::1", "")),
        ("a@127.0.0.1.b", 403),
    ],
)
def test_without_a_token_only_loopback_hosts_are_served(status_of, host, status):
    assert status_of(host=host) == status
    assert status_of("/health", host=host) == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost.evil.example"])
def test_without_a_token_web_pages_are_refused(status_of, origin):
    assert status_of(host="127.0.0.1:8000", origin=origin) == 403
    assert status_of(host="127.0.0.1:8000", origin="http://localhost:3000") == 200


def test_web_sockets_need_the_token_too(status_of):
    assert status_of(kind="websocket", token="t", host="127.0.0.1") == 1008
    assert status_of(kind="websocket", token="t", authorization="Bearer t") == 200
    assert status_of(kind="websocket", host="evil.example") == 1008


def test_what_a_killed_server_leaves_is_removed(tmp_path):
    """The reaper watches the process that started it, also after that became another program."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "bucket").touch()
    (tmp_path / "other").mkdir()
    worker = (
        "import subprocess, sys\nchild = subprocess.Popen(['sleep', '60'])\nprint(child.pid, flush=True)\nchild.wait()"
    )
    code = (
        "import os, sys\nfrom pl_grouprl.rollout.vllm.reaper import start_reaper\n"
        "start_reaper(sys.argv[1])\nos.execv(sys.executable, [sys.executable, '-c', sys.argv[2]])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "mine"), worker]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        child = int(server.stdout.readline())
        time.sleep(1.5)
        assert (tmp_path / "mine").exists()
        server.kill()
    deadline = time.monotonic() + 20
    while (tmp_path / "mine").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [folder.name for folder in tmp_path.iterdir()] == ["other"]
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
