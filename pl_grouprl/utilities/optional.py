"""Which optional packages are installed, and how to install a missing one."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from pl_grouprl.utilities.processes import require_system

BITSANDBYTES_AVAILABLE = find_spec("bitsandbytes") is not None
DATASETS_AVAILABLE = find_spec("datasets") is not None
FLASH_ATTENTION_3_AVAILABLE = find_spec("flash_attn_interface") is not None
FLASH_ATTENTION_4_AVAILABLE = any(  # without importing its parent, which may be the package of FlashAttention-2
    Path(folder, "cute").is_dir()
    for spec in [find_spec("flash_attn")]
    for folder in (spec and spec.submodule_search_locations) or ()
)
GGUF_AVAILABLE = find_spec("gguf") is not None and find_spec("accelerate") is not None
LIGER_AVAILABLE = find_spec("liger_kernel") is not None
MATH_VERIFY_AVAILABLE = find_spec("math_verify") is not None
MCP_AVAILABLE = find_spec("mcp") is not None
OPENENV_AVAILABLE = find_spec("openenv") is not None
PEFT_AVAILABLE = find_spec("peft") is not None
REASONING_GYM_AVAILABLE = find_spec("reasoning_gym") is not None
RENDERERS_AVAILABLE = find_spec("renderers") is not None
TRACKIO_AVAILABLE = find_spec("trackio") is not None
VERIFIERS_AVAILABLE = find_spec("verifiers") is not None
VLLM_AVAILABLE = find_spec("vllm") is not None


def require(available: bool, what: str, extra: str) -> None:
    """Raise an error with the install command if an optional package is missing.

    Args:
        available: The package's flag in this file.
        what: What needs it, for the message.
        extra: Name of the optional dependency of this package that installs it.

    Raises:
        ModuleNotFoundError: If it is missing.
    """
    if not available:
        raise ModuleNotFoundError(
            f"{what} needs an optional package; install it with `pip install 'pl-grouprl[{extra}]'`."
        )


def check_vllm_system(what: str) -> None:
    """Raise on a system where vLLM is missing and cannot be installed.

    Raises:
        ValueError: Says what to use instead.
    """
    require_system(
        VLLM_AVAILABLE or sys.platform == "linux",
        what,
        "vLLM is built for Linux only",
        "sample with transformers (HFRolloutEngine, the default), or from a server on Linux (VLLMServerRolloutEngine)",
    )


class Absent:
    """A placeholder for a missing package: its decorators work at import, but decorated kernels fail when called.

    Args:
        package: Name of the package.
    """

    def __init__(self, package: str) -> None:
        self._package = package

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Absent:
        """Replace the decorated function."""
        return self

    def __getitem__(self, key: Any) -> NoReturn:
        raise ModuleNotFoundError(f"this kernel needs {self._package}; install it with `pip install {self._package}`.")
