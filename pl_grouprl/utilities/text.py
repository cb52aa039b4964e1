"""Short descriptions of values, names and exceptions for error messages, without secrets."""

from __future__ import annotations

import html
import re
import sys
from base64 import b64encode
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote_plus


def printable(text: str) -> str:
    """The text with escapes for control characters, which a terminal would obey."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def metric_name(text: str) -> str:
    """A name from data as part of a metric's name: `printable`, and one to one."""
    return printable(re.sub(r"\\(?=[xuUntr\\])", r"\\\\", text))


def encodable(text: str) -> str:
    """The text with escapes for what standard output cannot encode, such as emoji in a file on Windows (cp1252)."""
    encoding = output_encoding()
    return text.encode(encoding, "backslashreplace").decode(encoding)


def output_encoding() -> str:
    """The encoding of standard output."""
    return getattr(sys.stdout, "encoding", None) or "utf-8"


def shorten(value: Any, length: int = 80) -> str:
    """The repr of a value, truncated."""
    text = repr(value)
    return text if len(text) <= length else text[:length] + "..."


def first_names(names: Sequence[str], limit: int = 3) -> str:
    """The first names and how many more there are, such as `a, b, c and 2 more`; `none` for no names."""
    more = len(names) - limit
    return (", ".join(names[:limit]) or "none") + (f" and {more} more" if more > 0 else "")


def describe_error(error: BaseException, length: int = 2000) -> str:
    """The text of an exception, truncated; its class name if the text is empty or cannot be read."""
    try:
        text = str(error)
    except BaseException:  # a user's __str__ may do anything, even call sys.exit
        text = ""
    return text[:length] or type(error).__name__


def mask_secret(text: str, secret: str | None) -> str:
    """Replace a secret by `***`, also where it is escaped for JSON, a URL or HTML, in hex, or inside a Base64 text.

    Args:
        text: Text of a server, which may quote the secret that it was sent.
        secret: A key or token in ASCII; None if there is none. One of less than 8 characters, such as the EMPTY that
            local servers are given, is not secret.
    """
    if not secret or len(secret) < 8:
        return text
    data = secret.encode()
    forms = [data.hex()]
    for shift in range(3):  # its first byte may be any of the three that four letters of Base64 encode
        letters = b64encode(bytes(shift) + data).decode()
        forms.append(letters[-(-8 * shift // 6) : 8 * (shift + len(data)) // 6])
    patterns = []
    for form in [secret, *(form for form in forms if len(form) > 3)]:
        pattern = ""
        for c in form:  # the ways to write a character, some of them nested
            written = {c, {"+": "-", "/": "_"}.get(c, c), quote_plus(c), html.escape(c)}
            plain, code = "|".join(map(re.escape, sorted(written))), f"{ord(c):02x}"
            json = rf"(?<!\\)\\{{1,8}}(?:{plain}|u00{code}|x{code})"
            entity = rf"&(?:amp;){{0,4}}#(?:0*{ord(c)}|x0*{code});"
            pattern += rf"(?:{plain}|{json}|%(?:25){{0,4}}{code}|{entity})"
        patterns.append(pattern)
    return re.sub("|".join(patterns), "***", text, flags=re.IGNORECASE)
