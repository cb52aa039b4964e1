"""Modules import without the optional packages; those that run inside one say which they miss."""

import subprocess
import sys

OPTIONAL = {"triton", "vllm", "peft", "deepspeed", "fastapi", "starlette", "uvicorn", "bitsandbytes"}

INSIDE = {  # imported only where the package is needed: in the processes of vLLM and of the server, and by an option
    "pl_grouprl.rollout.server.app": "fastapi",
    "pl_grouprl.rollout.server.connections": "uvicorn",
    "pl_grouprl.rollout.server.serve": "uvicorn",
    "pl_grouprl.rollout.vllm.loaded_weights": "vllm",
    "pl_grouprl.rollout.vllm.lora_layers": "vllm",
    "pl_grouprl.rollout.vllm.preprocessed": "vllm",
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


def test_every_module_imports_without_optional_packages(record_property):
    found = subprocess.run([sys.executable, "-c", BLOCK + WALK], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    missing = [line.split()[1:] for line in lines if line.startswith("missing: ")]
    assert {name: package.split(".")[0] for name, package in missing} == INSIDE
    record_property("figure", f"{lines[-1]} imported without {len(OPTIONAL)} optional packages")


def test_a_kernel_without_its_package_says_so():
    code = BLOCK + (
        "import torch\n"
        "from pl_grouprl.functional.softmax_triton import write_rows\n"
        "row = torch.zeros(1, 4)\n"
        "torch.cuda.device_of = lambda tensor: __import__('contextlib').nullcontext()\n"
        "write_rows(row, row, torch.zeros(1), 1.0, torch.zeros(1), None)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ModuleNotFoundError: this kernel needs triton; install it with `pip install triton`" in found.stderr
