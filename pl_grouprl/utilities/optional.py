"""Which optional packages are there, and what to type where one is missing."""

from __future__ import annotations

from importlib.util import find_spec

PEFT_AVAILABLE = find_spec("peft") is not None
VLLM_AVAILABLE = find_spec("vllm") is not None


def require(available: bool, what: str, extra: str) -> None:
    """Refuse in the constructor what an optional package is needed for.

    Args:
        available: The package's flag in this file.
        what: What needs it, for the message.
        extra: Name of the optional dependency of this package that installs it.

    Raises:
        ModuleNotFoundError: With the install command, if it is missing.
    """
    if not available:
        raise ModuleNotFoundError(
            f"{what} needs an optional package; install it with `pip install 'pl-grouprl[{extra}]'`."
        )
