"""Checks the address and API key options of `Judge`, and reads the key."""

from __future__ import annotations

import os
import re
from urllib.parse import urlsplit

from pl_grouprl.rewards.base import RewardConfigurationError


def chat_url(base_url: str) -> str:
    """The URL that requests are posted to."""
    return f"{base_url.rstrip('/')}/chat/completions"


def check_base_url(url: str) -> None:
    """Refuse anything but an HTTP URL without credentials.

    Raises:
        ValueError: Names the option.
    """
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise ValueError(f"Judge.base_url is {url!r}; it must look like http://localhost:8000/v1.")
    if "@" in parts.netloc:
        raise ValueError(
            "Judge.base_url has a user name or password; put the key in an environment variable: api_key_env."
        )


def check_key_variable(name: str | None) -> None:
    """Refuse anything but None or the name of an environment variable.

    Raises:
        ValueError: Names the option, and does not show its value.
    """
    if name is not None and not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise ValueError(
            "Judge.api_key_env is not the name of an environment variable (its value is not shown, as it might be the "
            "key); put the key in a variable and pass the variable's name, such as OPENAI_API_KEY."
        )


def read_key(variable: str | None, judge: str) -> str | None:
    """Read the key from an environment variable; None without a variable.

    Args:
        variable: Name of the variable.
        judge: The judge whose key it is, for the error.

    Raises:
        RewardConfigurationError: If it is not set, or cannot be sent in a header.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not (key and key.isascii() and key.isprintable()):
        raise RewardConfigurationError(
            f"{judge}: the environment variable {variable} (api_key_env) "
            f"{'has characters that a header must not have' if key else 'is not set'}; set it to the API key."
        )
    return key
