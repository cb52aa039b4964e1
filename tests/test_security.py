"""What the package relies on is new enough, and nothing that it reads is executed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import pl_grouprl

PACKAGE = Path(pl_grouprl.__file__).parent
ROOT = PACKAGE.parent
FLOORS = {"lightning": (2, 6, 6), "torch": (2, 6)}
"""Older ones run code of a checkpoint."""
UNPICKLE = {
    "episodes/runner.py": 2,  # in a worker, from the process that has started it
    "rewards/workers.py": 2,  # in a worker, from the process that has started it
}
"""Calls of `pickle.loads` that are allowed, by file."""
TREES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def calls(tree):
    """The calls in a file: the name of the function with its module, and the call."""
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def version(text):
    return tuple(map(int, text.split(".")))


@pytest.mark.parametrize("name", FLOORS)
def test_versions_meet_the_floors(name):
    pinned = re.search(rf"^{name}==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    allowed = re.search(rf'^    "{name}>=([\d.]+)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version(pinned[1]) >= FLOORS[name]
    assert version(allowed[1]) >= FLOORS[name]


def test_every_load_of_tensors_runs_no_code():
    loads = [(path, call) for path, tree in TREES.items() for name, call in calls(tree) if name == "torch.load"]
    assert loads
    for path, call in loads:
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert given.get("weights_only") == "True", f"{path}:{call.lineno}"


def test_nothing_is_unpickled_but_in_workers():
    names = {"pickle.load", "pickle.loads", "pickle.Unpickler", "cloudpickle.loads", "dill.loads", "joblib.load"}
    names |= {"marshal.loads", "shelve.open", "yaml.load", "yaml.unsafe_load", "np.load", "numpy.load"}
    found = {
        path: sum(name in names and "allow_pickle=False" not in ast.unparse(call) for name, call in calls(tree))
        for path, tree in TREES.items()
    }
    assert {path: number for path, number in found.items() if number} == UNPICKLE


def test_pipes_between_processes_carry_bytes():
    """`Connection.recv` unpickles; `recv_bytes` does not. torch's collectives of objects unpickle, too."""
    objects = {"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "recv_object_list"}
    for path, tree in TREES.items():
        for name, call in calls(tree):
            last = name.rpartition(".")[2]
            assert last not in objects | {"recv"}, f"{path}:{call.lineno} calls {name}"
            in_sandbox = str(path) == "rewards/sandbox/function_call.py"  # only its driver, in the sandbox, evaluates
            assert in_sandbox or name not in ("eval", "exec"), f"{path}:{call.lineno} calls {name}"


def test_imported_names_are_seen():
    """The tests above look for `torch.load` and `pickle.loads` under these names."""
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in ("torch", "pickle", "numpy", "yaml"):
                assert not {"load", "loads", "Unpickler"} & {alias.name for alias in node.names}, path
            if isinstance(node, ast.Import):
                renamed = {alias.name: alias.asname for alias in node.names if alias.asname}
                assert not renamed.keys() & {"torch", "pickle", "yaml"}, path
