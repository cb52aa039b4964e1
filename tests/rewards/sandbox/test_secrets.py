"""A program reaches no network, no secret or open file of ours, and writes nowhere but in its folder."""

from __future__ import annotations

import ast
import os
import socket
from pathlib import Path


def test_no_socket_reaches_anything(sandbox):
    abstract = f"\0sandbox-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as local:
        local.bind(abstract)
        local.listen()
        program = f"""
import os, socket
for family, address in (
    (socket.AF_INET, ("127.0.0.1", {listener.getsockname()[1]})),
    (socket.AF_INET6, ("::1", 1)),
    (socket.AF_UNIX, {abstract!r}),
    (socket.AF_VSOCK, (2, 1)),
    (socket.AF_NETLINK, (0, 0)),
    (socket.AF_PACKET, ("lo", 0)),
):
    try:
        with socket.socket(family, socket.SOCK_RAW if family in (16, 17) else socket.SOCK_STREAM) as own:
            own.connect(address)
        print("reached", family)
    except OSError as error:
        print(type(error).__name__)
"""
        result = sandbox.run(program)
    refused = "PermissionError"
    assert result.stdout.split() == [refused, refused, "ConnectionRefusedError", refused, refused, refused]


def test_no_secret_of_ours_is_in_reach(sandbox, monkeypatch, tmp_path):
    monkeypatch.setenv("PLANTED_SECRET", "planted-in-environment")
    (tmp_path / "secret").write_text("planted-in-file")
    (tmp_path / "secret").chmod(0o666)
    program = f"""
import gc, os
places = ["/proc/self/environ", "/proc/1/environ", "/proc/{os.getpid()}/environ", {str(tmp_path / "secret")!r}]
places += ["/etc/passwd", "/etc/shadow", os.path.expanduser("~root/.ssh"), {os.path.expanduser("~")!r} + "/.netrc"]
for place in places:
    try:
        print(open(place).read())
    except OSError as error:
        print(type(error).__name__)
print(sorted(os.environ))
print(sorted(os.listdir("/")))
"""
    result = sandbox.run(program)
    assert "planted" not in result.stdout
    lines = result.stdout.splitlines()
    assert set(lines[:-2]) <= {"FileNotFoundError", "PermissionError", "IsADirectoryError"}
    names = set(ast.literal_eval(lines[-2]))
    assert names <= {"PATH", "LANG", "HOME", "TMPDIR", "OMP_NUM_THREADS", "LC_CTYPE"}
    assert "proc" not in lines[-1]
    assert "home" not in lines[-1]


def test_no_open_file_of_ours_is_in_reach(sandbox, tmp_path):
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        result = sandbox.run(
            "import os\nfor number in range(64):\n    try:\n        os.fstat(number); print(number)\n"
            "    except OSError:\n        pass"
        )
    assert result.stdout.split() == ["0", "1", "2"]


def test_links_lead_nowhere(sandbox, tmp_path):
    (tmp_path / "target").write_text("planted-in-file")
    program = f"""
import os
targets = {str(tmp_path / "target")!r}, "/etc/shadow", "/proc/1/root", "../../../../etc/passwd"
for number, target in enumerate(targets):
    os.symlink(target, str(number))
    try:
        print(open(str(number)).read())
    except OSError as error:
        print(type(error).__name__)
os.symlink("/", "root")
try:
    open("root/program.py", "w")
except OSError as error:
    print(type(error).__name__)
"""
    assert sandbox.run(program).stdout.split() == ["FileNotFoundError"] * 4 + ["OSError"]


def test_nothing_but_its_own_folder_is_writable(sandbox, marker):
    program = f"""
import os, sys, json
open("{marker}", "w").write("x")
for path in ("/program.py", "/stdin", "/x", "/usr/x", "/dev/x", json.__file__, sys.prefix + "/x", sys.executable):
    try:
        open(path, "a").write("x")
        print("written", path)
    except OSError as error:
        pass
print(os.listdir("."))
"""
    assert sandbox.run(program).stdout == f"['{marker}']\n"
    assert sandbox.run("import os; print(os.listdir('.'))").stdout == "[]\n"
    assert not Path("/tmp", marker).exists()
    assert not Path("/sandbox").exists()
