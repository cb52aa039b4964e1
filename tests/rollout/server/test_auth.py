"""Who may ask, where buckets find no room, and what is left of a server that is killed."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pl_grouprl.rollout.server.auth import TokenAuth


def status_of(path="/info", token=None, **headers):
    """HTTP's status of an answer; the application itself says 200."""
    sent = []

    async def app(scope, receive, send):
        await send({"status": 200})

    async def send(message):
        sent.append(message)

    named = [(name.encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(TokenAuth(app, token)({"type": "http", "path": path, "headers": named}, None, send))
    return sent[0]["status"]


def test_a_token_is_required():
    assert status_of(token="t", authorization="Bearer t", host="sampler.example") == 200
    for given in ("Bearer T", "Bearer t ", "t", "Basic t", ""):
        assert status_of(token="t", authorization=given) == 401
    assert status_of(token="t") == 401
    assert status_of("/health", token="t") == 200
    assert status_of("//health", token="t") == 401


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "LOCALHOST:80", "[::1]:8000", "127.3.2.1"])
def test_without_a_token_loopback_hosts_are_accepted(host):
    assert status_of(host=host) == 200


@pytest.mark.parametrize(
    "host", ["evil.example:8000", "localhost.evil.example", "10.0.0.1", "[::1", "", "a@127.0.0.1.b"]
)
def test_without_a_token_other_hosts_are_refused(host):
    assert status_of(host=host) == 403
    assert status_of("/health", host=host) == 200


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_bucket_without_room_is_refused():
    app = pytest.importorskip("pl_grouprl.rollout.server.app", reason="fastapi is not installed")

    class Request:
        async def stream(self):
            yield b"abc"

    with pytest.raises(app.RefusalError, match="has no room for 3 bytes; make some, or lower bucket_mib") as refused:
        asyncio.run(app._store(Request(), Path("/dev/full"), 3))
    assert refused.value.status == 507


def test_what_a_killed_server_leaves_is_removed(tmp_path):
    pytest.importorskip("psutil")
    (tmp_path / "mine-1").mkdir()
    (tmp_path / "mine-1" / "bucket").touch()
    (tmp_path / "other").mkdir()
    code = (
        "import sys, time\nfrom pl_grouprl.rollout.server.reaper import start_reaper\n"
        "start_reaper([sys.argv[1]])\nprint('on', flush=True)\ntime.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "mine-*")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout.readline() == "on\n"
        time.sleep(0.3)
        assert (tmp_path / "mine-1").exists()
        server.kill()
    deadline = time.monotonic() + 20
    while (tmp_path / "mine-1").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [folder.name for folder in tmp_path.iterdir()] == ["other"]
