"""Modules import without the optional packages; those that run inside one say which they miss."""

import subprocess
import sys

import pytest

OPTIONAL = {"triton", "vllm", "peft", "deepspeed", "bitsandbytes"}

INSIDE = {  # imported only where the package is needed: in the processes of vLLM, and by an option
    "pl_grouprl.rollout.vllm.image_models": "vllm",
    "pl_grouprl.rollout.vllm.worker": "vllm",
    "pl_grouprl.training.adamw_8bit": "bitsandbytes",
}

BLOCK = f"""
import importlib, importlib.machinery, sys

class WithoutOptional(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL}:
            return None
        return super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = WithoutOptional
"""

WALK = """
import pkgutil
import pl_grouprl

for module in pkgutil.walk_packages(pl_grouprl.__path__, "pl_grouprl.", onerror=lambda name: None):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        print("missing:", module.name, error.name)
print(len([name for name in sys.modules if name.startswith("pl_grouprl.")]), "modules")
"""


KERNEL = """
import contextlib, torch
from pl_grouprl.functional.softmax_triton import write_rows

row = torch.zeros(1, 4)
torch.cuda.device_of = lambda tensor: contextlib.nullcontext()
try:
    write_rows(row, row, torch.tensor([0]), 0, row[0], 1.0, row[0], row[0], None)
except ModuleNotFoundError as error:
    print("kernel:", error)
"""


@pytest.fixture(scope="module")
def printed():
    """What a process without the optional packages prints."""
    found = subprocess.run([sys.executable, "-c", BLOCK + WALK + KERNEL], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()


def test_every_module_imports_without_optional_packages(printed, record_property):
    missing = [line.split()[1:] for line in printed if line.startswith("missing: ")]
    assert {name: package.split(".")[0] for name, package in missing} == INSIDE
    (modules,) = [line for line in printed if line.endswith(" modules")]
    record_property("figure", f"{modules} imported without {len(OPTIONAL)} optional packages")


def test_a_kernel_without_its_package_says_so(printed):
    assert "kernel: this kernel needs triton; install it with `pip install triton`." in printed
