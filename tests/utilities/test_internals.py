"""Which non-public names of other libraries the package uses: all are listed, and all exist in what is installed."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

import pl_grouprl
from pl_grouprl.utilities.internals import NAMES, cache_argument

ROOT = Path(pl_grouprl.__file__).parent
OUR_OWN = {"_asdict", "_fields", "_make", "_replace", "_getframe", "_is_protocol", "_exit", "_type", "_C"}
"""Of Python's named tuples, frames and protocols; `_C` is a module's name in a message."""


def private(name):
    return name.startswith("_") and not name.endswith("__")


def names_defined(node):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    return [node.attr] if own and isinstance(node.ctx, ast.Store) else []


def names_used(node):
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
        return [value.value for value in node.args[1:2] if isinstance(value, ast.Constant)]
    if isinstance(node, ast.ImportFrom) and not str(node.module).startswith("pl_grouprl"):
        return [alias.name for alias in node.names]
    return []


def used_and_defined():
    """Private names that the package reads, with the files; and names that it defines itself."""
    used, defined = {}, set(OUR_OWN)
    for file in ROOT.rglob("*.py"):
        if file.name == "internals.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            defined.update(names_defined(node))
            for name in filter(private, names_used(node)):
                used.setdefault(name, set()).add(str(file.relative_to(ROOT)))
    return used, defined


def test_every_private_name_is_listed():
    used, defined = used_and_defined()
    listed = {name for names in NAMES.values() for name in names.split()}
    assert {name: files for name, files in used.items() if name not in defined | listed} == {}


def resolve(path):
    """A module, or an attribute of one."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        module, _, name = path.rpartition(".")
        if not module or not path.startswith(str(error.name)):  # something that is not installed
            raise
        return getattr(resolve(module), name)


def has(owner, name):
    if hasattr(owner, name):
        return True
    if not isinstance(owner, type):
        return False
    sources = (
        inspect.getsource(kind) for kind in owner.__mro__ if kind.__module__ not in ("builtins", "typing", "abc")
    )
    return any(re.search(rf"\b{name}\b", source) for source in sources)


@pytest.mark.parametrize("owner", NAMES)
def test_every_listed_name_exists(owner):
    pytest.importorskip(owner.partition(".")[0])
    found = getattr(torch.ops, owner.rpartition(".")[2]) if owner.startswith("torch.ops") else resolve(owner)
    assert [name for name in NAMES[owner].split() if not has(found, name)] == []


def test_the_cache_argument():
    from transformers import LlamaForCausalLM, Mamba2ForCausalLM, RwkvForCausalLM

    def by_name(input_ids, past_key_values=None, cache=None): ...

    def by_type(input_ids, memory: "transformers.Cache | None" = None): ...  # noqa: F821

    def formerly(input_ids, past_key_values=None): ...

    assert cache_argument(formerly) == "past_key_values"
    for model in (LlamaForCausalLM, Mamba2ForCausalLM):
        assert cache_argument(model.forward) in ("cache", "past_key_values", "cache_params")
    assert cache_argument(RwkvForCausalLM.forward) is None
    assert cache_argument(by_name) in ("cache", "past_key_values")
    assert cache_argument(by_type) == "memory"
