"""What the wheel holds."""

import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("setuptools") is None, reason="builds without a network, so setuptools must be installed")
def test_the_wheel_has_every_configuration_and_template(tmp_path):
    build = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(ROOT)]
    done = subprocess.run([sys.executable, *build], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    configs = {f"pl_grouprl/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}
    templates = {str(path.relative_to(ROOT)) for path in (ROOT / "pl_grouprl").rglob("*.jinja")}
    assert configs
    assert templates
    assert configs | templates <= held


def test_an_installed_package_finds_its_configurations(tmp_path, monkeypatch):
    from pl_grouprl import cli

    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "ddp.yaml").touch()
    assert cli.CONFIG_FOLDERS[1:] == (ROOT / "configs", ROOT / "pl_grouprl" / "configs")
    monkeypatch.setattr(cli, "CONFIG_FOLDERS", (Path("nowhere"), tmp_path))
    assert cli.find_config("strategy/ddp") == str(tmp_path / "strategy" / "ddp.yaml")
