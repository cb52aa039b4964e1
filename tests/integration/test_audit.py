"""`make audit`: what it makes of a report of pip-audit, and that it never passes for what was not audited."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import audit

PACKAGES = ["requests==2.19.0", "ruamel.yaml==0.18", "torch==2.13.0"]


def report(*, hole=True, skipped=()):
    """As pip-audit writes it: names in lower case, skipped packages without a version."""
    holes = [{"id": "PYSEC-2018-28", "aliases": ["CVE-2018-18074"], "fix_versions": ["2.20.0"], "description": "..."}]
    found = [
        {"name": "requests", "version": "2.19.0", "vulns": holes if hole else []},
        {"name": "ruamel-yaml", "version": "0.18", "vulns": []},
        {"name": "torch", "version": "2.13.0", "vulns": []},
    ]
    reason = "Dependency not found on PyPI and could not be audited"
    return {
        "dependencies": [
            {"name": own["name"], "skip_reason": reason} if own["name"] in skipped else own for own in found
        ],
        "fixes": [],
    }


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the audit with a command that prints a text, and notes; returns the exit code and what was printed."""

    def run(text, notes="", code=0):
        command = tmp_path / "pip-audit"
        (tmp_path / "report").write_text(text)
        command.write_text(f"#!/bin/sh\ncat {tmp_path}/report\necho 'no such host' >&2\nexit {code}\n")
        command.chmod(command.stat().st_mode | stat.S_IXUSR)
        (tmp_path / "known_holes.txt").write_text(notes)
        monkeypatch.setattr(audit, "installed", lambda: PACKAGES)
        code = audit.main(["--pip-audit", str(command), "--known", str(tmp_path / "known_holes.txt")])
        return code, capsys.readouterr().out

    return run


def test_a_hole_fails_until_it_has_a_note(run):
    code, out = run(json.dumps(report(hole=False)))
    assert (code, out.startswith("3 of 3 packages audited; 0 holes")) == (0, True)
    code, out = run(json.dumps(report()), code=1)
    assert code == 1
    assert "HOLE: requests==2.19.0: PYSEC-2018-28, fixed in 2.20.0" in out
    for name in ("PYSEC-2018-28", "CVE-2018-18074"):
        assert run(json.dumps(report()), f"# why\n\n{name} we follow no redirects\n", code=1)[0] == 0


@pytest.mark.parametrize("notes", ["PYSEC-2018-28\n", "PYSEC-2018-28 ok\n", "A not used here\nA not used here\n"])
def test_a_note_gives_a_reason(run, notes):
    with pytest.raises(ValueError, match=r"known_holes\.txt, line [12]"):
        run(json.dumps(report()), notes)


@pytest.mark.parametrize("skipped", [("torch",), ("requests", "ruamel-yaml", "torch")])
def test_what_was_not_audited_is_no_pass(run, skipped):
    """pip-audit exits with 0 for packages that the database does not know, and says that nothing was found."""
    code, out = run(json.dumps(report(hole=False, skipped=skipped)))
    assert code == 2
    assert f"{3 - len(skipped)} of 3 packages audited" in out
    assert "NOT AUDITED: " in out
    assert "torch==2.13.0" in out
    code, out = run("", code=1)
    assert code == 2
    assert "NOT AUDITED: pip-audit gave no report (exit code 1): no such host" in out


def test_all_installed_packages_are_audited_and_this_one_is_not():
    audit.read_notes(audit.KNOWN.read_text())
    packages = audit.installed()
    assert any(name.startswith("torch==") and "+" not in name for name in packages)
    assert not any(name.startswith("pl-grouprl==") for name in packages)
